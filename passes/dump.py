"""Numbered graphs of a run for people: files in a folder, and artifacts that tlparse shows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.fx import GraphModule

from graphfuse.errors import ConfigError


class Dump:
    """Writes `000_before.py`, `001_<rule>.py`, ... into `folder`; with None only the structured trace gets them."""

    def __init__(self, folder: str | None, prefix: str = "") -> None:
        self._folder = Path(folder) if folder else None
        self._prefix = prefix
        self._number = 0
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

        def code() -> str:
            return module.print_readable(print_output=False, include_stride=False)

        torch._logging.trace_structured(
            "artifact", metadata_fn=lambda: {"name": f"graphfuse_{name}", "encoding": "string"}, payload_fn=code
        )
        if self._folder is not None:
            (self._folder / f"{name}.py").write_text(code())
