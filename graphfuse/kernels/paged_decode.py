"""Attention of one new token per sequence over a paged KV cache, divided over each sequence and then merged.

    eager equivalent, for row r and head h of group g, with t over the tokens that r sees:
        k, v = k_cache[pages[r, t // page_size], t % page_size, g], v_cache[...]      # [L, D], [L, Dv]
        s = (k @ q[r, h]) * scale;  w = exp(s) / (exp(sinks[h]) + exp(s).sum())       # in float32
        out[r, h] = w @ v

Query heads of a group share a program, so that keys and values are read once. A program makes one or several splits in
turn, and leaves a partial result of each; `paged_split` says how long they are, and merges them.

A row's result depends on nothing but the row: not on the other rows, their number, or the width of the page table, to
the bit. Slots that a row does not see are not read, whatever they hold. Source: Dao et al. 2023, "Flash-Decoding".

Legend: R rows, N pages of a row, Hq query heads, Hkv key-value heads, D head size, Dv value size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.errors import ArgumentError
from graphfuse.kernels.paged_split import (
    LOG2_E,
    MOST_SPLITS,
    SMALLEST_SPLIT,
    adjacent,
    capacity,
    check_caches,
    dependent_launch,
    merge,
    most_splits,
    num_multiprocessors,
    online_softmax,
    pages_of,
    split_tokens,
    store_split,
    visible_range,
)
from graphfuse.kernels.sizes import ceil_div, power_of_two

PROGRAMS_PER_MULTIPROCESSOR = 4
BYTES_IN_FLIGHT = 32 * 1024
"""Keys and values of one step of a program's loop; two or three of them are on their way at a time."""


