"""Print a report: as wide as the terminal, or as wide as it likes into a file or pipe."""

from __future__ import annotations

import sys

from rich.console import Console

from graphfuse.report import Report


def show_report(report: Report | None, *, to_stdout: bool = False) -> None:
    """To stderr, beside an answer that belongs to stdout, unless the report is itself the answer."""
    if report is None:
        return
    console = Console(stderr=not to_stdout)
    if console.is_terminal:
        console.print(report)
    else:
        print(report.to_text(), file=sys.stdout if to_stdout else sys.stderr)
