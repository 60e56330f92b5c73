"""How paged decoding divides a sequence, and how the parts become one: what GQA and MLA have in common.

    a row's visible tokens ─► splits ─► each split its own softmax: partial [R, H, splits, Dv], lse [R, H, splits]
                           ─► merge: out[r, h] = sum over s of 2^lse[s] * partial[s] / (2^sink + sum over s of 2^lse[s])

A split's size follows from the row's own number of visible tokens (and `max_splits`): short rows have short splits,
since there a step waits for the slowest of few programs, and long rows long ones, whose partial results are few beside
what they read. Which program makes a split is another question, answered from shapes alone, and changes no bit.

Logarithms are to base 2, which the GPU has an instruction for. Legend: R rows, H query heads, Dv value size.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.errors import ArgumentError
from graphfuse.kernels.sizes import ceil_div, power_of_two

LOG2_E = 1.4426950408889634
SMALLEST_SPLIT = 128
MOST_SPLITS = 64
"""What `merge` looks at in one go."""


@triton.jit
def split_tokens(span, max_splits):
    """Tokens of each split of a row that sees `span`: a multiple of 128, for at most max_splits splits."""
    tokens = tl.where(span <= 2048, 128, tl.where(span <= 8192, 256, 512))
    return tl.maximum(tokens, tl.cdiv(tl.cdiv(span, max_splits), 128) * 128)


@triton.jit
def visible_range(positions_ptr, row, window, WINDOWED: tl.constexpr, BLOCK: tl.constexpr):
    """(first, start, end): the row sees tokens first .. end - 1; start is first's block of tokens."""
    end = tl.load(positions_ptr + row).to(tl.int32) + 1
    first = end * 0
    if WINDOWED:
        first = tl.maximum(end - window, 0)
    return first, first // BLOCK * BLOCK, end


@triton.jit
def pages_of(pages_ptr, token, end, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Pages of BLOCK tokens from `token`, a multiple of BLOCK: one number where a page holds them all, else [BLOCK]."""
    if PAGE >= BLOCK:
        return tl.load(pages_ptr + token // PAGE, mask=token < end, other=0)
    else:
        tokens = token + tl.arange(0, BLOCK)
        return tl.load(pages_ptr + tokens // PAGE, mask=tokens < end, other=0)


@triton.jit
def online_softmax(scores, largest, total):
    """One step for scores `[H, BLOCK]`: (weights, what earlier sums are multiplied by, largest, total)."""
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - new_largest[:, None])
    rescale = tl.exp2(largest - new_largest)
    return weights, rescale, new_largest, total * rescale + tl.sum(weights, 1)


@triton.jit
def store_split(
    acc, largest, total, heads, valid, split, num_splits, partial_ptr, lse_ptr, DV: tl.constexpr, BLOCK_DV: tl.constexpr
):
    """heads: [H] int64, of all rows' heads in turn."""
    column = tl.arange(0, BLOCK_DV)
    at = heads * num_splits + split
    out = acc / total[:, None]
    tl.store(partial_ptr + at[:, None] * DV + column[None, :], out, mask=valid[:, None] & (column[None, :] < DV))
    tl.store(lse_ptr + at, largest + tl.log2(total), mask=valid)


@triton.jit(do_not_specialize=["num_splits", "max_splits", "window"])
def _merge(
    partial_ptr,  # [R, H, num_splits, DV]
    lse_ptr,  # [R, H, num_splits]
    sinks_ptr,  # [H]
    positions_ptr,  # [R]
    out_ptr,  # [R, H, DV]
    stride_out_row,
    stride_out_head,
    num_splits,
    max_splits,
    window,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    STEP: tl.constexpr,
):
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, start, end = visible_range(positions_ptr, row, window, WINDOWED, BLOCK)
    span = end - start
    used = tl.cdiv(span, split_tokens(span, max_splits))
    first = (row * tl.num_programs(1) + head) * num_splits
    lane = tl.arange(0, LANES)
    lse = tl.load(lse_ptr + first + lane, mask=lane < used, other=-float("inf"))
    largest = tl.max(lse, 0)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        largest = tl.maximum(largest, sink)
    largest = tl.where(largest == -float("inf"), 0.0, largest)  # a row that sees nothing: zeros
    total = tl.sum(tl.exp2(lse - largest), 0)
    if SINKS:
        total += tl.exp2(sink - largest)
    column = tl.arange(0, BLOCK_DV)
    inside = column[None, :] < DV
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for at in range(0, used, STEP):
        split = at + tl.arange(0, STEP)
        exist = split < used
        weight = tl.exp2(tl.load(lse_ptr + first + split, mask=exist, other=-float("inf")) - largest)
        part_ptrs = partial_ptr + (first + split)[:, None] * DV + column[None, :]
        part = tl.load(part_ptrs, mask=exist[:, None] & inside, other=0.0)
        acc += tl.sum(weight[:, None] * part, 0)
    out = acc / tl.where(total == 0.0, 1.0, total)
    to = out_ptr + row * stride_out_row + head * stride_out_head + column
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=column < DV)


def merge(
    partial: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    positions: Tensor,
    out: Tensor,
    max_splits: int,
    window: int | None,
    block: int,
    launch: dict[str, bool],
) -> None:
    """partial `[R, H, splits, Dv]` and lse `[R, H, splits]` float32, out `[R, H, Dv]` with adjacent columns. A row's
    splits are those of `split_tokens`; others are not read. block: what the kernel before rounded its start to."""
    rows, heads, num_splits, size = partial.shape
    block_dv = power_of_two(size)
    _merge[(rows, heads)](
        partial, lse, lse if sinks is None else sinks, positions, out, out.stride(0), out.stride(1),
        num_splits, max_splits, window or 0, WINDOWED=window is not None, SINKS=sinks is not None,
        DV=size, BLOCK_DV=block_dv, BLOCK=block, LANES=MOST_SPLITS, STEP=8,
        num_warps=4 if block_dv > 64 else 2, **launch,
    )  # fmt: skip


def most_splits(num_tokens: int, max_splits: int = MOST_SPLITS) -> int:
    """The most splits of a row that sees at most so many tokens, by the rule of `split_tokens`."""
    if num_tokens <= 2048:
        found = ceil_div(num_tokens, 128)
    elif num_tokens <= 8192:
        found = max(16, ceil_div(num_tokens, 256))
    else:
        found = max(32, ceil_div(num_tokens, 512))
    return max(1, min(found, max_splits))


def capacity(num_pages: int, page_size: int, window: int | None, block: int) -> int:
    """Tokens that a row of so many pages can see, with those that its first block holds besides."""
    tokens = num_pages * page_size
    return tokens if window is None else min(tokens, window + block)


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """What torch asks the driver for each time. The interpreter's CPU has one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Let a kernel start while the one before it ends (Hopper and later): its launch overlaps with that."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"DEPENDENT_LAUNCH": True, "launch_pdl": True}
    return {"DEPENDENT_LAUNCH": False}


def check_caches(*caches: Tensor) -> None:
    """Raises `ArgumentError` for pages that the kernels cannot read."""
    for cache in caches:
        page_size = cache.shape[1]
        if page_size < 8 or page_size & (page_size - 1):
            raise ArgumentError(f"Pages of {page_size} tokens are not served. Use a power of two from 8.")
        if cache.stride(-1) != 1:
            raise ArgumentError(f"A cache has strides {cache.stride()}. Allocate it with adjacent columns.")


def adjacent(x: Tensor) -> Tensor:
    """With rows of adjacent numbers."""
    return x if x.stride(-1) == 1 else x.contiguous()
