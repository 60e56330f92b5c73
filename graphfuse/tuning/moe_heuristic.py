"""Launch parameters where no file was tuned: a rule of thumb, from measurements of five shapes on H200.

What decides is how many rows an expert gets. With few of them the time is that of reading the weights, and blocks of
rows should be no taller than needed; with many it is that of the tensor cores, and blocks should be large. A product of
few inputs has no use for more stages than steps, and without them more of its programs fit on an SM.

Legend: T tokens, E experts, K choices per token.
"""

from __future__ import annotations

from dataclasses import replace

from graphfuse.tuning.moe_tiles import MoeShape, Tile, Tiles


def heuristic(shape: MoeShape, num_tokens: int) -> Tiles:
    """Tiles for `num_tokens` tokens, routed evenly."""
    experts, top_k = max(shape.num_experts, 1), max(shape.top_k, 1)
    touched = experts * (1 - (1 - min(top_k / experts, 1)) ** num_tokens)
    tile = _tile(num_tokens * top_k / max(touched, 1), num_tokens * top_k, shape)
    steps = -(-shape.intermediate_size // tile.block_size_k)
    return Tiles(tile, replace(tile, num_stages=min(tile.num_stages, max(2, steps))))


def _tile(rows: float, choices: int, shape: MoeShape) -> Tile:
    """For `rows` rows of each expert that has any."""
    is_fp8 = shape.dtype is not None
    if rows <= 12:
        return Tile(16, 64 if choices <= 16 else 128, 128, 1, 4, 5 if is_fp8 else 4, swap_ab=is_fp8 and choices > 16)
    if rows <= 24:
        return Tile(32, 128, 128, 8, 4, 3, swap_ab=True)
    if shape.block_shape is not None:
        return Tile(64, 128, 128, 8, 4, 4)
    if rows <= 96:
        return Tile(64, 256, 128, 8, 8, 3) if is_fp8 else Tile(64, 128, 64, 8, 4, 4)
    return Tile(128, 256, 128, 8, 8, 3) if is_fp8 else Tile(128, 256, 64, 8, 8, 4)
