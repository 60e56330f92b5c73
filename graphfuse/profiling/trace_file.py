"""The trace of a torch profiler, as it would write it into a file."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch


def trace_of(profiler: torch.profiler.profile) -> dict[str, Any]:
    """Chrome's format, read back: there is no other way to all of its events."""
    with tempfile.TemporaryDirectory(prefix="graphfuse-") as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return json.loads(file.read_text(encoding="utf-8", errors="replace"))
