"""`graphfuse doctor`: the command; what it finds and shows is in `doctor.py`."""

from __future__ import annotations

from typing import Annotated

import typer

from graphfuse.cli.errors import plain_errors


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False) -> None:
    """Show versions, GPUs, links, what the gate decides here, and what is missing."""
    with plain_errors():
        from graphfuse.cli.doctor import collect, render

        found = collect()
        if as_json:
            import json

            print(json.dumps(found, indent=1, ensure_ascii=False))
        else:
            render(found)
