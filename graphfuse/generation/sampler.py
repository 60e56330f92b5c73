"""Choose the next token of each row of a batch: the same one on every rank, without a broadcast.

The logits are bitwise equal on all ranks, so it is enough that nothing after them depends on the order of a floating
point sum. Probabilities become 64-bit integer weights relative to the most likely token; integer sums and scans are
exact, on the CPU and on every GPU. A token is then drawn by inverting the cumulative weights at one uniform number per
row and step, which comes from the row's own CPU generator: what a row gets depends neither on the batch around it nor
on the device.

B rows, V vocabulary, N tokens at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphfuse.generation.sampling import SamplingParams

# The most likely token weighs 2**42, so a row of up to 2**20 tokens sums without overflow; what is less likely than
# 2**-43 of it is never drawn.
_UNIT = float(2**42)

NOT_FINITE = -1
"""Returned instead of a token where a row's logits hold NaN or +inf: seen by the host without a copy of its own."""


class Sampler:
    """The sampling state of one batch: `sampler(logits, step)` gives the tokens of that step."""

    def __init__(self, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device) -> None:
        self._all_greedy = all(p.greedy for p in params)
        if self._all_greedy:
            return
        self._greedy = torch.tensor([p.greedy for p in params], device=device)  # [B]
        self._temperature = torch.tensor(
            [p.temperature or 1.0 for p in params], dtype=torch.float64, device=device
        )  # [B]
        self._top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)  # [B]
        self._top_k = torch.tensor([p.top_k for p in params], device=device)  # [B]
        self._truncates = any(p.top_k > 0 or p.top_p < 1 for p in params)
        self._uniforms = _draw_uniforms(params, seeds).to(device)  # [B, N]

    def __call__(self, logits: Tensor, step: int) -> Tensor:
        """The tokens [R] int64 of the first R rows of the batch, from their logits [R, V]."""
        rows = logits.shape[0]
        tokens = logits.argmax(-1)
        if not self._all_greedy:
            weights = token_weights(logits, self._temperature[:rows])
            if self._truncates:
                weights = truncate(weights, self._top_k[:rows], self._top_p[:rows])
            drawn = draw(weights, self._uniforms[:rows, min(step, self._uniforms.shape[1] - 1)])
            tokens = torch.where(self._greedy[:rows], tokens, drawn)
        return torch.where(logits.amax(-1).isfinite(), tokens, NOT_FINITE)


def token_weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """Integer weights [B, V] int64, proportional to softmax(logits / temperature) to within 2**-43 of the largest."""
    scaled = logits.double() / temperature[:, None]
    return ((scaled - scaled.amax(-1, keepdim=True)).exp() * _UNIT).round().long()


def truncate(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`weights` [B, V] with zero for the tokens that top-k [B] (0: all) and then top-p [B] leave out.

    Of tokens with equal weights at the edge those with lower ids stay.
    """
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    keep = (top_k[:, None] == 0) | (rank < top_k[:, None])
    ordered = torch.where(keep, ordered, 0)
    before = ordered.cumsum(-1) - ordered  # the weight of all that are more likely
    share = top_p[:, None] * ordered.sum(-1, keepdim=True).double()
    # Doubles hold integers to 2**53 only: top_p = 1 must keep the tail whatever the rounding of `before`.
    ordered = torch.where((before.double() < share) | (top_p[:, None] >= 1), ordered, 0)
    return torch.zeros_like(weights).scatter_(-1, order, ordered)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The token [B] at which the running sum of `weights` [B, V] passes the share `uniform` [B] in [0, 1)."""
    running = weights.cumsum(-1)
    total = running[:, -1:]
    target = torch.minimum((uniform[:, None] * total.double()).long(), total - 1)
    return torch.searchsorted(running, target, right=True).squeeze(-1)


def _draw_uniforms(params: Sequence[SamplingParams], seeds: Sequence[int]) -> Tensor:
    """[B, N] float64 on the CPU. Row b holds the first numbers of the generator seeded with `seeds[b]`, so that a
    longer completion goes on where a shorter one ended."""
    uniforms = torch.zeros(len(params), max(p.max_tokens for p in params), dtype=torch.float64)
    for row, (param, seed) in enumerate(zip(params, seeds, strict=True)):
        if not param.greedy:
            generator = torch.Generator().manual_seed(seed)
            uniforms[row, : param.max_tokens] = torch.rand(param.max_tokens, dtype=torch.float64, generator=generator)
    return uniforms
