"""Rows of two tensors, each into its paged cache: the keys and values of a step's tokens in one launch.

    eager equivalent:
        a_cache.flatten(0, 1)[entries] = a
        b_cache.flatten(0, 1)[entries] = b

Legend: T tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphfuse.kernels.paged_split import dependent_launch
from graphfuse.kernels.sizes import power_of_two

MOST_COLUMNS = 2048
"""What a program copies in one go."""


@triton.jit
def _copy(from_ptr, to_ptr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    for start in tl.static_range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < COLUMNS
        tl.store(to_ptr + column, tl.load(from_ptr + column, mask=inside), mask=inside)


@triton.jit
def _write(
    a_ptr,  # [T, A]
    b_ptr,  # [T, B]
    entries_ptr,  # [T]
    a_cache_ptr,  # [entries, A]
    b_cache_ptr,  # [entries, B]
    num_entries,
    stride_a,
    stride_b,
    A: tl.constexpr,
    B: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    entry = tl.load(entries_ptr + token)
    if (entry < 0) | (entry >= num_entries):
        return
    if tl.program_id(1) == 0:
        _copy(a_ptr + token * stride_a, a_cache_ptr + entry * A, A, BLOCK_A)
    else:
        _copy(b_ptr + token * stride_b, b_cache_ptr + entry * B, B, BLOCK_B)


def paged_write(a: Tensor, b: Tensor, entries: Tensor, a_cache: Tensor, b_cache: Tensor) -> None:
    """Tokens whose entry is the same leave one of theirs.

    Args:
        a, b: `[T, ...]`; copied first if a token's numbers are not adjacent.
        entries: `[T]` int64: page * page_size + slot. A token whose entry lies outside the caches is not written.
        a_cache, b_cache: `[num_pages, page_size, ...]` of a's and b's dtype, as many of both, contiguous. Written
            **in place**.
    """
    if len(a) == 0:
        return
    a, b = a.flatten(1), b.flatten(1)
    a, b = (x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous() for x in (a, b))
    a_columns, b_columns = a.shape[1], b.shape[1]
    _write[(len(a), 2)](
        a, b, entries, a_cache, b_cache, a_cache.shape[0] * a_cache.shape[1], a.stride(0), b.stride(0),
        A=a_columns, B=b_columns,
        BLOCK_A=min(power_of_two(a_columns), MOST_COLUMNS), BLOCK_B=min(power_of_two(b_columns), MOST_COLUMNS),
        num_warps=4, **dependent_launch(a.device),
    )  # fmt: skip
