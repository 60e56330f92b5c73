"""The loop of a grouped matrix product: some rows of x times some rows of one expert's weights.

    eager equivalent:  out_0 = x[x_rows] @ w[w_rows_0].T      and, if TWO,      out_1 = x[x_rows] @ w[w_rows_1].T

in float32, with the scales of FP8 operands where they must stand inside the loop. What x is multiplied as:

    AS_IS     as stored; if that is 16 or 32 bits, FP8 weights are turned into it
    SCALED    as stored, FP8 with a scale for each row and group of BLOCK_K inputs
    STATIC    divided by x_scale and rounded to the weights' FP8 on the way: where each expert has a scale of its own

With w_scale one to a block of weights (BLOCKS), BLOCK_K is the block's, and each block's product is multiplied by the
scales of its operands before it is added.

SWAP computes the transposed product: the tensor cores' rows are weights, of which there are always enough; few rows of
x are then its narrow side.
"""

from __future__ import annotations

import triton
import triton.language as tl

AS_IS = tl.constexpr(0)
STATIC = tl.constexpr(1)
SCALED = tl.constexpr(2)

SMALLEST = tl.constexpr(1.1754943508222875e-38)  # float32's smallest normal number, so that rows of zeros stay zeros


@triton.jit
def round_to(x, scale, dtype: tl.constexpr):
    """x / scale as FP8; what is too large becomes the largest number."""
    limit: tl.constexpr = 57344.0 if dtype == tl.float8e5 else 448.0
    x = x.to(tl.float32) / scale
    return tl.clamp(x, -limit, limit, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def group_scale(x, dtype: tl.constexpr):
    """`[M]` float32: what rows of x `[M, N]` are divided by, so that their largest number is the dtype's largest."""
    limit: tl.constexpr = 57344.0 if dtype == tl.float8e5 else 448.0
    largest = tl.max(tl.abs(x.to(tl.float32)), 1)
    return tl.maximum(largest / limit, SMALLEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _dot(x, w, SWAP: tl.constexpr):
    w = w.to(x.dtype)
    if SWAP:
        return tl.dot(w, tl.trans(x), input_precision="ieee")
    else:
        return tl.dot(x, tl.trans(w), input_precision="ieee")


@triton.jit
def _dot_add(x, w, out, SWAP: tl.constexpr):
    w = w.to(x.dtype)
    if SWAP:
        return tl.dot(w, tl.trans(x), out, input_precision="ieee")
    else:
        return tl.dot(x, tl.trans(w), out, input_precision="ieee")


@triton.jit
def _load_weights(ptrs, rows_exist, inside, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """A tile of the weights: without masks where all of it exists, which is quicker."""
    if EVEN_N and EVEN_K:
        return tl.load(ptrs)
    elif EVEN_N:
        return tl.load(ptrs, mask=inside, other=0.0)
    elif EVEN_K:
        return tl.load(ptrs, mask=rows_exist, other=0.0)
    else:
        return tl.load(ptrs, mask=rows_exist & inside, other=0.0)


@triton.jit
def _scaled(product, x_scale, w_scale, SWAP: tl.constexpr):
    """product * x_scale (of its rows of x) * w_scale (one number, or of its rows of weights)."""
    if w_scale.type.is_block():
        if SWAP:
            return product * w_scale[:, None] * x_scale[None, :]
        else:
            return product * x_scale[:, None] * w_scale[None, :]
    else:
        scale = x_scale * w_scale
        if SWAP:
            return product * scale[None, :]
        else:
            return product * scale[:, None]


@triton.jit
def multiply(
    x_ptr,
    x_rows,  # [BLOCK_M] int64 offsets of rows
    x_valid,  # [BLOCK_M]
    x_scale,  # STATIC: a number
    x_scale_ptrs,  # SCALED: [BLOCK_M], of the first group
    w_ptr,
    w_rows_0,  # [COLUMNS] int64 row numbers
    w_rows_1,
    w_valid,  # [COLUMNS], not EVEN_N: which rows exist
    stride_wn,
    stride_wk,
    w_scale_ptr_0,  # BLOCKS: of the first block of K, one pointer or [COLUMNS] of them
    w_scale_ptr_1,
    K,
    TWO: tl.constexpr,
    X: tl.constexpr,
    BLOCKS: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(out_0, out_1), each `[BLOCK_M, COLUMNS]` float32, or `[COLUMNS, BLOCK_M]` if SWAP; out_1 is out_0 if not TWO."""
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + x_rows[:, None] + k[None, :]
    w_ptrs_0 = w_ptr + w_rows_0[:, None] * stride_wn + k[None, :] * stride_wk
    w_ptrs_1 = w_ptr + w_rows_1[:, None] * stride_wn + k[None, :] * stride_wk
    w_dtype: tl.constexpr = w_ptr.dtype.element_ty
    if SWAP:
        out_0 = tl.zeros([COLUMNS, BLOCK_M], tl.float32)
        out_1 = tl.zeros([COLUMNS, BLOCK_M], tl.float32)
    else:
        out_0 = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
        out_1 = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = k[None, :] < K - start
        x = tl.load(x_ptrs, mask=x_valid[:, None] if EVEN_K else x_valid[:, None] & inside, other=0.0)
        w_0 = _load_weights(w_ptrs_0, w_valid[:, None], inside, EVEN_N, EVEN_K)
        if TWO:
            w_1 = _load_weights(w_ptrs_1, w_valid[:, None], inside, EVEN_N, EVEN_K)
        if X == STATIC:
            x = round_to(x, x_scale, w_dtype)
        if BLOCKS:
            if X == SCALED:
                scale = tl.load(x_scale_ptrs + start // BLOCK_K, mask=x_valid, other=0.0)
            else:
                scale = tl.full([BLOCK_M], 1.0, tl.float32)
            out_0 += _scaled(_dot(x, w_0, SWAP), scale, tl.load(w_scale_ptr_0 + start // BLOCK_K), SWAP)
            if TWO:
                out_1 += _scaled(_dot(x, w_1, SWAP), scale, tl.load(w_scale_ptr_1 + start // BLOCK_K), SWAP)
        else:
            out_0 = _dot_add(x, w_0, out_0, SWAP)
            if TWO:
                out_1 = _dot_add(x, w_1, out_1, SWAP)
        x_ptrs += BLOCK_K
        w_ptrs_0 += BLOCK_K * stride_wk
        w_ptrs_1 += BLOCK_K * stride_wk
    return out_0, out_1
