"""The tiles that a search may try: those of the peers' tuners and swapped operands, pruned by what cannot be good.

A core is what decides most: the block, and which operand is which. Its warps, stages and grouping come from the cost
model at first, and are varied where a core turns out to be fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product

from graphfuse.tuning.moe_cost import WGMMA_ROWS, Device, Product, accumulators, columns_at_once, row_blocks, seconds
from graphfuse.tuning.moe_shared_memory import Limits, shared_memory_bytes
from graphfuse.tuning.moe_tiles import MoeShape, Tile

BLOCKS_M = (16, 32, 64, 128, 256)
BLOCKS_N = (32, 64, 128, 256)
BLOCKS_K = (64, 128, 256)
GROUPS = (1, 8, 16, 32, 64)
WARPS = (4, 8)
STAGES = (2, 3, 4, 5)
USUAL_STAGES = 4

MIN_ACCUMULATORS, MAX_ACCUMULATORS = 4, 128
"""Results in the registers of a thread: with fewer, a warp has too little to do; with more, they spill."""


def ranked(shape: MoeShape, num_tokens: int, name: str, block_size_m: int, device: Device) -> list[Tile]:
    """One tile for each core of a product ("gate_up" or "down"), the likely fastest first."""
    fastest: dict[tuple[int, int, bool], tuple[float, Tile]] = {}
    for tile in tiles(shape, name, block_size_m, device):
        core = tile.block_size_n, tile.block_size_k, tile.swap_ab
        time = seconds(shape, num_tokens, name, tile, device)
        # The model sees no reason for more stages than memory needs; what wins has three or four where they fit.
        time *= 1 + 0.03 * abs(tile.num_stages - USUAL_STAGES)
        if core not in fastest or time < fastest[core][0]:
            fastest[core] = time, tile
    order = sorted(fastest.values(), key=lambda pair: pair[0])
    group = 1 if row_blocks(num_tokens * shape.top_k / shape.num_experts, block_size_m) < 2 else GROUPS[1]
    return [replace(tile, group_size_m=group) for _, tile in order]


def ranked_blocks_m(shape: MoeShape, num_tokens: int, device: Device) -> list[int]:
    """`block_size_m` of a layer, the likely fastest first."""
    times = {}
    for block_size_m in BLOCKS_M:
        best = [ranked(shape, num_tokens, name, block_size_m, device) for name in ("gate_up", "down")]
        if all(best):
            times[block_size_m] = sum(
                seconds(shape, num_tokens, name, tiles[0], device)
                for name, tiles in zip(("gate_up", "down"), best, strict=True)
            )
    return sorted(times, key=lambda block_size_m: times[block_size_m])


@lru_cache(maxsize=256)
def tiles(shape: MoeShape, name: str, block_size_m: int, device: Device) -> tuple[Tile, ...]:
    """All tiles of a product that may be good, without grouping."""
    return tuple(tile for tile in _all(block_size_m) if _is_sensible(tile, shape, name, device))


def neighbours(tile: Tile, shape: MoeShape, name: str, device: Device, *, blocks: bool) -> list[Tile]:
    """Tiles that differ in one parameter: grouping, warps, stages or operands; with `blocks`, also a block's size."""
    found = [replace(tile, group_size_m=group) for group in GROUPS]
    found += [replace(tile, num_warps=warps) for warps in WARPS]
    found += [replace(tile, num_stages=tile.num_stages + step) for step in (-1, 1)]
    found += [replace(tile, swap_ab=not tile.swap_ab)]
    if blocks:
        found += [replace(tile, block_size_n=size) for size in (tile.block_size_n // 2, tile.block_size_n * 2)]
        found += [replace(tile, block_size_k=size) for size in (tile.block_size_k // 2, tile.block_size_k * 2)]
    return [
        other
        for other in dict.fromkeys(found)
        if other != tile and _is_in_space(other) and _is_sensible(other, shape, name, device)
    ]


def _all(block_size_m: int) -> Iterator[Tile]:
    swaps = (False, True) if block_size_m < WGMMA_ROWS else (False,)
    for block_n, block_k, swap, warps, stages in product(BLOCKS_N, BLOCKS_K, swaps, WARPS, STAGES):
        yield Tile(block_size_m, block_n, block_k, 1, warps, stages, swap)


def _is_in_space(tile: Tile) -> bool:
    return (
        tile.block_size_n in BLOCKS_N
        and tile.block_size_k in BLOCKS_K
        and tile.num_stages in STAGES
        and not (tile.swap_ab and tile.block_size_m >= WGMMA_ROWS)
    )


def _is_sensible(tile: Tile, shape: MoeShape, name: str, device: Device) -> bool:
    limits, whole = Limits.of(shape), Product.of(shape, name)
    if limits.block_shape is not None:
        block_k = limits.block_shape[1]
        # A step over inputs has one scale: two steps for a block would only multiply by it twice.
        if block_k % tile.block_size_k or (block_k in BLOCKS_K and tile.block_size_k != block_k):
            return False
    if tile.swap_ab and columns_at_once(tile, name) < WGMMA_ROWS:
        return False
    if tile.block_size_n >= 2 * whole.columns and tile.block_size_n > BLOCKS_N[0]:
        return False
    if tile.block_size_k >= 2 * whole.depth and tile.block_size_k > BLOCKS_K[0]:
        return False
    return (
        shared_memory_bytes(tile, limits) <= device.shared_memory
        and MIN_ACCUMULATORS <= accumulators(tile) <= MAX_ACCUMULATORS
    )
