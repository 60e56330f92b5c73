"""A linear layer of few rows: bound by reading its weights, which starts before the kernel in front has ended.

    eager equivalent, accumulated in float32:
        y = x @ weight.T + bias

    1 or 2 rows     a program holds whole rows of the weights in registers, and sums in each thread
    up to 32        a program walks along K; what it will read goes to the L2 cache at once

Weights do not change while a model runs, so that they may be read before the programs of the kernel in front, whose
results are waited for then, are done (programmatic dependent launch, Hopper and later). A row of y depends on the
number of rows in so far as it chooses one of the two ways and, by their tiles, an order of the sums.

Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.errors import ArgumentError
from graphfuse.kernels.paged_split import dependent_launch
from graphfuse.kernels.sizes import ceil_div, power_of_two

MOST_ROWS = 32
MOST_INPUTS_IN_REGISTERS = 8192
LINE = 128
"""Bytes of a line of the L2 cache."""

MOST_LINES = 1024
"""Of what a program asks for ahead."""


@triton.jit
def _whole_rows(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]
    bias_ptr,  # [N]
    y_ptr,  # [M, N]
    stride_x,
    N,
    M: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    inside = n < N
    weight_ptrs = weight_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    weight = tl.load(weight_ptrs, mask=inside[:, None] & (k < K)[None, :], other=0.0)
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for m in tl.static_range(M):
        x = tl.load(x_ptr + m * stride_x + k, mask=k < K, other=0.0)
        y = tl.sum(weight.to(tl.float32) * x.to(tl.float32)[None, :], 1)
        if BIAS:
            y += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + m * N + n, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _along_inputs(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]
    bias_ptr,  # [N]
    y_ptr,  # [M, N]
    stride_x,
    M,
    N,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,
    NUMBERS_OF_A_LINE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_N
    n, m = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    n_inside, m_inside = n < N, m < M
    weight_ptr += first.to(tl.int64) * K
    if DEPENDENT_LAUNCH:
        line = tl.minimum(tl.arange(0, LINES) * NUMBERS_OF_A_LINE, (tl.minimum(N - first, BLOCK_N) * K) - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [(weight_ptr + line).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        row = tl.arange(0, BLOCK_N)[:, None]
        if K % BLOCK_K == 0:
            weight = tl.load(weight_ptr + row * K + k[None, :], mask=n_inside[:, None], other=0.0)
            x = tl.load(x_ptr + m[None, :] * stride_x + k[:, None], mask=m_inside[None, :], other=0.0)
        else:
            k_inside = k < K
            weight = tl.load(weight_ptr + row * K + k[None, :], mask=n_inside[:, None] & k_inside[None, :], other=0.0)
            x_mask = m_inside[None, :] & k_inside[:, None]
            x = tl.load(x_ptr + m[None, :] * stride_x + k[:, None], mask=x_mask, other=0.0)
        acc = tl.dot(weight, x, acc)
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n_inside, other=0.0).to(tl.float32)[:, None]
    y_ptrs = y_ptr + m[None, :] * N + n[:, None]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=n_inside[:, None] & m_inside[None, :])


class SkinnyTile(NamedTuple):
    """How a product is divided: outputs and inputs of a program's step, and Triton's own parameters."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def in_registers(num_rows: int, num_inputs: int) -> bool:
    """Whether programs hold whole rows of the weights."""
    return num_rows <= 2 and num_inputs <= MOST_INPUTS_IN_REGISTERS


def tile_for(num_rows: int, num_outputs: int, num_inputs: int) -> SkinnyTile:
    """What serves a shape: programs for all multiprocessors, each with 16 KiB of weights or more on their way."""
    if in_registers(num_rows, num_inputs):
        block_k = power_of_two(num_inputs)
        block_n = max(2, min(16, 8192 // block_k))
        while block_n > 2 and num_outputs < 256 * block_n:
            block_n //= 2
        return SkinnyTile(block_n, block_k, 8, 1)
    return SkinnyTile(16, 512, 4, 3)


def skinny_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, tile: SkinnyTile | None = None) -> Tensor:
    """`[M, N]` in x's dtype.

    Args:
        x: `[M, K]` bfloat16 or float16, M at most 32; copied first if a row's numbers are not adjacent.
        weight: `[N, K]` of x's dtype, contiguous. Must not change while this runs or is waited for.
        bias: `[N]`; copied first if its numbers are not adjacent.
        tile: None takes `tile_for`.

    Raises `ArgumentError` for more rows.
    """
    num_rows, num_inputs = x.shape
    num_outputs = weight.shape[0]
    if num_rows > MOST_ROWS:
        raise ArgumentError(f"x has {num_rows} rows. Pass at most {MOST_ROWS}, or use torch's product.")
    y = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    tile = tile or tile_for(num_rows, num_outputs, num_inputs)
    grid = (ceil_div(num_outputs, tile.block_n),)
    bias_or_x = x if bias is None else bias.contiguous()
    common = {"K": num_inputs, "BIAS": bias is not None, "num_warps": tile.num_warps, **dependent_launch(x.device)}
    if in_registers(num_rows, num_inputs):
        _whole_rows[grid](
            x, weight, bias_or_x, y, x.stride(0), num_outputs, M=num_rows, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
            **common,
        )  # fmt: skip
        return y
    lines = power_of_two(ceil_div(tile.block_n * num_inputs * weight.element_size(), LINE))
    _along_inputs[grid](
        x, weight, bias_or_x, y, x.stride(0), num_rows, num_outputs, BLOCK_M=max(16, power_of_two(num_rows)),
        BLOCK_N=tile.block_n, BLOCK_K=min(tile.block_k, max(16, power_of_two(num_inputs))),
        LINES=min(lines, MOST_LINES), NUMBERS_OF_A_LINE=LINE // weight.element_size(), num_stages=tile.num_stages,
        **common,
    )  # fmt: skip
    return y
