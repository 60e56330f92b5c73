"""Launch parameters made to fit a device's shared memory and the blocks that share a scale.

A file may be tuned on a GPU with more shared memory than the one that runs it: where 147,456 bytes are asked for and
101,376 are there, Triton raises OutOfResources at the first launch. Here such parameters are made smaller instead.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

from graphfuse.tuning.moe_tiles import MoeShape, Tile, Tiles

MIN_BLOCK = 16
"""Columns that a block keeps: what tensor cores work on at once."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the launch parameters of a shape must keep to on a device."""

    shared_memory: int | None = None
    """Bytes a block of threads may have (H200: 232,448; RTX 6000 Ada and RTX PRO 6000: 101,376). None: any number."""

    token_bytes: int = 2
    weight_bytes: int = 2
    """Bytes of an element of either operand, as it is stored or as it is multiplied, whichever is more."""

    block_shape: tuple[int, int] | None = None

    @classmethod
    def of(
        cls, shape: MoeShape, shared_memory: int | None = None, float_bytes: int = 2, *, rounds_tokens: bool = False
    ) -> Limits:
        """The limits of a shape, by the name of its dtype: 8-bit weights (w8), 8-bit tokens (a8), else floats.

        8-bit tokens are rounded before the product, or in it (`rounds_tokens`) where each expert has a static scale.
        """
        name = shape.dtype or ""
        token_bytes = 1 if "a8" in name and not rounds_tokens else float_bytes
        weight_bytes = 1 if ("w8" in name or "w4" in name) and "a8" in name else float_bytes
        return cls(shared_memory, token_bytes, weight_bytes, shape.block_shape)


def shared_memory_bytes(tile: Tile, limits: Limits) -> int:
    """Shared memory that a product asks for, at most: each stage holds a block of either operand.

    That is what Triton 3.6 takes on Hopper, where the asynchronous tensor cores read from memory; elsewhere it gets
    along with one stage less. Rounding a block of tokens in the product takes less than that stage of it. Scales that
    are applied in the loop pass through memory, too.
    """
    tokens = tile.block_size_m * tile.block_size_k * limits.token_bytes
    weights = tile.block_size_n * tile.block_size_k * limits.weight_bytes
    scales = 4 * (tile.block_size_m + tile.block_size_n) if limits.block_shape else 0
    return tile.num_stages * (tokens + weights) + scales


@lru_cache(maxsize=4096)
def fit(tiles: Tiles, limits: Limits) -> Tiles:
    """The same launch parameters, or the nearest ones that keep to the limits; block_size_m is kept.

    A block of gate_up holds as many ups as gates, and tensor cores need MIN_BLOCK of either.
    """
    return Tiles(_fit(tiles.gate_up, limits, 2 * MIN_BLOCK), _fit(tiles.down, limits, MIN_BLOCK))


def _fit(tile: Tile, limits: Limits, least_columns: int) -> Tile:
    """Two stages still overlap loads with arithmetic, so one is the last resort."""
    least_inputs = 32 if limits.weight_bytes == 1 else MIN_BLOCK  # tl.dot of 8-bit operands
    inputs = max(tile.block_size_k, least_inputs)
    if limits.block_shape:  # a step over inputs is a block that shares a scale
        inputs = least_inputs = _power_of_two_in(limits.block_shape[1])
    tile = dataclasses.replace(tile, block_size_n=max(tile.block_size_n, least_columns), block_size_k=inputs)
    steps = ("num_stages", 2), ("block_size_k", least_inputs), ("block_size_n", least_columns), ("num_stages", 1)
    for name, least in steps:
        while getattr(tile, name) > least:
            if limits.shared_memory is None or shared_memory_bytes(tile, limits) <= limits.shared_memory:
                return tile
            value = getattr(tile, name)
            tile = dataclasses.replace(tile, **{name: value - 1 if name == "num_stages" else value // 2})
    return tile


def _power_of_two_in(size: int) -> int:
    """The largest power of two that divides a size."""
    return size & -size
