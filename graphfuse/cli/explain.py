"""`graphfuse explain`: what would become of a model's reductions and experts; no weights, GPU or other processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphfuse.cli.errors import plain_errors


def explain(
    model: Annotated[str, typer.Option(help="Checkpoint folder or hub id. Only its config is read.")],
    tp: Annotated[int, typer.Option(help="Number of tensor-parallel ranks to pretend.")],
    device_facts: Annotated[
        Path | None, typer.Option(help="Facts of another host, as in configs/facts. Default: this one.")
    ] = None,
    moe_config_dir: Annotated[
        str | None, typer.Option(help="Folder of tuned MoE kernel configs to look in before the shipped ones.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page for a browser to this file.")] = None,
) -> None:
    """Show what would become of each reduction and each layer of experts of a model on a host, without running it."""
    with plain_errors():
        from graphfuse.config import FuseConfig

        config = FuseConfig(moe_config_dir=moe_config_dir)

        from graphfuse.cli.show import show_report, write_page
        from graphfuse.explain import explain_checkpoint

        report = explain_checkpoint(model, tp, device_facts, config=config)
        if html is not None:
            write_page(report, html, f"{Path(model).resolve().name} at TP {tp}")
        if as_json:
            print(report.dumps())
        else:
            show_report(report, to_stdout=True)
