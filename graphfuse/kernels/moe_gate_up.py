"""The first grouped product of an MoE layer, with the activation: gate and up projections of each choice's expert.

    eager equivalent, for the choice p of token t with expert e, written to its row of the intermediate:
        gate, up = split(w[e] @ x[t] + bias[e])              # halves, or every second one if INTERLEAVED
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)          # with a limit
        out[row(p)] = activation(gate) * up                  # [I], in float32 until here; then rounded, or quantised

A program makes BLOCK_N / 2 columns for BLOCK_M rows. It reads gates and ups in turn, however they are stored, so that
one product of BLOCK_N columns makes both, and a thread holds the gate and the up of the same column. Only where blocks
have scales are they two products: each then has one scale at a time.

Quantised results (OUT): STATIC divides by mid_scale; GROUPS gives each row's group of BLOCK_N / 2 columns a scale of
its own. See moe_product for what is done with x, and moe_blocks for rows.

Legend: T tokens, H hidden = K inputs, I intermediate size here, P choices.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphfuse.kernels.moe_blocks import choices_of, tile_of
from graphfuse.kernels.moe_product import STATIC, group_scale, multiply, round_to
from graphfuse.kernels.moe_scales import BLOCKS, block_scale_ptr, scale_product, x_scale_of

GROUPS = tl.constexpr(2)  # besides AS_IS and STATIC, what is done with results


@triton.jit
def _activated(gate, up, ACTIVATION: tl.constexpr, limit, LIMITED: tl.constexpr):
    if LIMITED:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(z)) / 2 = sigmoid(2 z)
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        tl.static_assert(ACTIVATION == "swiglu_oai")
        return gate * tl.sigmoid(1.702 * gate) * (up + 1)


@triton.jit(do_not_specialize=["first_expert", "num_experts", "num_choices", "num_row_blocks", "group_m"])
def gate_up(
    x_ptr,  # [T, K]
    w_ptr,  # [E, 2I, K] in any strides
    bias_ptr,  # [E, 2I]
    out_ptr,  # [P, I]
    out_scale_ptr,  # GROUPS: [P, I / (BLOCK_N / 2)]
    mid_scale_ptr,  # STATIC: [1] or [E]
    ids_ptr,  # [P]
    order_ptr,
    blocks_ptr,
    x_scale_ptr,
    w_scale_ptr,
    first_expert,
    num_experts,
    num_choices,
    num_row_blocks,
    top_k,
    I,  # noqa: E741
    K,
    limit,
    stride_x,
    stride_we,
    stride_wn,
    stride_wk,
    stride_x_scale,  # per row, or per expert
    stride_mid_scale,
    stride_w_scale,  # per expert
    group_m,
    block_n,  # BLOCKS: outputs that share a scale
    X: tl.constexpr,
    X_SCALE: tl.constexpr,
    W_SCALE: tl.constexpr,
    OUT: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMITED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ONE_SCALE: tl.constexpr,  # BLOCKS: a program's gates lie in one block, and so do its ups
    SORTED: tl.constexpr,
    CHOICES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    HALF: tl.constexpr = BLOCK_N // 2
    TWO: tl.constexpr = W_SCALE == BLOCKS and not INTERLEAVED
    COLUMNS: tl.constexpr = HALF if TWO else BLOCK_N
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block, column_block = tile_of(tl.program_id(0), num_row_blocks, tl.cdiv(I, HALF), group_m)
    expert, choices, rows, valid = choices_of(
        block, ids_ptr, order_ptr, blocks_ptr, first_expert, num_experts, num_choices, SORTED, BLOCK_M, CHOICES
    )
    if expert < 0:
        return
    column = column_block * HALF + tl.arange(0, HALF)  # of the intermediate
    if TWO:
        w_rows_0 = column
        w_rows_1 = column + I
        exist = column < I
    elif not INTERLEAVED:
        lane = tl.arange(0, BLOCK_N)
        w_rows_0 = column_block * HALF + lane // 2
        exist = w_rows_0 < I
        w_rows_0 += lane % 2 * I
        w_rows_1 = w_rows_0
    else:
        w_rows_0 = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
        w_rows_1 = w_rows_0
        exist = w_rows_0 < 2 * I
    tokens = choices // top_k
    expert = expert.to(tl.int64)
    w_scale_ptr += expert * stride_w_scale
    x_scale, x_scale_ptrs = x_scale_of(x_scale_ptr, tokens, valid, expert, stride_x_scale, X_SCALE, X)
    w_scale_ptr_0 = w_scale_ptr
    w_scale_ptr_1 = w_scale_ptr
    if W_SCALE == BLOCKS:
        last = 2 * I - 1
        w_scale_ptr_0 = block_scale_ptr(w_scale_ptr, w_rows_0, last, tl.cdiv(K, BLOCK_K), block_n, ONE_SCALE)
        w_scale_ptr_1 = block_scale_ptr(w_scale_ptr, w_rows_1, last, tl.cdiv(K, BLOCK_K), block_n, ONE_SCALE)
    gates, ups = multiply(
        x_ptr,
        tokens.to(tl.int64) * stride_x,
        valid,
        x_scale,
        x_scale_ptrs,
        w_ptr + expert * stride_we,
        w_rows_0.to(tl.int64),
        w_rows_1.to(tl.int64),
        exist,
        stride_wn,
        stride_wk,
        w_scale_ptr_0,
        w_scale_ptr_1,
        K,
        TWO,
        X,
        W_SCALE == BLOCKS,
        EVEN_N,
        EVEN_K,
        SWAP,
        BLOCK_M,
        COLUMNS,
        BLOCK_K,
    )
    if SWAP:
        gates = tl.trans(gates)
        ups = tl.trans(ups)
    gates = scale_product(gates, x_scale, w_scale_ptr, w_rows_0, exist, X_SCALE, W_SCALE, X)
    if BIAS:
        gates += tl.load(bias_ptr + expert * 2 * I + w_rows_0, mask=exist, other=0.0).to(tl.float32)[None, :]
    if TWO:
        ups = scale_product(ups, x_scale, w_scale_ptr, w_rows_1, exist, X_SCALE, W_SCALE, X)
        if BIAS:
            ups += tl.load(bias_ptr + expert * 2 * I + w_rows_1, mask=exist, other=0.0).to(tl.float32)[None, :]
    else:
        gates, ups = tl.split(tl.reshape(gates, [BLOCK_M, HALF, 2]))
    out = _activated(gates, ups, ACTIVATION, limit, LIMITED)  # [BLOCK_M, HALF]

    inside = valid[:, None] & (column < I)[None, :]
    rows = rows.to(tl.int64)
    if OUT == STATIC:
        out = round_to(out, tl.load(mid_scale_ptr + expert * stride_mid_scale), out_ptr.dtype.element_ty)
    elif OUT == GROUPS:
        scale = group_scale(tl.where((column < I)[None, :], out, 0.0), out_ptr.dtype.element_ty)
        tl.store(out_scale_ptr + rows * tl.cdiv(I, HALF) + column_block, scale, mask=valid)
        out = round_to(out, scale[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * I + column[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
