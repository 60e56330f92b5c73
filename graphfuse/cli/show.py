"""Print a report: as wide as the terminal, or as wide as it likes into a file or pipe. Or write it as a page."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from graphfuse.errors import ConfigError, brief
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


def write_page(report: Report, file: Path, title: str) -> None:
    """Write the report's page, and say where. Raises `ConfigError` where it cannot be written."""
    try:
        file.write_text(report.to_html(title), encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no name that a file can have
        raise ConfigError(f"The page cannot be written: {brief(error)}. Give another file.") from error
    print(f"Report page: {file}", file=sys.stderr)
