"""Launch parameters of an MoE layer's two grouped products, under the names of the ecosystem's tuning files.

Legend: M tokens (the keys of a tuning file), T * K choices, E experts held here, I intermediate size here, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """How one grouped product is cut up.

    gate_up computes `[rows, 2I]` from `[rows, H]`, down computes `[rows, H]` from `[rows, I]`; block_size_n counts
    columns of these results, so that a block of gate_up holds block_size_n / 2 gates and as many ups.
    """

    block_size_m: int
    """Rows (choices of one expert) of a block: 16, 32, 64, 128 or 256."""

    block_size_n: int
    block_size_k: int

    group_size_m: int = 1
    """Blocks of rows that are worked on side by side for each block of columns: weights stay in the L2 cache."""

    num_warps: int = 4
    num_stages: int = 3

    swap_ab: bool = False
    """Let weights be the rows of the tensor cores' product and tokens its columns: the better shape for few tokens."""


@dataclass(frozen=True)
class Tiles:
    """Both products of a layer. They share one sort of the choices, so their block_size_m must be equal."""

    gate_up: Tile
    down: Tile

    def __post_init__(self) -> None:
        assert self.gate_up.block_size_m == self.down.block_size_m, "gate_up and down share one sort"


@dataclass(frozen=True)
class MoeShape:
    """What a tuning file is made for."""

    num_experts: int
    """Experts held by a rank."""

    intermediate_size: int
    """Of an expert, on a rank; a file's N."""

    hidden_size: int
    top_k: int

    dtype: str | None = None
    """As in file names: None for 16- and 32-bit floats, "fp8_w8a8" where weights and activations are FP8."""

    block_shape: tuple[int, int] | None = None
    """(output, input) size of the blocks that share a scale."""
