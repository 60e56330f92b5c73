"""What a generation gives back: the completions, and how fast they came."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class TokenLogprob:
    """How likely one token was to the model: natural logarithms of the softmax of its own logits, before temperature,
    penalties and truncation."""

    token_id: int
    logprob: float

    top: list[tuple[int, float]]
    """The most likely tokens and their log-probabilities, the likeliest first; the chosen one may be among them."""


@dataclass(frozen=True)
class Completion:
    """One completed prompt."""

    text: str
    """The generated text, without special tokens and cut before a stop string."""

    token_ids: list[int]
    """Every generated token, the end-of-sequence token or those of the stop string included."""

    finish_reason: FinishReason
    """"stop": an end-of-sequence token, a stop id or string. "length": `max_tokens` or the context length was
    reached."""

    prompt_token_ids: list[int]

    logprobs: list[TokenLogprob] | None = None
    """One for each of `token_ids`, if `SamplingParams.logprobs` asked for them."""

    seconds: float = field(default=0.0, compare=False)
    """From when the prompt was taken up to the last token, on this rank."""


@dataclass
class GenerationStats:
    """Tokens and seconds of one `generate` or `complete`. Prefill is of prompts, and of what is computed again after a
    preemption; a step that does both is shared out by tokens. Padding does not count."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    shared_tokens: int = 0
    """Tokens of prompts that were not computed, since another text that begins with them had been."""

    num_preempted: int = 0
    """How often a text had to give its cache up to another one, and start again."""

    start_up_seconds: float = 0.0
    """Making the cache, tracing and compiling, where this call had to."""

    @property
    def prefill_tokens_per_second(self) -> float:
        return _rate(self.prefill_tokens, self.prefill_seconds)

    @property
    def decode_tokens_per_second(self) -> float:
        return _rate(self.decode_tokens, self.decode_seconds)

    def to_text(self) -> str:
        return (
            f"prefill {self.prefill_tokens} tokens in {self.prefill_seconds:.2f} s "
            f"({self.prefill_tokens_per_second:.1f} tokens/s), "
            f"decode {self.decode_tokens} tokens in {self.decode_seconds:.2f} s "
            f"({self.decode_tokens_per_second:.1f} tokens/s), start-up {self.start_up_seconds:.1f} s"
        )


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0
