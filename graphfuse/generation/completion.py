"""What a generation gives back: the completions, and how fast they came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Completion:
    """One completed prompt."""

    text: str
    """The generated text, without special tokens and cut before a stop string."""

    token_ids: list[int]
    """Every generated token, the end-of-sequence token or those of the stop string included."""

    finish_reason: FinishReason
    """"stop": an end-of-sequence token or a stop string. "length": `max_tokens` or the context length was reached."""

    prompt_token_ids: list[int]


@dataclass
class GenerationStats:
    """Tokens and seconds of one `generate` call. Prefill ends with the first token of each row; padding and rows that
    have ended do not count as tokens."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
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
