"""Norm of queries and keys per head, and their rotary embedding, in one launch: what stands before attention.

    eager equivalent, for x = q and x = k, each `[T, heads, D]`, with cos and sin `[T, 1, R]`:
        f = x.float()                                                          # with a norm
        f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
        f = f.to(x.dtype).float()                                              # if cast_before_weight
        x = (f * (weight.float() + weight_bias)).to(x.dtype)
        first, second, rest = x.split([R // 2, R // 2, D - R], dim=-1)
        rotated = x[..., :R] * cos + torch.cat((-second, first), dim=-1) * sin
        out = torch.cat((rotated, rest), dim=-1)

Products and their sum are each rounded to the dtype, and no two operations become one: without a norm the result is the
eager one bit for bit, with a norm it differs by the order in which squares are added.

A program handles one token's heads, or 16 of them: the two halves that are rotated, and what is not, are three tiles,
so that nothing is read twice. Source: Su et al. 2021, RoFormer (arXiv 2104.09864).

Legend: T tokens, Hq and Hkv query and key-value heads, D head size, R rotated dimensions of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.kernels.paged_split import adjacent, dependent_launch
from graphfuse.kernels.sizes import ceil_div, power_of_two

TILE = 2048
"""Elements of a program: 16 a thread of 4 warps."""


@triton.jit
def _row(ptrs, mask):
    """A row `[1, COLUMNS]` in float32 for each head: as the heads are laid out, since a change of layout takes as long
    as the rest."""
    return tl.load(tl.broadcast_to(ptrs, mask.shape), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _weighed(x, root, weight_ptrs, mask, weight_bias, CAST_BEFORE_WEIGHT: tl.constexpr):
    """x `[HEADS, COLUMNS]` divided by its root mean square, times the weight; rounded as the eager formula is."""
    f = x.to(tl.float32) * root
    if CAST_BEFORE_WEIGHT:
        f = f.to(x.dtype).to(tl.float32)
    return (f * (_row(weight_ptrs, mask) + weight_bias)).to(x.dtype)


@triton.jit
def _product(x, ptrs, mask):
    """x `[HEADS, COLUMNS]` times a row, rounded to x's dtype."""
    return (x.to(tl.float32) * _row(ptrs, mask)).to(x.dtype).to(tl.float32)


