"""Draw tokens in integer arithmetic: the same ones on every rank, device and in every batch.

A probability becomes a 64-bit integer weight relative to the most likely token's. Sums and scans of integers are exact
whatever their order, on the CPU and on every GPU, so nothing here depends on how a kernel divides its work.

R rows, V vocabulary, K sorted candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The most likely token weighs 2**42, so a row of up to 2**20 tokens sums without overflow; what is less likely than
# 2**-43 of it is never drawn.
_UNIT = float(2**42)


def token_weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """Integer weights [R, V] int64, proportional to softmax(logits / temperature) to within 2**-43 of the largest."""
    logits = logits.double()
    # The difference first: it is 0 for the most likely token also where a tiny temperature makes the others infinite.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    return (scaled.exp() * _UNIT).round().long()


def truncate(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, num_candidates: int | None = None) -> Tensor:
    """`weights` [R, V] with zero for the tokens that top-k (0: all), then top-p and then min-p, [R] each, leave out.

    Of tokens with equal weights at the edge those with lower ids stay. `num_candidates`: at least every `top_k`, where
    all are set; without it all tokens are sorted.
    """
    if num_candidates is None:
        ordered = weights.sort(dim=-1, descending=True).values  # [R, K]
    else:
        ordered = weights.topk(min(num_candidates, weights.shape[-1])).values
    rank = torch.arange(ordered.shape[-1], device=weights.device)
    keep = (top_k[:, None] == 0) | (rank < top_k[:, None])
    ordered = torch.where(keep, ordered, 0)
    before = ordered.cumsum(-1) - ordered  # the weight of all that are more likely
    share = top_p[:, None] * ordered.sum(-1, keepdim=True).double()
    # Doubles hold integers to 2**53 only: top_p = 1 must keep the tail whatever the rounding of `before`.
    keep &= (before.double() < share) | (top_p[:, None] >= 1)
    keep &= ordered.double() >= min_p[:, None] * ordered[:, :1].double()

    num_kept = keep.sum(-1, keepdim=True)  # each rule keeps the first so many
    edge = ordered.gather(-1, (num_kept - 1).clamp_min(0))  # clamped for rows of NaN, whose result is thrown away
    above, equal = weights > edge, weights == edge
    room = num_kept - above.sum(-1, keepdim=True)
    return torch.where(above | (equal & (equal.cumsum(-1) <= room)), weights, 0)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The token [R] at which the running sum of `weights` [R, V] passes the share `uniform` [R] in [0, 1)."""
    running = weights.cumsum(-1)
    total = running[:, -1:]
    target = torch.minimum((uniform[:, None] * total.double()).long(), total - 1)
    return torch.searchsorted(running, target, right=True).squeeze(-1)
