"""Numbered graphs of a run for people, and what each rule changed: files in a folder, and artifacts that tlparse shows.

000_before.py, 001_<rule>.py, ...    the graph as readable code
001_<rule>.diff, ...                 a unified diff to the graph before, for rules that changed it
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import torch
from torch.fx import GraphModule

from graphfuse.errors import ConfigError


class Dump:
    """Writes into `folder`, and into the structured trace (`TORCH_TRACE`); with None only into the latter, if there is
    one."""

    def __init__(self, folder: str | None, prefix: str = "") -> None:
        self._folder = Path(folder) if folder else None
        self._prefix = prefix
        self._number = 0
        self._last: tuple[str, str] | None = None
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except (OSError, ValueError) as error:  # ValueError: no name that a folder can have
                raise ConfigError(
                    f"dump={folder!r} cannot be made a folder ({error}). Give a writable path."
                ) from error

    def write(self, step: str, module: GraphModule) -> None:
        name = f"{self._prefix}{self._number:03d}_{step}"
        self._number += 1
        asked_for: list[str] = []

        def code() -> str:
            asked_for.append(module.print_readable(print_output=False, include_stride=False))
            return asked_for[-1]

        _artifact(name, code)
        if self._folder is not None:
            (self._folder / f"{name}.py").write_text(asked_for[0] if asked_for else code())
        if not asked_for:  # nobody reads along, and the code of a graph takes longer than most rules
            return
        if self._last is not None and self._last[1] != asked_for[0]:
            changes = _diff(self._last, (name, asked_for[0]))
            _artifact(f"{name}.diff", lambda: changes)
            if self._folder is not None:
                (self._folder / f"{name}.diff").write_text(changes)
        self._last = (name, asked_for[0])


def _artifact(name: str, payload: Callable[[], str]) -> None:
    torch._logging.trace_structured(
        "artifact", metadata_fn=lambda: {"name": f"graphfuse_{name}", "encoding": "string"}, payload_fn=payload
    )


def _diff(before: tuple[str, str], after: tuple[str, str]) -> str:
    """A unified diff of two (name, code)."""
    (old, old_code), (new, new_code) = before, after
    lines = difflib.unified_diff(old_code.splitlines(), new_code.splitlines(), f"{old}.py", f"{new}.py", lineterm="")
    return "\n".join(lines) + "\n"
