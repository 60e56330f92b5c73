"""`graphfuse`: the command line. Each command is a file of its own, and imports torch only when it runs."""

from __future__ import annotations

import typer

from graphfuse.cli.allreduce import bench_allreduce, tune_allreduce
from graphfuse.cli.bench_generate import bench_generate
from graphfuse.cli.bench_moe import bench_moe
from graphfuse.cli.doctor_command import doctor
from graphfuse.cli.explain import explain
from graphfuse.cli.generate import generate
from graphfuse.cli.measuring import bench_plot
from graphfuse.cli.models import models
from graphfuse.cli.profile import profile
from graphfuse.cli.tune_moe import tune_moe

app = typer.Typer(
    name="graphfuse",
    help="Tensor-parallel LLM inference with fused reductions.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (generate, explain, profile, doctor, models):
    app.command()(command)

bench = typer.Typer(help="Measure graphfuse's parts beside their alternatives.", no_args_is_help=True)
bench.command("allreduce")(bench_allreduce)
bench.command("generate")(bench_generate)
bench.command("moe")(bench_moe)
bench.command("plot")(bench_plot)
app.add_typer(bench, name="bench")

tune = typer.Typer(help="Measure this host and write what graphfuse should choose on it.", no_args_is_help=True)
tune.command("allreduce")(tune_allreduce)
tune.command("moe")(tune_moe)
app.add_typer(tune, name="tune")

if __name__ == "__main__":
    app()
