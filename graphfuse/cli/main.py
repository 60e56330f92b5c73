"""`graphfuse`: the command line. Each command is a file of its own, and imports torch only when it runs."""

from __future__ import annotations

import typer

from graphfuse.cli.allreduce import bench, tune
from graphfuse.cli.doctor_command import doctor
from graphfuse.cli.explain import explain
from graphfuse.cli.generate import generate

app = typer.Typer(
    name="graphfuse",
    help="Tensor-parallel LLM inference with fused reductions.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (generate, explain, doctor):
    app.command()(command)
app.add_typer(bench, name="bench")
app.add_typer(tune, name="tune")

if __name__ == "__main__":
    app()
