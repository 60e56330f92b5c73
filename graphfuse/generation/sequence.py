"""A request while it runs: its tokens, what of them is in the caches, and its text so far.

Tokens are launched before they are known: a step is under way while the next one is scheduled, so a sequence can be one
token longer than the host has read. `num_pending` counts those.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from graphfuse.generation.completion import Completion, FinishReason, TokenLogprob
from graphfuse.generation.job import Request
from graphfuse.generation.sampler import Uniforms
from graphfuse.generation.text import Decode, TextStream

OnText = Callable[[int, str], None]
"""Called with the index of a prompt and the text that follows what was already given for it."""


class Sequence:
    """Tokens 0 … `length` - 1, of which the caches have, or will have, the first `num_computed`."""

    def __init__(
        self,
        request: Request,
        decode: Decode,
        eos: frozenset[int],
        max_length: int,
        *,
        guide: Any = None,
        on_text: OnText | None = None,
    ) -> None:
        params = request.params
        self.request = request
        self.guide = guide
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt = len(request.prompt_token_ids)
        self.num_computed = 0
        self.num_pending = 0
        self.num_remembered = 0
        self.pages: list[int] = []
        self.slot = 0
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.room = min(params.max_tokens, max_length - self.num_prompt)
        self.uniforms: Uniforms | None = None
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._decode = decode
        self._ends = (frozenset() if params.ignore_eos else eos) | frozenset(params.stop_token_ids)
        self._on_text = on_text
        self._started = time.perf_counter()
        # Decoding token by token is for those who need the text early; the others decode once, at the end.
        self._stream = TextStream(decode, params.stop) if params.stop or on_text else None

    @property
    def length(self) -> int:
        """With the tokens that are under way."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_left(self) -> int:
        """How many of its tokens have to be computed; 0 when its last one is under way."""
        if self.finish_reason is not None or self.length - self.num_prompt >= self.room:
            return 0
        return self.length - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    def start_again(self) -> None:
        """Forget the caches: the sequence was preempted, and computes its tokens anew."""
        self.num_computed = self.num_remembered = 0
        self.pages, self.slot = [], 0
        self.uniforms = None

    def accept(self, token_id: int, logprob: TokenLogprob | None = None) -> None:
        """A token that was under way is known. Sets `finish_reason` if it is the last."""
        self.num_pending -= 1
        if self.finish_reason is not None:
            return  # launched before the one in front of it was known to be the last
        self.token_ids.append(token_id)
        if self._logprobs is not None and logprob is not None:
            self._logprobs.append(logprob)
        if self.guide is not None:
            self.guide.accept(token_id)
        if token_id in self._ends and self.num_generated > self.request.params.min_tokens:
            self._finish("stop")
            return
        if self._stream is not None:
            self._show(self._stream.push(token_id))
            if self._stream.stopped:
                self._finish("stop")
                return
        if self.guide is not None and self.guide.finished:
            self._finish("stop")
        elif self.num_generated == self.room:
            self._finish("length")

    def fail(self, error: str) -> None:
        """End without a completion."""
        self.num_pending -= 1
        if self.finish_reason is None:
            self.finish_reason, self.error = "stop", error

    def completion(self) -> Completion:
        generated = self.token_ids[self.num_prompt :]
        if self._stream is not None:
            text = self._stream.text
        else:
            ended = bool(generated) and generated[-1] in self._ends
            text = self._decode(generated[: len(generated) - ended])
        return Completion(
            text,
            generated,
            self.finish_reason or "length",
            self.request.prompt_token_ids,
            logprobs=self._logprobs,
            seconds=time.perf_counter() - self._started,
        )

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        if self._stream is not None:
            self._show(self._stream.finish())
            if self._stream.stopped:  # a stop string that only the last, kept back text completed
                self.finish_reason = "stop"

    def _show(self, text: str) -> None:
        if text and self._on_text is not None:
            self._on_text(self.request.index, text)
