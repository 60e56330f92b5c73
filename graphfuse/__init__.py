"""graphfuse: fuse the reductions of tensor-parallel LLM inference by rewriting the graph instead of the models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphfuse.backend import last_report
    from graphfuse.compiler import CompiledModel, compile
    from graphfuse.config import FuseConfig
    from graphfuse.errors import GraphfuseError
    from graphfuse.generation import LLM, Completion, Job, SamplingParams
    from graphfuse.passes import default_rules
    from graphfuse.weights.load import load

_HOMES = {
    "LLM": "graphfuse.generation",
    "Completion": "graphfuse.generation",
    "CompiledModel": "graphfuse.compiler",
    "FuseConfig": "graphfuse.config",
    "GraphfuseError": "graphfuse.errors",
    "Job": "graphfuse.generation",
    "SamplingParams": "graphfuse.generation",
    "compile": "graphfuse.compiler",
    "default_rules": "graphfuse.passes",
    "last_report": "graphfuse.backend",
    "load": "graphfuse.weights.load",
}

__all__ = [
    "LLM",
    "CompiledModel",
    "Completion",
    "FuseConfig",
    "GraphfuseError",
    "Job",
    "SamplingParams",
    "compile",
    "default_rules",
    "last_report",
    "load",
]


def __getattr__(name: str) -> Any:
    """Public names, imported on first use: `graphfuse --help` must not wait for torch."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'graphfuse' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
