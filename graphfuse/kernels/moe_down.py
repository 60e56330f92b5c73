"""The second grouped product of an MoE layer: each choice's intermediate through its expert's down projection.

    eager equivalent, for the choice p with expert e:  out[p] = w[e] @ x[row(p)] + bias[e]      in float32, then rounded

Where there are few inputs and many columns, a program makes several blocks of columns: to find its choices takes it as
long as to multiply them. The rows of choices whose experts are not held here are never written, nor read afterwards.

Legend: P choices, I intermediate size here = K inputs, N outputs = H hidden.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphfuse.kernels.moe_blocks import choices_of, tile_of
from graphfuse.kernels.moe_product import multiply
from graphfuse.kernels.moe_scales import BLOCKS, block_scale_ptr, scale_product, x_scale_of


@triton.jit(do_not_specialize=["first_expert", "num_experts", "num_choices", "num_row_blocks", "group_m"])
def down(
    x_ptr,  # [P, K]
    w_ptr,  # [E, N, K] in any strides
    bias_ptr,  # [E, N]
    out_ptr,  # [P, N]
    ids_ptr,  # [P]
    order_ptr,
    blocks_ptr,
    x_scale_ptr,
    w_scale_ptr,
    first_expert,
    num_experts,
    num_choices,
    num_row_blocks,
    N,
    K,
    stride_we,
    stride_wn,
    stride_wk,
    stride_x_scale,  # per row, or per expert
    stride_w_scale,  # per expert
    group_m,
    block_n,  # BLOCKS: outputs that share a scale
    X: tl.constexpr,
    X_SCALE: tl.constexpr,
    W_SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    ONE_SCALE: tl.constexpr,  # BLOCKS: a program's outputs lie in one block
    SORTED: tl.constexpr,
    CHOICES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
    RUN: tl.constexpr,  # column blocks that a program makes one after the other
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block, run = tile_of(tl.program_id(0), num_row_blocks, tl.cdiv(tl.cdiv(N, BLOCK_N), RUN), group_m)
    expert, choices, rows, valid = choices_of(
        block, ids_ptr, order_ptr, blocks_ptr, first_expert, num_experts, num_choices, SORTED, BLOCK_M, CHOICES
    )
    if DEPENDENT_LAUNCH:  # only the intermediate comes from the kernel before this one
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if expert < 0:
        return
    expert = expert.to(tl.int64)
    w_ptr += expert * stride_we
    w_scale_ptr += expert * stride_w_scale
    x_scale, x_scale_ptrs = x_scale_of(x_scale_ptr, rows, valid, expert, stride_x_scale, X_SCALE, X)
    x_rows = rows.to(tl.int64) * K
    for step in range(RUN):
        column = (run * RUN + step) * BLOCK_N + tl.arange(0, BLOCK_N)
        exist = column < N
        w_scale_ptr_0 = w_scale_ptr
        if W_SCALE == BLOCKS:
            w_scale_ptr_0 = block_scale_ptr(w_scale_ptr, column, N - 1, tl.cdiv(K, BLOCK_K), block_n, ONE_SCALE)
        out, _ = multiply(
            x_ptr,
            x_rows,
            valid,
            x_scale,
            x_scale_ptrs,
            w_ptr,
            column.to(tl.int64),
            column.to(tl.int64),
            exist,
            stride_wn,
            stride_wk,
            w_scale_ptr_0,
            w_scale_ptr_0,
            K,
            False,
            X,
            W_SCALE == BLOCKS,
            EVEN_N,
            EVEN_K,
            SWAP,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        if SWAP:
            out = tl.trans(out)
        out = scale_product(out, x_scale, w_scale_ptr, column, exist, X_SCALE, W_SCALE, X)
        if BIAS:
            out += tl.load(bias_ptr + expert * N + column, mask=exist, other=0.0).to(tl.float32)[None, :]
        to = out_ptr + choices.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=valid[:, None] & exist[None, :])