@triton.jit
def _rotate_heads(
    block,
    x_ptr,  # [NUM_HEADS, D] of this token
    stride_head,
    cos_ptr,  # [R] of this token
    sin_ptr,
    weight_ptr,  # [D]
    out_ptr,  # [NUM_HEADS, D] of this token
    eps,
    weight_bias,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    NORM: tl.constexpr,
    CAST_BEFORE_WEIGHT: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    HALF: tl.constexpr = R // 2
    head = block * HEADS + tl.arange(0, HEADS)
    exists = (head < NUM_HEADS)[:, None]
    half, rest = tl.arange(0, BLOCK_HALF)[None, :], tl.arange(0, BLOCK_REST)[None, :]
    mask, rest_mask = exists & (half < HALF), exists & (rest < D - R)
    from_ptrs = x_ptr + head[:, None] * stride_head
    to_ptrs = out_ptr + head[:, None] * D
    first = tl.load(from_ptrs + half, mask=mask, other=0.0)
    second = tl.load(from_ptrs + HALF + half, mask=mask, other=0.0)
    if R < D:
        kept = tl.load(from_ptrs + R + rest, mask=rest_mask, other=0.0)
    if NORM:
        total = tl.sum(first.to(tl.float32) * first.to(tl.float32) + second.to(tl.float32) * second.to(tl.float32), 1)
        if R < D:
            total += tl.sum(kept.to(tl.float32) * kept.to(tl.float32), 1)
        root = tl.rsqrt(total / D + eps)[:, None]
        first = _weighed(first, root, weight_ptr + half, mask, weight_bias, CAST_BEFORE_WEIGHT)
        second = _weighed(second, root, weight_ptr + HALF + half, mask, weight_bias, CAST_BEFORE_WEIGHT)
        if R < D:
            kept = _weighed(kept, root, weight_ptr + R + rest, rest_mask, weight_bias, CAST_BEFORE_WEIGHT)
    turned = _product(first, cos_ptr + half, mask) - _product(second, sin_ptr + half, mask)
    tl.store(to_ptrs + half, turned.to(first.dtype), mask=mask)
    turned = _product(second, cos_ptr + HALF + half, mask) + _product(first, sin_ptr + HALF + half, mask)
    tl.store(to_ptrs + HALF + half, turned.to(first.dtype), mask=mask)
    if R < D:
        tl.store(to_ptrs + R + rest, kept, mask=rest_mask)


@triton.jit
def _norm_rotary(
    q_ptr,  # [T, Q_HEADS, D]
    k_ptr,  # [T, K_HEADS, D]
    cos_ptr,  # [T, R]
    sin_ptr,
    q_weight_ptr,  # [D]
    k_weight_ptr,
    q_out_ptr,  # [T, Q_HEADS, D]
    k_out_ptr,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_cos,
    stride_sin,
    eps,
    weight_bias,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    NORM: tl.constexpr,
    CAST_BEFORE_WEIGHT: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    Q_BLOCKS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    cos_ptr += token * stride_cos
    sin_ptr += token * stride_sin
    if block < Q_BLOCKS:
        _rotate_heads(
            block, q_ptr + token * stride_q_token, stride_q_head, cos_ptr, sin_ptr, q_weight_ptr,
            q_out_ptr + token * (Q_HEADS * D), eps, weight_bias, Q_HEADS, D, R, NORM, CAST_BEFORE_WEIGHT, HEADS,
            BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        _rotate_heads(
            block - Q_BLOCKS, k_ptr + token * stride_k_token, stride_k_head, cos_ptr, sin_ptr, k_weight_ptr,
            k_out_ptr + token * (K_HEADS * D), eps, weight_bias, K_HEADS, D, R, NORM, CAST_BEFORE_WEIGHT, HEADS,
            BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip


def norm_rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    weight_bias: float,
    cast_before_weight: bool,
) -> tuple[Tensor, Tensor]:
    """`[T, Hq, D]` and `[T, Hkv, D]` in the inputs' dtype, contiguous.

    Args:
        q, k: `[T, Hq, D]` and `[T, Hkv, D]`, of one dtype; copied first if columns are not adjacent.
        cos, sin: `[T, R]` of q's dtype, R even and at most D.
        q_weight, k_weight: `[D]`, or both None for no norm.
        eps: added to the mean of squares.
        weight_bias: added to the weights in float32.
        cast_before_weight: whether the normalised value is rounded before the weight multiplies it.
    """
    num_tokens, q_heads, size = q.shape
    k_heads, rotated = k.shape[1], cos.shape[1]
    norm = q_weight is not None
    q, k, cos, sin = adjacent(q), adjacent(k), adjacent(cos), adjacent(sin)
    q_weight, k_weight = (q, k) if q_weight is None or k_weight is None else (adjacent(q_weight), adjacent(k_weight))
    q_out = torch.empty((num_tokens, q_heads, size), dtype=q.dtype, device=q.device)
    k_out = torch.empty((num_tokens, k_heads, size), dtype=k.dtype, device=k.device)
    if num_tokens == 0:
        return q_out, k_out
    block_half, block_rest = power_of_two(rotated // 2), power_of_two(max(size - rotated, 1))
    columns = power_of_two(size)
    heads = min(power_of_two(max(q_heads, k_heads)), max(1, TILE // columns))
    _norm_rotary[num_tokens, ceil_div(q_heads, heads) + ceil_div(k_heads, heads)](
        q, k, cos, sin, q_weight, k_weight, q_out, k_out,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos.stride(0), sin.stride(0), eps, weight_bias,
        Q_HEADS=q_heads, K_HEADS=k_heads, D=size, R=rotated, NORM=norm,
        CAST_BEFORE_WEIGHT=cast_before_weight, HEADS=heads, BLOCK_HALF=block_half, BLOCK_REST=block_rest,
        num_warps=min(4, max(1, heads * columns // 512)), enable_fp_fusion=False, **dependent_launch(q.device),
    )  # fmt: skip
    return q_out, k_out
