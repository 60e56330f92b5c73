"""Scales of quantised operands, around the loop of `moe_product`.

X_SCALE, of x: NONE, TENSOR (one number, or one an expert), ROWS (one a row). Scales of a row's groups (X is SCALED) are
applied in the loop, where only the pointers made here are used.
W_SCALE, of the weights: NONE, TENSOR (one an expert), CHANNELS (one an output), BLOCKS (in the loop).
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphfuse.kernels.moe_product import SCALED

NONE = tl.constexpr(0)
TENSOR = tl.constexpr(1)
ROWS = tl.constexpr(2)
CHANNELS = tl.constexpr(2)
BLOCKS = tl.constexpr(3)


@triton.jit
def x_scale_of(x_scale_ptr, rows, valid, expert, stride, X_SCALE: tl.constexpr, X: tl.constexpr):
    """(scale of x: a number or `[BLOCK_M]`, pointers to the scales of the rows' first groups)."""
    ptrs = x_scale_ptr + rows.to(tl.int64) * stride
    if X_SCALE == TENSOR:
        scale = tl.load(x_scale_ptr + expert * stride).to(tl.float32)
    elif X_SCALE == ROWS and X != SCALED:
        scale = tl.load(ptrs, mask=valid, other=0.0).to(tl.float32)
    else:
        scale = 1.0
    return scale, ptrs


@triton.jit
def block_scale_ptr(w_scale_ptr, w_rows, last, blocks_of_k, block_n, ONE_SCALE: tl.constexpr):
    """Where the scales of the weights' first blocks along K are: one pointer if the rows lie in one block.
    Rows behind the last read its scale."""
    w_rows = tl.minimum(w_rows, last)
    if ONE_SCALE:
        return w_scale_ptr + tl.min(w_rows) // block_n * blocks_of_k
    else:
        return w_scale_ptr + w_rows // block_n * blocks_of_k


@triton.jit
def scale_product(
    out, x_scale, w_scale_ptr, w_rows, exist, X_SCALE: tl.constexpr, W_SCALE: tl.constexpr, X: tl.constexpr
):
    """out `[BLOCK_M, COLUMNS]` times the scales that stand outside the loop."""
    if X_SCALE == TENSOR:
        out *= x_scale
    elif X_SCALE == ROWS and X != SCALED:
        out *= x_scale[:, None]
    if W_SCALE == TENSOR:
        out *= tl.load(w_scale_ptr).to(tl.float32)
    elif W_SCALE == CHANNELS:
        out *= tl.load(w_scale_ptr + w_rows, mask=exist, other=0.0).to(tl.float32)[None, :]
    return out
