"""Text generation: prompts in, completions out, the same on every rank."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphfuse.generation.completion import Completion, GenerationStats
    from graphfuse.generation.job import Job
    from graphfuse.generation.llm import LLM
    from graphfuse.generation.sampling import SamplingParams

_HOMES = {
    "LLM": "graphfuse.generation.llm",
    "Completion": "graphfuse.generation.completion",
    "Job": "graphfuse.generation.job",
    "GenerationStats": "graphfuse.generation.completion",
    "SamplingParams": "graphfuse.generation.sampling",
}

__all__ = ["LLM", "Completion", "GenerationStats", "Job", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Imported on first use: the process that only starts the ranks needs the sampling parameters, not a model."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'graphfuse.generation' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
