"""What tests of MoE configs share: fixtures in the formats of others, and ways to look for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graphfuse.tuning.moe_files import find_table
from graphfuse.tuning.moe_reading import Found
from graphfuse.tuning.moe_tiles import MoeShape, Tile, Tiles

FIXTURES = Path(__file__).parent / "moe_fixtures"
SMALL_MEMORY = 101_376
"""Bytes of shared memory of an RTX PRO 6000."""


def both(*numbers: int, swap_ab: bool = False) -> Tiles:
    """The same tile for both products."""
    tile = Tile(*numbers, swap_ab=swap_ab)
    return Tiles(tile, tile)


def find(
    folder: str | Path | None,
    num_experts: int,
    intermediate_size: int,
    device: str = "NVIDIA H200",
    dtype: str | None = None,
    block_shape: tuple[int, int] | None = None,
    **arguments: Any,
) -> Found:
    """What is found in a folder of the fixtures, under Triton 3.4.0 if nothing else is said."""
    shape = MoeShape(num_experts, intermediate_size, 2048, 8, dtype, block_shape)
    folder = FIXTURES / folder if folder else None
    return find_table(shape, device, folder=folder, **{"triton_version": "3.4.0", **arguments})
