"""Generate one batch: a prefill over the right-padded prompts, then one token a row and step.

    prompts  a b c d        prefill: positions 0 1 2 3 in every row; each row's logits are taken at its last token
             e f . .        decode:  position 4 in row 0, 2 in row 1, …

Padding sits at later positions than any real token of its row. Its keys and values do go into the cache, but the token
generated for a position overwrites them before any query at or after that position is made, and attention looks only
at positions up to the query's own. So no mask is needed, and a row's result does not depend on its neighbours' lengths.

Rows that have ended are computed on and ignored; those at the end of the batch are cut off. A step costs one
device-to-host copy, that of the new tokens. B rows, S padded length, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphfuse.comm.watch import Watch
from graphfuse.comm.watching import in_call
from graphfuse.errors import GenerationError
from graphfuse.generation.cache import StaticCache
from graphfuse.generation.completion import Completion, FinishReason, GenerationStats
from graphfuse.generation.sampler import NOT_FINITE, BatchSampler
from graphfuse.generation.sampling import SamplingParams
from graphfuse.generation.text import Decode, TextStream

OnText = Callable[[int, str], None]
"""Called with the index of a prompt and the text that follows what was already given for it."""


@dataclass(frozen=True)
class Request:
    """One prompt on its way through a batch."""

    index: int
    """Its place among the prompts of the `generate` call."""

    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int


class _Row:
    """What a request has generated so far."""

    def __init__(
        self, request: Request, decode: Decode, eos: frozenset[int], max_length: int, on_text: OnText | None
    ) -> None:
        params = request.params
        self.request = request
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._decode = decode
        self._eos = frozenset() if params.ignore_eos else eos
        self._room = min(params.max_tokens, max_length - len(request.prompt_token_ids))
        self._on_text = on_text
        # Decoding token by token is for those who need the text early; the others decode once, at the end.
        self._stream = TextStream(decode, params.stop) if params.stop or on_text else None

    def accept(self, token_id: int) -> None:
        if token_id == NOT_FINITE:
            raise GenerationError(
                f"The logits of prompt {self.request.index} hold NaN or infinity after {len(self.token_ids)} tokens. "
                "Try dtype=float32; if it stays, the checkpoint is damaged or the model overflows."
            )
        self.token_ids.append(token_id)
        if token_id in self._eos:
            self._finish("stop")
            return
        if self._stream is not None:
            self._show(self._stream.push(token_id))
            if self._stream.stopped:
                self._finish("stop")
                return
        if len(self.token_ids) == self._room:
            self._finish("length")

    def completion(self) -> Completion:
        if self._stream is not None:
            text = self._stream.text
        else:
            ended = self.token_ids[-1] in self._eos
            text = self._decode(self.token_ids[: len(self.token_ids) - ended])
        reason = self.finish_reason or "length"
        return Completion(text, self.token_ids, reason, self.request.prompt_token_ids)

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        if self._stream is not None:
            self._show(self._stream.finish())
            if self._stream.stopped:  # a stop string that only the last, kept back text completed
                self.finish_reason = "stop"

    def _show(self, text: str) -> None:
        if text and self._on_text is not None:
            self._on_text(self.request.index, text)


@torch.no_grad()  # not inference_mode: Dynamo cannot trace with inference tensors as inputs
def generate_batch(
    model: Any,
    cache: StaticCache,
    requests: Sequence[Request],
    *,
    decode: Decode,
    eos: frozenset[int],
    device: torch.device,
    stats: GenerationStats,
    on_text: OnText | None = None,
    watch: Watch | None = None,
) -> list[Completion]:
    """The completions of `requests`, in order. `cache` has room for them; `stats` is added to. `watch`: over the ranks
    that take part."""
    rows = [_Row(request, decode, eos, cache.max_length, on_text) for request in requests]
    sampler = BatchSampler([r.params for r in requests], [r.seed for r in requests], device)

    start = time.perf_counter()
    input_ids, lengths = _right_pad([r.prompt_token_ids for r in requests])
    input_ids, next_position = input_ids.to(device), lengths.to(device)  # [B, S], [B]
    positions = torch.arange(input_ids.shape[1], device=device).expand_as(input_ids).contiguous()  # [B, S]
    with in_call(watch, "prefill", (input_ids,)):
        logits = model(input_ids, positions, cache.tensors, next_position - 1)  # [B, V]
        tokens = sampler(logits, 0)  # [B]
        token_ids = tokens.tolist()
    _accept(rows, token_ids)
    now = time.perf_counter()
    stats.prefill_tokens += int(lengths.sum())
    stats.prefill_seconds += now - start

    start, step = now, 1
    while alive := [i for i, row in enumerate(rows) if row.finish_reason is None]:
        rows_left = alive[-1] + 1
        # Ended rows stay within the cache and the vocabulary, whatever they compute.
        input_ids = tokens[:rows_left, None].clamp_min(0)
        positions = next_position[:rows_left, None].clamp_max(cache.length - 1)
        last_token = torch.zeros_like(tokens[:rows_left])
        with in_call(watch, "decode", (input_ids,)):
            logits = model(input_ids, positions, cache.tensors, last_token)  # [B, V]
            tokens = sampler(logits, step)
            token_ids = tokens.tolist()
        _accept(rows, token_ids)
        stats.decode_tokens += len(alive)
        next_position = next_position[:rows_left] + 1
        step += 1
    stats.decode_seconds += time.perf_counter() - start
    return [row.completion() for row in rows]


def _accept(rows: Sequence[_Row], token_ids: list[int]) -> None:
    for row, token_id in zip(rows, token_ids, strict=False):  # `token_ids` may lack rows that have ended
        if row.finish_reason is None:
            row.accept(token_id)


def _right_pad(prompts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """The prompts as one [B, S] tensor, padded with token 0, and their lengths [B]."""
    lengths = torch.tensor([len(p) for p in prompts])
    padded = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    return padded, lengths
