"""Put the choices of a router in order of their experts and list the blocks of rows, without the host.

    eager equivalent:
        expert = topk_ids.flatten() - first_expert                       # [P]
        order = argsort(where(held, expert, E), stable=False)[:num_held]
        blocks = for each expert with n choices from position s:
                     (expert, s + i * BLOCK_M, s + n) for i < ceil(n / BLOCK_M)

Rows of a product do not depend on where in a block they stand, so the order among the choices of one expert is left to
chance and results are the same bit by bit. Up to 2,048 choices one program does it all; more are counted and placed by
many, with one program between them that adds up the counts.

Legend: P choices (tokens times K), E experts held here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.kernels.moe_blocks import from_first
from graphfuse.kernels.sizes import ceil_div, power_of_two

ONE_PROGRAM = 2048
CHUNK = 1024
PLACED = 256  # at once: each thread waits for the counters it raises


@triton.jit
def _plan(counts, cursor_ptr, blocks_ptr, max_blocks, BINS: tl.constexpr, BLOCK_M: tl.constexpr):
    """From counts `[BINS]`: where each expert's choices start (cursor), and the list of blocks, then -1 for experts."""
    expert = tl.arange(0, BINS)
    start = tl.cumsum(counts, 0) - counts
    tl.store(cursor_ptr + expert, start)
    num_blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.cumsum(num_blocks, 0) - num_blocks
    for i in range(tl.max(num_blocks)):
        to = blocks_ptr + 3 * (first + i)
        tl.store(to, expert, mask=i < num_blocks)
        tl.store(to + 1, start + i * BLOCK_M, mask=i < num_blocks)
        tl.store(to + 2, start + counts, mask=i < num_blocks)
    total = tl.sum(num_blocks)
    for at in range(total, max_blocks, BINS):
        unused = at + expert
        tl.store(blocks_ptr + 3 * unused, -1, mask=unused < max_blocks)


@triton.jit
def _experts(ids_ptr, at, first_expert, num_experts, num_choices, BINS: tl.constexpr):
    """Experts of choices, counted from the first held here; BINS - 1, which is none of them, for those not held."""
    expert = from_first(tl.load(ids_ptr + at, mask=at < num_choices, other=-1), first_expert)
    held = (at < num_choices) & (expert >= 0) & (expert < num_experts)
    return tl.where(held, expert, BINS - 1), held


@triton.jit(do_not_specialize=["first_expert", "num_choices", "max_blocks"])
def sort_in_one_program(
    ids_ptr,
    order_ptr,
    cursor_ptr,
    blocks_ptr,
    first_expert,
    num_experts,
    num_choices,
    max_blocks,
    DEPENDENT_LAUNCH: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    counts = tl.zeros([BINS], tl.int32)
    for chunk in range(0, num_choices, CHUNK):
        at = chunk + tl.arange(0, CHUNK)
        expert, _ = _experts(ids_ptr, at, first_expert, num_experts, num_choices, BINS)
        counts += tl.histogram(expert, BINS)
    counts = tl.where(tl.arange(0, BINS) < num_experts, counts, 0)
    _plan(counts, cursor_ptr, blocks_ptr, max_blocks, BINS, BLOCK_M)
    tl.debug_barrier()  # every thread's cursors are written
    for chunk in range(0, num_choices, CHUNK):
        at = chunk + tl.arange(0, CHUNK)
        expert, held = _experts(ids_ptr, at, first_expert, num_experts, num_choices, BINS)
        to = tl.atomic_add(cursor_ptr + expert, 1, mask=held)
        tl.store(order_ptr + to, at, mask=held)


@triton.jit(do_not_specialize=["first_expert", "num_choices"])
def count(ids_ptr, counts_ptr, first_expert, num_experts, num_choices, BINS: tl.constexpr, CHUNK: tl.constexpr):
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert, _ = _experts(ids_ptr, at, first_expert, num_experts, num_choices, BINS)
    counts = tl.histogram(expert, BINS)
    bins = tl.arange(0, BINS)
    tl.atomic_add(counts_ptr + bins, counts, mask=(bins < num_experts) & (counts > 0))


@triton.jit(do_not_specialize=["max_blocks"])
def plan(counts_ptr, cursor_ptr, blocks_ptr, max_blocks, BINS: tl.constexpr, BLOCK_M: tl.constexpr):
    _plan(tl.load(counts_ptr + tl.arange(0, BINS)), cursor_ptr, blocks_ptr, max_blocks, BINS, BLOCK_M)


@triton.jit(do_not_specialize=["first_expert", "num_choices"])
def place(
    ids_ptr, order_ptr, cursor_ptr, first_expert, num_experts, num_choices, BINS: tl.constexpr, CHUNK: tl.constexpr
):
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert, held = _experts(ids_ptr, at, first_expert, num_experts, num_choices, BINS)
    to = tl.atomic_add(cursor_ptr + expert, 1, mask=held)
    tl.store(order_ptr + to, at, mask=held)


def max_blocks(num_choices: int, num_experts: int, block_size_m: int) -> int:
    """The most blocks there can be: each expert has at most one that is not full."""
    return min(num_choices, num_choices // block_size_m + min(num_experts, num_choices))


def sort_choices(
    topk_ids: Tensor, first_expert: int, num_experts: int, block_size_m: int, launch: dict[str, bool]
) -> tuple[Tensor, Tensor, int]:
    """Returns (order, of P choices; blocks, of 3 * max_blocks numbers; max_blocks): int32 on the device of the ids.

    topk_ids: contiguous, P of them, int32 or int64. A block is (expert, its first position in order, where its expert's
    positions end); blocks behind the last have expert -1. launch: keyword arguments of a dependent launch.
    """
    choices = topk_ids.numel()
    bins = power_of_two(num_experts + 1)
    num_blocks = max_blocks(choices, num_experts, block_size_m)
    sizes = [-(-size // 4) * 4 for size in (choices, 3 * num_blocks, bins)]  # whole 16 bytes: one kernel for all sizes
    order, blocks, cursor = torch.empty(sum(sizes), dtype=torch.int32, device=topk_ids.device).split(sizes)
    if choices <= ONE_PROGRAM:
        chunk = power_of_two(max(choices, 128))
        sort_in_one_program[(1,)](
            topk_ids, order, cursor, blocks, first_expert, num_experts, choices, num_blocks,
            BINS=bins, BLOCK_M=block_size_m, CHUNK=chunk, num_warps=max(4, min(32, chunk // 128)), **launch,
        )  # fmt: skip
        return order, blocks, num_blocks
    counts = torch.zeros(bins, dtype=torch.int32, device=topk_ids.device)
    grid = (ceil_div(choices, CHUNK),)
    count[grid](topk_ids, counts, first_expert, num_experts, choices, BINS=bins, CHUNK=CHUNK)
    plan[(1,)](counts, cursor, blocks, num_blocks, BINS=bins, BLOCK_M=block_size_m, num_warps=8)
    grid = (ceil_div(choices, PLACED),)
    place[grid](topk_ids, order, cursor, first_expert, num_experts, choices, BINS=bins, CHUNK=PLACED)
    return order, blocks, num_blocks
