"""`SamplingParams`: how the tokens of one completion are chosen, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from graphfuse.errors import GenerationError, brief
from graphfuse.generation.json_schema import checked_schema

MAX_LOGPROBS = 20
"""The most alternatives that `SamplingParams.logprobs` gives for a token."""


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is sampled. A value that cannot be used raises `GenerationError`.

    The order of what is done to a token's logit is that of transformers: `repetition_penalty`, `min_tokens`,
    `json_schema`, and unless greedy `temperature`, `top_k`, `top_p`, `min_p`.
    """

    max_tokens: int = 128
    """The most tokens to generate, at least 1. The context length may end a completion earlier ("length")."""

    temperature: float = 0.0
    """0 takes the most likely token (greedy); otherwise the logits are divided by it before the softmax."""

    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens that holds this share of the probability, in (0, 1]. Applies
    to what `top_k` left."""

    top_k: int = 0
    """Sample from this many most likely tokens; 0 takes all. Of equally likely ones at the edge the lower ids stay."""

    seed: int | None = None
    """Makes sampling reproducible, whatever else is in the batch. `None` draws a new seed for each completion."""

    stop: Sequence[str] = ()
    """Strings that end a completion. The text is cut before the first one."""

    ignore_eos: bool = False
    """Go on after an end-of-sequence token, for benchmarks."""

    min_p: float = 0.0
    """Leave out tokens less likely than this share of the most likely one, in [0, 1]."""

    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens that the prompt or the completion already holds
    (Keskar et al. 2019). Above 1 discourages repetition, below 1 encourages it; in [0.01, 100]."""

    min_tokens: int = 0
    """Tokens that end a completion are not chosen before it has this many. Stop strings still end it."""

    stop_token_ids: Sequence[int] = ()
    """Ids that end a completion, as an end-of-sequence token does."""

    logprobs: int | None = None
    """Give the log-probability of each token, and this many most likely ones with theirs, 0 … 20 (`TokenLogprob`)."""

    n: int = 1
    """Completions of the prompt, each with a seed of its own."""

    json_schema: dict[str, Any] | str | None = None
    """The text is JSON that satisfies this schema, unless it ends early: by "length", or by a stop string or id.
    Kept as JSON text. Needs the extra `guided`. Properties come in the order of the schema; those that it does not name
    are not generated."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if not isinstance(self.stop, Iterable):
            raise GenerationError(f"stop={brief(self.stop)} is neither text nor a list of texts. Give one of them.")
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
        self._check_choice()
        self._check_end()

    def _check_choice(self) -> None:
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise GenerationError(f"min_p={self.min_p!r} lies outside [0, 1]. Use 0.0 to keep every token.")
        if not _is_number(self.repetition_penalty) or not 0.01 <= self.repetition_penalty <= 100:
            raise GenerationError(
                f"repetition_penalty={self.repetition_penalty!r} lies outside [0.01, 100]. Use 1.0 for none."
            )
        if self.logprobs is not None and (not _is_int(self.logprobs) or not 0 <= self.logprobs <= MAX_LOGPROBS):
            raise GenerationError(
                f"logprobs={self.logprobs!r} is not a number in 0 … {MAX_LOGPROBS}. Use None for no log-probabilities."
            )
        if not _is_int(self.n) or self.n < 1:
            raise GenerationError(f"n={self.n!r} is not a positive number. Ask for at least 1 completion.")
        if self.n > 1 and self.greedy:
            raise GenerationError(f"n={self.n} greedy completions would be alike. Use a temperature above 0, or n=1.")

    def _check_end(self) -> None:
        if isinstance(self.stop_token_ids, str | bytes) or not isinstance(self.stop_token_ids, Iterable):
            raise GenerationError(f"stop_token_ids={brief(self.stop_token_ids)} is no list of ids. Give a list.")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if not all(_is_int(token_id) and token_id >= 0 for token_id in self.stop_token_ids):
            raise GenerationError(
                f"stop_token_ids={brief(self.stop_token_ids)} holds something other than ids. Give whole numbers ≥ 0."
            )
        if not isinstance(self.ignore_eos, bool):
            raise GenerationError(f"ignore_eos={brief(self.ignore_eos)} is neither True nor False. Give one of them.")
        if not _is_int(self.min_tokens) or self.min_tokens < 0:
            raise GenerationError(f"min_tokens={self.min_tokens!r} is not a number ≥ 0. Use 0 for no minimum.")
        if self.min_tokens > self.max_tokens:
            raise GenerationError(
                f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}. Give a smaller one."
            )
        if self.json_schema is None:
            return
        object.__setattr__(self, "json_schema", checked_schema(self.json_schema))
        if self.ignore_eos or self.min_tokens:
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise GenerationError(f"{name} would go on after the end of the JSON text. Leave it out with json_schema.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
