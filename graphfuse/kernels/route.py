"""Which experts each token goes to, and with which weights: scores, the K best, their weights, in one launch.

    eager equivalent, for logits [T, E]:
        scores  = softmax(logits.float(), -1)             "softmax"
                  sigmoid(logits.float())                 "sigmoid"
                  logits.float()                          "chosen_softmax"
        ids     = topk(scores + bias, K).indices          the best first
        weights = scores.gather(1, ids)
        weights = softmax(weights, -1)                    "chosen_softmax"
        weights = weights / (weights.sum(-1, keepdim=True) + eps)             if normalise
        weights = (weights * scale).to(dtype)

Of equal scores the lower id is taken, where topk leaves it open. NaN is above all numbers, as for topk, so that a row
of whatever values has K different ids in [0, E).

One program, of one warp, handles one row. A score and an expert's id are compared as integers, which a warp reduces in
one instruction each: K times the largest score, then the lowest id that has it.

Legend: T tokens, E experts, K choices per token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.kernels.paged_split import dependent_launch
from graphfuse.kernels.sizes import power_of_two

MOST_EXPERTS, MOST_CHOICES = 1024, 16

_LOWEST = tl.constexpr(-(2**31))
"""Below the number of every score, minus infinity's too: of experts that cannot be chosen, or were."""

_MASK = tl.constexpr(2**31 - 1)


@triton.jit
def in_order(x):
    """float32 to int32 that compares like it: -0 as 0, NaN above infinity."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, _flip(bits), _MASK)


@triton.jit
def _flip(bits):
    """Negative floats' bits grow as they fall: turned around. Its own inverse, and NaN's is a NaN."""
    return tl.where(bits < 0, bits ^ _MASK, bits)


@triton.jit
def _route(
    logits_ptr,  # [T, E]
    bias_ptr,  # [E]
    weights_ptr,  # [T, K]
    ids_ptr,  # [T, K]
    stride_logits,
    eps,
    scale,
    SCORING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALISE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOICES: tl.constexpr,
):
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < E
    scores = tl.load(logits_ptr + row * stride_logits + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if SCORING == "softmax":
        scores = tl.exp(scores - tl.max(scores, 0))
        scores = tl.div_rn(scores, tl.sum(tl.where(inside, scores, 0.0), 0))
    elif SCORING == "sigmoid":
        scores = tl.div_rn(1.0, 1.0 + tl.exp(-scores))
    wanted = scores
    if HAS_BIAS:
        wanted += tl.load(bias_ptr + expert, mask=inside, other=0.0).to(tl.float32)
    keys = tl.where(inside, in_order(wanted), _LOWEST)
    bits = scores.to(tl.int32, bitcast=True)
    choice = tl.arange(0, CHOICES)
    ids = tl.zeros([CHOICES], tl.int32)
    weights = tl.zeros([CHOICES], tl.int32)
    for k in tl.static_range(K):
        largest = tl.max(keys, 0)
        best = tl.min(tl.where(keys == largest, expert, BLOCK), 0)
        weight = _flip(largest)
        if HAS_BIAS:
            weight = tl.max(tl.where(expert == best, bits, _LOWEST), 0)
        ids = tl.where(choice == k, best, ids)
        weights = tl.where(choice == k, weight, weights)
        keys = tl.where(expert == best, _LOWEST, keys)
    chosen = choice < K
    share = weights.to(tl.float32, bitcast=True)
    if SCORING == "chosen_softmax":
        share = tl.where(chosen, share, float("-inf"))
        share = tl.exp(share - tl.max(share, 0))
        share = tl.div_rn(share, tl.sum(tl.where(chosen, share, 0.0), 0))
    if NORMALISE:
        share = tl.div_rn(share, tl.sum(tl.where(chosen, share, 0.0), 0) + eps)
    share *= scale
    at = row * K + choice
    tl.store(weights_ptr + at, share.to(weights_ptr.dtype.element_ty), mask=chosen)
    tl.store(ids_ptr + at, ids.to(tl.int64), mask=chosen)


def route(
    logits: Tensor, bias: Tensor | None, top_k: int, scoring: str, normalise: bool, eps: float, scale: float, dtype
) -> tuple[Tensor, Tensor]:
    """Weights `[T, K]` in dtype, and ids `[T, K]` int64.

    Args:
        logits: `[T, E]`, float32, bfloat16 or float16; copied first if a row's numbers are not adjacent. E is at most
            `MOST_EXPERTS`.
        bias: `[E]`, floating.
        top_k: K, at most E and `MOST_CHOICES`.
        scoring: "softmax", "sigmoid" or "chosen_softmax".
    """
    num_tokens, num_experts = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    weights = torch.empty(num_tokens, top_k, dtype=dtype, device=logits.device)
    ids = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits.device)
    if num_tokens:
        _route[(num_tokens,)](
            logits, logits if bias is None else bias.contiguous(), weights, ids, logits.stride(0), float(eps),
            float(scale), SCORING=scoring, HAS_BIAS=bias is not None, NORMALISE=normalise, E=num_experts, K=top_k,
            BLOCK=power_of_two(num_experts), CHOICES=power_of_two(top_k), num_warps=1,
            **dependent_launch(logits.device),
        )  # fmt: skip
    return weights, ids
