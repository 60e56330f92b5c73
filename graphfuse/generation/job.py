"""What there is to generate: a job of the caller's, and the requests it becomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphfuse.generation.sampling import SamplingParams
from graphfuse.generation.tokenize import Prompt


@dataclass(frozen=True)
class Job:
    """One prompt for `LLM.complete`. `key` comes back with its completions."""

    key: Any
    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True)
class Request:
    """One completion of a prompt, on its way through the engine."""

    index: int
    """The number of its prompt, in the order in which they came."""

    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    sample: int = 0
    """Which of the `params.n` completions of the prompt."""
