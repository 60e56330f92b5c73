"""Choose the next token of each row of a batch: the same one on every rank, without a broadcast.

The logits are bitwise equal on all ranks, so it is enough that nothing after them depends on the order of a floating
point sum (`drawing.py`). A token is drawn with one uniform number per row and step, which comes from the sequence's own
generator on the host: what a row gets depends neither on the batch around it nor on the device.

The order of operations is that of transformers' `generate`, on float32 logits:

    repetition penalty ─► end tokens forbidden until min_tokens ─► bitmask of a guide
      ─► greedy: the most likely token, the lowest id of equals
      ─► otherwise: / temperature ─► top-k ─► top-p ─► min-p ─► draw

It differs where top-k ends among equals: there exactly k stay, those with the lower ids.

R rows, V vocabulary, S rows that are not greedy, W = ceil(V/32) words of one bit a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graphfuse.generation.bitmask import num_words, pack, unpack
from graphfuse.generation.drawing import draw, token_weights, truncate
from graphfuse.generation.sampling import SamplingParams

# Weights made at once: rows are drawn in parts, so that the workspace is a few hundred MiB however many there are.
_MAX_ELEMENTS = 1 << 23

# Candidates up to which it is worth to look for the most likely ones instead of sorting the vocabulary.
_MAX_CANDIDATES = 1024

NOT_FINITE = -1
"""Returned instead of a token where a row's logits hold NaN or +inf, or where every token is forbidden: seen by the
host without a copy of its own."""


@dataclass(frozen=True)
class Sampled:
    """What was chosen for R rows, on the device. The last three are `None` when no row asks for log-probabilities."""

    tokens: Tensor
    """[R] int64, `NOT_FINITE` where there is none."""

    logprob: Tensor | None = None
    """[R] float32, of the chosen token: log_softmax of the logits in float32, as the model gave them."""

    top_ids: Tensor | None = None
    """[R, K] int64, the most likely tokens, the likeliest first. K is the largest `logprobs` among the rows."""

    top_logprobs: Tensor | None = None
    """[R, K] float32"""


class Uniforms:
    """The numbers in [0, 1) that one sequence is sampled with, on the host: those of a generator seeded with `seed`.
    `skip` leaves out the first ones, for a completion that goes on after as many tokens."""

    def __init__(self, seed: int, skip: int = 0) -> None:
        bits = np.random.PCG64(seed)  # torch's CPU generator looks at 32 bits of a seed only
        bits.advance(skip)
        self._generator = np.random.Generator(bits)

    def next(self) -> float:
        return self._generator.random()


@dataclass(frozen=True)
class _Slot:
    """How a slot samples."""

    params: SamplingParams
    end_ids: tuple[int, ...]
    """Forbidden until `params.min_tokens`."""


@dataclass(frozen=True)
class _Plan:
    """What a batch of slots needs, on the device. The same from step to step until a row comes, goes or may end."""

    sampled: Tensor | None = None
    """[S] int64, the rows that are not greedy."""

    warp: Tensor | None = None
    """[S, 4] float64: temperature, top-k, top-p, min-p."""

    truncates: bool = False
    num_candidates: int | None = None
    """The largest top-k, where all rows that are not greedy have one."""

    penalty: Tensor | None = None
    """[R, 1] float32"""

    slots: Tensor | None = None
    """[R] int64, where there is a penalty."""

    forbidden: tuple[Tensor, Tensor] | None = None
    """Rows and token ids, both int64."""

    num_top: int | None = None
    """The largest `logprobs`."""


class Sampler:
    """The sampling state of up to `num_slots` sequences. Slot 0 is for padding, and greedy."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._slots = [_Slot(SamplingParams(), ())] * num_slots
        self._seen = torch.zeros(num_slots, num_words(vocab_size), dtype=torch.int32, device=device)  # [N, W]
        self._planned: tuple[list[int], list[int]] | None = None  # the slots and steps up to which `_plan` holds
        self._plan = _Plan()

    def begin(self, slot: int, params: SamplingParams, token_ids: Sequence[int], eos: frozenset[int]) -> None:
        """Slot `slot` now samples with these. `token_ids`: the prompt and whatever was generated since."""
        end_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
        self._slots[slot] = _Slot(params, tuple(sorted(i for i in end_ids if i < self.vocab_size)))
        if params.repetition_penalty != 1:
            seen = torch.zeros(self.vocab_size, dtype=torch.bool)
            seen[torch.tensor([i for i in token_ids if i < self.vocab_size], dtype=torch.int64)] = True
            self._seen[slot].copy_(self._to_device(pack(seen)))
        self._planned = None

    def __call__(
        self,
        logits: Tensor,
        slots: list[int],
        steps: list[int],
        uniforms: Tensor | None,
        bitmask: Tensor | None = None,
    ) -> Sampled:
        """The next token of each row, and the memory of repetition penalties updated with it.

        Args:
            logits: [R, V] of any floating dtype.
            slots: of the R rows, each once but for slot 0.
            steps: how many tokens each row's completion has.
            uniforms: [R] float64 on the device; `None` if all rows are greedy.
            bitmask: [R, W] int32 on the device, the tokens that each row allows (`bitmask.py`); `None` if no row is
                guided.
        """
        plan = self._planned_for(slots, steps)
        highest, tokens = logits.max(-1)
        finite = highest.isfinite()
        scores = self._processed(logits, plan, bitmask)
        if scores is not logits:
            highest, tokens = scores.max(-1)
            finite = finite & highest.isfinite()
        if plan.sampled is not None and plan.warp is not None:
            assert uniforms is not None, "rows that are not greedy need a uniform number each"
            drawn = _drawn(scores, uniforms, plan, plan.sampled, plan.warp)
            tokens = tokens.index_copy(0, plan.sampled, drawn)
        tokens = torch.where(finite, tokens, NOT_FINITE)
        if plan.slots is not None:
            self._remember(plan.slots, tokens)
        return _with_logprobs(logits, tokens, plan.num_top)

    def _processed(self, logits: Tensor, plan: _Plan, bitmask: Tensor | None) -> Tensor:
        """The logits [R, V] after penalty and prohibitions; those given if there are none."""
        scores = logits
        if plan.penalty is not None and plan.slots is not None:
            scores = scores.float()
            penalised = torch.where(scores < 0, scores * plan.penalty, scores / plan.penalty)
            scores = torch.where(unpack(self._seen[plan.slots], logits.shape[-1]), penalised, scores)
        if plan.forbidden is not None:
            minus_infinity = torch.full((), float("-inf"), dtype=scores.dtype, device=scores.device)
            scores = scores.index_put(plan.forbidden, minus_infinity)
        if bitmask is not None:
            scores = scores.masked_fill(~unpack(bitmask, logits.shape[-1]), float("-inf"))
        return scores

    def _remember(self, slots: Tensor, tokens: Tensor) -> None:
        word = tokens.clamp_min(0) // 32
        bit = torch.where(tokens >= 0, torch.ones_like(tokens) << tokens % 32, 0)
        # A slot stands in one row only, so no two rows write one word, but for those of slot 0, which has no penalty.
        self._seen[slots, word] = self._seen[slots, word] | bit.to(torch.int32)

    def _planned_for(self, slots: list[int], steps: list[int]) -> _Plan:
        used = [self._slots[slot] for slot in slots]
        bound = [i for i, (slot, step) in enumerate(zip(used, steps, strict=True)) if step < slot.params.min_tokens]
        if (slots, bound) != self._planned:
            self._plan = self._make_plan(slots, used, bound)
            self._planned = (list(slots), bound)
        return self._plan

    def _make_plan(self, slots: list[int], used: list[_Slot], bound: list[int]) -> _Plan:
        params = [slot.params for slot in used]
        drawn = [p for p in params if not p.greedy]
        sampled = [row for row, p in enumerate(params) if not p.greedy]
        warp = [[p.temperature, min(p.top_k, self.vocab_size), p.top_p, p.min_p] for p in drawn]
        largest = max((p.top_k for p in drawn), default=0)
        penalises = any(p.repetition_penalty != 1 for p in params)
        penalty = [[p.repetition_penalty] for p in params]
        forbidden = [(row, token_id) for row in bound for token_id in used[row].end_ids]
        asked = [p.logprobs for p in params if p.logprobs is not None]

        def ids(values: Sequence[int]) -> Tensor:
            return self._to_device(torch.tensor(values, dtype=torch.int64))

        return _Plan(
            sampled=ids(sampled) if sampled else None,
            warp=self._to_device(torch.tensor(warp, dtype=torch.float64)) if sampled else None,
            num_candidates=largest if all(p.top_k for p in drawn) and largest <= _MAX_CANDIDATES else None,
            truncates=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in drawn),
            penalty=self._to_device(torch.tensor(penalty, dtype=torch.float32)) if penalises else None,
            slots=ids(slots) if penalises else None,
            forbidden=(ids([row for row, _ in forbidden]), ids([i for _, i in forbidden])) if forbidden else None,
            num_top=max(asked, default=None),
        )

    def _to_device(self, tensor: Tensor) -> Tensor:
        """From pinned memory: the host goes on while it is copied."""
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


def _drawn(scores: Tensor, uniforms: Tensor, plan: _Plan, sampled: Tensor, warp: Tensor) -> Tensor:
    """The tokens [S] of the rows `sampled`."""
    num_rows = max(1, _MAX_ELEMENTS // scores.shape[-1])
    parts = []
    for rows, settings in zip(sampled.split(num_rows), warp.split(num_rows), strict=True):
        temperature, top_k, top_p, min_p = settings.unbind(-1)
        weights = token_weights(scores.index_select(0, rows), temperature)
        if plan.truncates:
            weights = truncate(weights, top_k, top_p, min_p, plan.num_candidates)
        parts.append(draw(weights, uniforms.index_select(0, rows)))
    return torch.cat(parts)


def _with_logprobs(logits: Tensor, tokens: Tensor, num_top: int | None) -> Sampled:
    if num_top is None:
        return Sampled(tokens)
    logprobs = torch.log_softmax(logits, -1, dtype=torch.float32)
    chosen = logprobs.gather(-1, tokens.clamp_min(0)[:, None]).squeeze(-1)
    top = logprobs.topk(min(num_top, logprobs.shape[-1]))
    return Sampled(tokens, chosen, top.indices, top.values)
