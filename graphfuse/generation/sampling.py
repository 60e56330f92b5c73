"""`SamplingParams`: how the tokens of one completion are chosen, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from graphfuse.errors import GenerationError


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is sampled. A value that cannot be used raises `GenerationError`."""

    max_tokens: int = 128
    """The most tokens to generate, at least 1. The context length may end a completion earlier ("length")."""

    temperature: float = 0.0
    """0 takes the most likely token (greedy); otherwise the logits are divided by it before the softmax."""

    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens that holds this share of the probability, in (0, 1]. Applies
    to what `top_k` left."""

    top_k: int = 0
    """Sample from this many most likely tokens; 0 takes all."""

    seed: int | None = None
    """Makes sampling reproducible, whatever else is in the batch. `None` draws a new seed for each completion."""

    stop: Sequence[str] = ()
    """Strings that end a completion. The text is cut before the first one."""

    ignore_eos: bool = False
    """Go on after an end-of-sequence token, for benchmarks."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        if not _is_int(self.max_tokens) or self.max_tokens < 1:
            raise GenerationError(f"max_tokens={self.max_tokens!r} is not a positive number. Ask for at least 1 token.")
        if not _is_number(self.temperature) or not math.isfinite(self.temperature) or self.temperature < 0:
            raise GenerationError(
                f"temperature={self.temperature!r} is not a finite number ≥ 0. Use 0 for greedy decoding, or e.g. 0.7."
            )
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise GenerationError(f"top_p={self.top_p!r} lies outside (0, 1]. Use 1.0 to keep every token.")
        if not _is_int(self.top_k) or self.top_k < 0:
            raise GenerationError(f"top_k={self.top_k!r} is not a number ≥ 0. Use 0 to keep every token.")
        if self.seed is not None and (not _is_int(self.seed) or not 0 <= self.seed < 2**63):
            raise GenerationError(f"seed={self.seed!r} lies outside 0 … 2**63 - 1. Give a whole number from there.")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise GenerationError(f"stop={self.stop!r} holds something other than non-empty strings. Give only those.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
