"""Which choices a program of a grouped matrix product works on.

A choice is one (token, k) pair, numbered t * K + k. A block is up to BLOCK_M choices of one expert. There are two ways
to find a block's choices:

    SORTED       `moe_sort` has put the choices in order of their experts, and listed the blocks
    otherwise    few choices: block b starts at choice b, if that is the 1st, BLOCK_M + 1st, ... choice of its expert,
                 and each program finds the others by looking at all ids; no sort has to run before

Choices of experts that are not held here (ids outside first_expert .. first_expert + E - 1) are in no block.

Legend: T tokens, K choices per token, P = T * K choices, E experts held here.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of(program, num_row_blocks, num_column_blocks, group_m):
    """(row block, column block) of a program: group_m row blocks are worked on side by side, so that what they share of
    the weights is read from the L2 cache."""
    in_group = group_m * num_column_blocks
    first = program // in_group * group_m
    rows = min(num_row_blocks - first, group_m)
    return first + program % in_group % rows, program % in_group // rows


@triton.jit
def from_first(ids, first_expert):
    """Ids as int32 counted from the first expert held here; what is negative or too large stays so."""
    ids -= first_expert
    if ids.dtype == tl.int64:
        ids = tl.minimum(tl.maximum(ids, -1), 0x7FFFFFFF)
    return ids.to(tl.int32)


@triton.jit
def choices_of(
    block,
    ids_ptr,
    order_ptr,
    blocks_ptr,
    first_expert,
    num_experts,
    num_choices,
    SORTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """(expert, choices `[BLOCK_M]`, rows `[BLOCK_M]` of the intermediate, which of them are valid `[BLOCK_M]`).

    The expert counts from the first one held here; a negative one means that there is nothing to do.
    """
    lane = tl.arange(0, BLOCK_M)
    if SORTED:
        expert = tl.load(blocks_ptr + 3 * block)
        rows = tl.load(blocks_ptr + 3 * block + 1) + lane
        valid = (rows < tl.load(blocks_ptr + 3 * block + 2)) & (expert >= 0)  # of no expert, the rest is not written
        choices = tl.load(order_ptr + rows, mask=valid, other=0)
    else:
        expert = from_first(tl.load(ids_ptr + block), first_expert)
        at = tl.arange(0, CHOICES)
        same = from_first(tl.load(ids_ptr + at, mask=at < num_choices, other=-1), first_expert) == expert
        same = (same & (at < num_choices)).to(tl.int32)
        before = tl.sum(same * (at < block).to(tl.int32))
        number = tl.cumsum(same, 0) - 1 - before  # of each choice of this expert, from this block's first
        starts = (before % BLOCK_M == 0) & (expert >= 0) & (expert < num_experts)
        expert = tl.where(starts, expert, -1)
        hit = (same[None, :] != 0) & (number[None, :] == lane[:, None])  # [BLOCK_M, CHOICES]
        choices = tl.sum(tl.where(hit, at[None, :], 0), 1)
        valid = tl.sum(hit.to(tl.int32), 1) != 0
        rows = choices
    return expert, choices, rows, valid