@triton.jit(do_not_specialize=["stride_pages", "num_splits", "max_splits", "window"])
def _decode(
    q_ptr,  # [R, Hq, D]
    k_ptr,  # [num_pages, PAGE, Hkv, D]
    v_ptr,  # [num_pages, PAGE, Hkv, DV]
    pages_ptr,  # [R, N]
    positions_ptr,  # [R]
    partial_ptr,  # [R, Hq, num_splits, DV] float32
    lse_ptr,  # [R, Hq, num_splits] float32
    scale,  # with log2(e)
    stride_q_row,
    stride_q_head,
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_v_page,
    stride_v_slot,
    stride_v_head,
    stride_pages,
    num_splits,
    max_splits,
    window,
    WINDOWED: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head_blocks: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    kv_head = tl.program_id(1) // head_blocks
    first, start, end = visible_range(positions_ptr, row, window, WINDOWED, BLOCK)
    tokens = split_tokens(end - start, max_splits)
    used = tl.cdiv(end - start, tokens)
    run = tl.cdiv(used, tl.num_programs(2))  # splits of each program
    split = tl.program_id(2) * run
    if split >= used:
        return
    low = start + split * tokens
    high = tl.minimum(low + run * tokens, end)

    member = tl.program_id(1) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    valid = member < GROUP
    head = kv_head * GROUP + member
    column, value_column = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q_ptrs = q_ptr + row * stride_q_row + head[:, None] * stride_q_head + column[None, :]
    q = tl.load(q_ptrs, mask=valid[:, None] & (column[None, :] < D), other=0.0)
    heads = row * (tl.num_programs(1) // head_blocks * GROUP) + head
    k_ptr += kv_head.to(tl.int64) * stride_k_head
    v_ptr += kv_head.to(tl.int64) * stride_v_head
    pages_ptr += row * stride_pages

    lane = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK_H], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
    split_end = low + tokens
    page = pages_of(pages_ptr, low, end, PAGE, BLOCK)
    for at in range(low, high, BLOCK):
        visible = (at + lane >= first) & (at + lane < end)
        slot = (at + lane) % PAGE
        k_rows = page * stride_k_page + slot * stride_k_slot  # [BLOCK] int64
        v_rows = page * stride_v_page + slot * stride_v_slot
        page = pages_of(pages_ptr, at + BLOCK, high, PAGE, BLOCK)  # one step ahead of the loads that need it
        k_mask, v_mask = visible[:, None], visible[:, None]
        if D != BLOCK_D:
            k_mask = k_mask & (column[None, :] < D)
        if DV != BLOCK_DV:
            v_mask = v_mask & (value_column[None, :] < DV)
        k = tl.load(k_ptr + k_rows[:, None] + column[None, :], mask=k_mask, other=0.0)
        v = tl.load(v_ptr + v_rows[:, None] + value_column[None, :], mask=v_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [BLOCK_H, BLOCK]
        scores = tl.where(visible[None, :], scores, -float("inf"))
        weights, rescale, largest, total = online_softmax(scores, largest, total)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        if at + BLOCK >= tl.minimum(split_end, high):
            store_split(acc, largest, total, heads, valid, split, num_splits, partial_ptr, lse_ptr, DV, BLOCK_DV)
            split += 1
            split_end += tokens
            largest = tl.full([BLOCK_H], -float("inf"), tl.float32)  # so that the next step multiplies the rest by 0


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor,
    positions: Tensor,
    scale: float,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Row r attends to its positions 0 .. positions[r], or to the last `sliding_window` of them.

    Args:
        q: `[R, Hq, D]` bfloat16, float16 or float32, D from 16 to 256. Query head h reads key-value head
            `h // (Hq // Hkv)`.
        k_cache, v_cache: `[num_pages, page_size, Hkv, D]` and `[..., Dv]` of q's dtype; page_size a power of two from
            8; columns adjacent.
        pages: `[R, N]` int64: the pages of a row's positions 0 .. N * page_size - 1. Only those of positions that it
            sees are looked up. Rows may share pages.
        positions: `[R]` int64, less than N * page_size. A row with a negative one sees nothing: zeros.
        scale: factor on the dot products.
        sinks: `[Hq]`, floating: a logit of each head that joins its softmax and has no value.
        out: `[R, Hq, Dv]` of q's dtype, to be written; columns adjacent.

    Returns:
        `[R, Hq, Dv]`: `out`, or a new contiguous tensor.

    Raises:
        ArgumentError: a size that the kernel does not know.

    Nothing waits for the device, and only shapes decide what is launched: it can be captured in a CUDA graph and
    replayed as q, the caches, pages and positions change.
    """
    rows, num_heads, size = q.shape
    _, page_size, num_kv_heads, value_size = v_cache.shape
    if not (16 <= size <= 256 and 16 <= value_size <= 256):
        raise ArgumentError(f"Heads of {size} with values of {value_size} are not served. Use sizes from 16 to 256.")
    check_caches(k_cache, v_cache)
    if out is None:
        out = q.new_empty(rows, num_heads, value_size)
    if rows == 0 or num_heads == 0:
        return out
    q, pages = adjacent(q), adjacent(pages)
    group = num_heads // num_kv_heads
    block = block_tokens(size, value_size, q.element_size())
    block_h = heads_of_a_program(group, value_size, q.element_size())
    head_blocks = num_kv_heads * ceil_div(group, block_h)
    num_splits = most_splits(capacity(pages.shape[1], page_size, sliding_window, block))
    partial = torch.empty(rows, num_heads, num_splits, value_size, dtype=torch.float32, device=q.device)
    lse = torch.empty(rows, num_heads, num_splits, dtype=torch.float32, device=q.device)
    launch = dependent_launch(q.device)
    _decode[(rows, head_blocks, num_programs(rows * head_blocks, num_splits, num_multiprocessors(q.device)))](
        q, k_cache, v_cache, pages, positions, partial, lse, scale * LOG2_E, *q.stride()[:2], *k_cache.stride()[:3],
        *v_cache.stride()[:3], pages.stride(0), num_splits, MOST_SPLITS, sliding_window or 0,
        WINDOWED=sliding_window is not None, GROUP=group, D=size, DV=value_size, PAGE=page_size, BLOCK_H=block_h,
        BLOCK_D=power_of_two(size), BLOCK_DV=power_of_two(value_size), BLOCK=block, num_warps=4, num_stages=3, **launch,
    )  # fmt: skip
    merge(partial, lse, sinks, positions, out, MOST_SPLITS, sliding_window, block, launch)
    return out


def block_tokens(size: int, value_size: int, itemsize: int) -> int:
    """Tokens of a step of the loop: a power of two, 16 to SMALLEST_SPLIT."""
    row_bytes = (power_of_two(size) + power_of_two(value_size)) * itemsize
    return min(SMALLEST_SPLIT, max(16, power_of_two(BYTES_IN_FLIGHT // row_bytes + 1) // 2))


def heads_of_a_program(group: int, value_size: int, itemsize: int) -> int:
    """16, which tensor cores need, to 64, as far as a program's registers hold what it sums up."""
    return max(16, min(power_of_two(group), 64 if itemsize == 2 and value_size <= 128 else 16))


def num_programs(num_others: int, num_splits: int, multiprocessors: int) -> int:
    """Programs that a row's splits are dealt to: one each where rows are few, so that all multiprocessors work."""
    return min(num_splits, ceil_div(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors, num_others))
