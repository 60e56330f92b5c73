"""Multi-head latent attention of one new token per sequence over a paged cache of latents, in the absorbed form.

    eager equivalent, for row r and head h, with t over the tokens that r sees:
        c, k = latent_cache[pages[r, t // page_size], t % page_size], k_rope_cache[...]      # [L, Rank], [L, P]
        s = (c @ q_latent[r, h] + k @ q_rope[r, h]) * scale;  out[r, h] = softmax(s) @ c      # softmax in float32

All heads of a row share one "key-value head", the cache itself, and a tile of latents serves as keys and as values. Up
to 64 heads share a program. Their partial results are as large as what a short split reads, so that there are only as
many splits as multiprocessors to work on them: a row's result depends on the number of rows, to the last bits, but
neither on what the other rows are nor on the width of the page table.

Legend: R rows, N pages of a row, H heads, Rank latent size, P size of the rotary part.
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
    adjacent,
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


@triton.jit(do_not_specialize=["stride_pages", "num_splits", "max_splits"])
def _latent_decode(
    q_latent_ptr,  # [R, H, RANK]
    q_rope_ptr,  # [R, H, P]
    latent_ptr,  # [num_pages, PAGE, RANK]
    k_rope_ptr,  # [num_pages, PAGE, P]
    pages_ptr,  # [R, N]
    positions_ptr,  # [R]
    partial_ptr,  # [R, H, num_splits, RANK] float32
    lse_ptr,  # [R, H, num_splits] float32
    scale,  # with log2(e)
    num_heads,
    stride_latent_row,
    stride_latent_head,
    stride_rope_row,
    stride_rope_head,
    stride_latent_page,
    stride_latent_slot,
    stride_k_rope_page,
    stride_k_rope_slot,
    stride_pages,
    num_splits,
    max_splits,
    DEPENDENT_LAUNCH: tl.constexpr,
    RANK: tl.constexpr,
    P: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    _, _, end = visible_range(positions_ptr, row, 0, False, BLOCK)
    tokens = split_tokens(end, max_splits)
    low = split * tokens
    if low >= end:
        return
    high = tl.minimum(low + tokens, end)

    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    valid = head < num_heads
    column, rope_column = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_P)
    q_ptrs = q_latent_ptr + row * stride_latent_row + head[:, None] * stride_latent_head + column[None, :]
    q = tl.load(q_ptrs, mask=valid[:, None] & (column[None, :] < RANK), other=0.0)
    q_rope_ptrs = q_rope_ptr + row * stride_rope_row + head[:, None] * stride_rope_head + rope_column[None, :]
    q_rope = tl.load(q_rope_ptrs, mask=valid[:, None] & (rope_column[None, :] < P), other=0.0)
    pages_ptr += row * stride_pages

    lane = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK_H], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_RANK], tl.float32)
    page = pages_of(pages_ptr, low, high, PAGE, BLOCK)
    for at in range(low, high, BLOCK):
        visible = at + lane < high
        slot = (at + lane) % PAGE
        latent_rows = page * stride_latent_page + slot * stride_latent_slot  # [BLOCK] int64
        k_rope_rows = page * stride_k_rope_page + slot * stride_k_rope_slot
        page = pages_of(pages_ptr, at + BLOCK, high, PAGE, BLOCK)  # one step ahead of the loads that need it
        latent_mask, k_rope_mask = visible[:, None], visible[:, None]
        if RANK != BLOCK_RANK:
            latent_mask = latent_mask & (column[None, :] < RANK)
        if P != BLOCK_P:
            k_rope_mask = k_rope_mask & (rope_column[None, :] < P)
        latent = tl.load(latent_ptr + latent_rows[:, None] + column[None, :], mask=latent_mask, other=0.0)
        k_rope = tl.load(k_rope_ptr + k_rope_rows[:, None] + rope_column[None, :], mask=k_rope_mask, other=0.0)
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")  # [BLOCK_H, BLOCK]
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
        scores = tl.where(visible[None, :], scores * scale, -float("inf"))
        weights, rescale, largest, total = online_softmax(scores, largest, total)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * rescale[:, None], input_precision="ieee")
    heads = row * num_heads + head
    store_split(acc, largest, total, heads, valid, split, num_splits, partial_ptr, lse_ptr, RANK, BLOCK_RANK)


def paged_latent_decode(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    k_rope_cache: Tensor,
    pages: Tensor,
    positions: Tensor,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Row r mixes the latents of its positions 0 .. positions[r].

    Args:
        q_latent: `[R, H, Rank]`, the query with W_uk moved into it: bfloat16, float16 or float32, Rank from 16 to 512.
        q_rope: `[R, H, P]`, P from 16 to 128, after the rotary embedding.
        latent_cache, k_rope_cache: `[num_pages, page_size, Rank]` and `[num_pages, page_size, P]`, page_size a power of
            two from 8.
        pages, positions, scale: as for `paged_decode`.
        out: `[R, H, Rank]`, to be written; columns adjacent.

    Returns:
        `[R, H, Rank]`: `out`, or a new contiguous tensor.

    Raises:
        ArgumentError: a size that the kernel does not know.

    It can be captured in a CUDA graph, like `paged_decode`.
    """
    rows, num_heads, rank = q_latent.shape
    size, page_size = q_rope.shape[2], latent_cache.shape[1]
    if not (16 <= rank <= 512 and 16 <= size <= 128):
        raise ArgumentError(
            f"Latents of {rank} with rotary parts of {size} are not served. Use sizes from 16 to 512 and 16 to 128."
        )
    check_caches(latent_cache, k_rope_cache)
    if out is None:
        out = q_latent.new_empty(rows, num_heads, rank)
    if rows == 0 or num_heads == 0:
        return out
    q_latent, q_rope, pages = adjacent(q_latent), adjacent(q_rope), adjacent(pages)
    block_h, block, num_warps, num_stages = tile(num_heads, rank, q_latent.element_size())
    head_blocks = ceil_div(num_heads, block_h)
    max_splits = split_limit(rows * head_blocks, num_multiprocessors(q_latent.device))
    num_splits = most_splits(pages.shape[1] * page_size, max_splits)
    partial = torch.empty(rows, num_heads, num_splits, rank, dtype=torch.float32, device=q_latent.device)
    lse = torch.empty(rows, num_heads, num_splits, dtype=torch.float32, device=q_latent.device)
    launch = dependent_launch(q_latent.device)
    _latent_decode[(rows, head_blocks, num_splits)](
        q_latent, q_rope, latent_cache, k_rope_cache, pages, positions, partial, lse, scale * LOG2_E, num_heads,
        *q_latent.stride()[:2], *q_rope.stride()[:2], *latent_cache.stride()[:2], *k_rope_cache.stride()[:2],
        pages.stride(0), num_splits, max_splits, RANK=rank, P=size, PAGE=page_size, BLOCK_H=block_h,
        BLOCK_RANK=power_of_two(rank), BLOCK_P=power_of_two(size), BLOCK=block, num_warps=num_warps,
        num_stages=num_stages, **launch,
    )  # fmt: skip
    merge(partial, lse, None, positions, out, max_splits, None, block, launch)
    return out


def tile(num_heads: int, rank: int, itemsize: int) -> tuple[int, int, int, int]:
    """(heads of a program, tokens of a step of its loop, warps, stages): what a multiprocessor's memory holds."""
    if itemsize == 4:
        return 16, 16, 4, 2
    block_h = min(64, max(16, power_of_two(num_heads)))
    return block_h, 32 if rank > 256 else 64, 8 if block_h == 64 else 4, 3


def split_limit(num_others: int, multiprocessors: int) -> int:
    """Splits of a row at most: one program for each multiprocessor, which is all that fit."""
    return max(1, min(MOST_SPLITS, multiprocessors // num_others))
