"""`graphfuse models`: the families there are definitions of."""

from __future__ import annotations

from typing import Annotated

import typer

from graphfuse.cli.errors import plain_errors


def models(as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False) -> None:
    """List the families of models that graphfuse defines itself; transformers' own definitions serve the others."""
    with plain_errors():
        import json
        from dataclasses import asdict

        from rich.box import MARKDOWN
        from rich.console import Console
        from rich.table import Table

        from graphfuse.models.registry import families

        if as_json:
            rows = [{"model_types": kinds, **asdict(about)} for about, kinds in families()]
            print(json.dumps(rows, indent=1, ensure_ascii=False))
            return
        table = Table("family", "architectures", "attention", "MoE", "checkpoints", "tested against", box=MARKDOWN)
        for about, _ in families():
            names, formats = "\n".join(about.architectures), ", ".join(about.formats)
            table.add_row(about.name, names, about.attention, about.moe, formats, about.tested_against)
        console = Console()
        if not console.is_terminal:
            console.width = 240  # a file or pipe is as wide as it likes
        console.print(table)
