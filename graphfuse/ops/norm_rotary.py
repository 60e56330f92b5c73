"""RMSNorm of queries and keys per head, if there is one, and their rotary embedding: `graphfuse::norm_rotary`.

    x = norm(x)                                                                 over D, with a weight
    rotated = x[..., :R] * cos + cat(-second half, first half of x[..., :R]) * sin
    out = cat(rotated, x[..., R:])

Models write the formula out; the rule `norm_rotary` puts this op there on GPUs, where it is one kernel. On the CPU it
is the formula itself.

Legend: B batch, S sequence of this call, Hq query heads, Hkv key-value heads, D head size, R rotated dimensions of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphfuse.errors import ArgumentError

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@torch.library.custom_op("graphfuse::norm_rotary", mutates_args=())
def norm_rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    weight_bias: float = 0.0,
    cast_before_weight: bool = True,
) -> tuple[Tensor, Tensor]:
    """Queries and keys as attention takes them.

    Args:
        q, k: `[B, S, Hq, D]` and `[B, S, Hkv, D]`, float16, bfloat16 or float32; views of one tensor as a rule.
        cos, sin: `[B, S, 1, R]` of q's dtype, R even and at most D.
        q_weight, k_weight: `[D]` of q's dtype, or both None: no norm.
        eps: added to the mean of squares.
        weight_bias: added to the weights in float32: 1.0 where the stored weight is what is added to one.
        cast_before_weight: whether the normalised value is rounded before the weight multiplies it.

    Returns:
        q and k, contiguous, in their dtype. Each product and each sum is rounded, as the formula's are.

    Raises:
        ArgumentError: shapes, dtypes or devices do not fit.
    """
    _check(q, k, cos, sin, q_weight, k_weight)
    _check_token_dims(q, k, cos, sin)
    if not q.is_cuda:
        norm = (eps, weight_bias, cast_before_weight)
        return _formula(q, cos, sin, q_weight, *norm), _formula(k, cos, sin, k_weight, *norm)
    from graphfuse.kernels import norm_rotary as kernel  # here, since Triton is published for Linux only

    q_rows, k_rows, cos, sin = (t.flatten(0, 1) for t in (q, k, cos, sin))  # [T, ...]
    rotated_q, rotated_k = kernel.norm_rotary(
        q_rows, k_rows, cos[:, 0], sin[:, 0], q_weight, k_weight, eps, weight_bias, cast_before_weight
    )
    return rotated_q.view(q.shape), rotated_k.view(k.shape)


@norm_rotary.register_fake
def _(q, k, cos, sin, q_weight=None, k_weight=None, eps=0.0, weight_bias=0.0, cast_before_weight=True):
    _check(q, k, cos, sin, q_weight, k_weight)
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _formula(
    x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float, weight_bias: float, cast_before_weight: bool
) -> Tensor:
    if weight is not None:
        f = x.float()
        f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
        if cast_before_weight:
            f = f.to(x.dtype).float()
        x = (f * (weight.float() + weight_bias)).to(x.dtype)
    size = cos.shape[-1]
    first, second = x[..., :size].chunk(2, dim=-1)
    rotated = x[..., :size] * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, x[..., size:]), dim=-1).contiguous()


def _check(q, k, cos, sin, q_weight, k_weight) -> None:
    """What can be checked without looking at a token dimension (they may be unknown while tracing)."""
    if not (q.dim() == k.dim() == cos.dim() == sin.dim() == 4):
        raise ArgumentError(
            f"norm_rotary got tensors of {q.dim()}, {k.dim()}, {cos.dim()} and {sin.dim()} dimensions. "
            "Pass q [B, S, Hq, D], k [B, S, Hkv, D], cos and sin [B, S, 1, R]."
        )
    if q.dtype not in DTYPES:
        raise ArgumentError(f"q is {q.dtype}. Pass float16, bfloat16 or float32.")
    size, rotated = q.shape[3], cos.shape[3]
    if k.shape[3] != size:
        raise ArgumentError(f"Heads of q have size {size}, heads of k {k.shape[3]}. Pass the same size.")
    if cos.shape[2:] != sin.shape[2:] or cos.shape[2] != 1 or rotated % 2 or not 0 < rotated <= size:
        raise ArgumentError(
            f"cos ends in {tuple(cos.shape[2:])} and sin in {tuple(sin.shape[2:])}, heads have size {size}. "
            "Pass (1, R) for both, with R even and at most that size."
        )
    if (q_weight is None) != (k_weight is None):
        raise ArgumentError("Only one of q_weight and k_weight is given. Pass both or neither.")
    weights = [w for w in (q_weight, k_weight) if w is not None]
    for w in weights:
        if w.shape != (size,):
            raise ArgumentError(f"A weight has shape {tuple(w.shape)}. Pass one number for each of {size} dimensions.")
    for t in (k, cos, sin, *weights):
        if t.dtype != q.dtype:
            raise ArgumentError(f"q is {q.dtype} but another input is {t.dtype}. Use one dtype for all.")
        if t.device != q.device:
            raise ArgumentError(f"q is on {q.device} but another input is on {t.device}. Use one device for all.")


def _check_token_dims(*tensors: Tensor) -> None:
    shapes = {tuple(t.shape[:2]) for t in tensors}
    if len(shapes) != 1:
        raise ArgumentError(
            f"q, k, cos and sin disagree on [batch, sequence]: {sorted(shapes)}. Pass the same for all four."
        )
