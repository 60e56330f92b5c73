"""MXFP4, the format of gpt-oss's experts: 4-bit floats, of which 32 along the last dimension share a power of two.

    blocks   [..., ceil(K / 32), 16] uint8    two values a byte, the low four bits first: sign, 2 exponent, 1 mantissa
    scales   [..., ceil(K / 32)]     uint8    times 2 ** (scale - 127); 255 is NaN

Source: OCP Microscaling Formats specification, version 1.0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from graphfuse.weights.plan import Copy

BLOCK = 32
STORED = "U8"
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-m for m in _MAGNITUDES))


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """`[..., G, 16]` and `[..., G]` → `[..., 32 G]` float32. Exact; so is a cast to bfloat16."""
    pairs = torch.tensor([(_VALUES[byte & 15], _VALUES[byte >> 4]) for byte in range(256)], device=blocks.device)
    powers = torch.tensor([math.ldexp(1.0, e - 127) for e in range(255)] + [math.nan], device=scales.device)
    values = pairs[blocks.int()].flatten(-2)  # [..., G, 32]
    return (values * powers[scales.int()][..., None]).flatten(-2)


def stored_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the blocks and the scales of a tensor `[..., K]`."""
    groups = (*shape[:-1], -(-shape[-1] // BLOCK))
    return (*groups, BLOCK // 2), groups


def pieces(shape: tuple[int, ...], copy: Copy, buffer_bytes: int) -> Iterator[tuple[tuple[slice, ...], slice, Tensor]]:
    """The copy from a tensor `[E, N, K]`, cut so that a piece decodes to a buffer each at most (a row is never cut).

    Yields:
        the box of scales (and of blocks, whose last dimension it takes whole), what of the decoded columns to keep,
        and the view to fill.
    """
    experts, rows, columns = (s.indices(n)[:2] for s, n in zip(copy.source, shape, strict=True))
    first, last = columns[0] // BLOCK, -(-columns[1] // BLOCK)
    keep = slice(columns[0] - first * BLOCK, columns[1] - first * BLOCK)
    step = max(1, buffer_bytes // ((last - first) * BLOCK * 4))
    for expert in range(*experts):
        for row in range(rows[0], rows[1], step):
            end = min(row + step, rows[1])
            box = (slice(expert, expert + 1), slice(row, end), slice(first, last))
            yield box, keep, copy.into[expert - experts[0] : expert - experts[0] + 1, row - rows[0] : end - rows[0]]
