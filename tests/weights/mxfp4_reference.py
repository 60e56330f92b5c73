"""MXFP4 decoded bit by bit, in Python."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def e2m1(code: int) -> float:
    """A 4-bit float: sign, two bits of exponent with bias 1, one of mantissa; subnormal where the exponent is 0."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return -magnitude if sign else magnitude


def decoded(blocks: Tensor, scales: Tensor) -> Tensor:
    """[E, N, G, 16] and [E, N, G] → [E, N, 32 G] float64."""
    rows = [
        [
            math.ldexp(e2m1(code), scale - 127)
            for block, scale in zip(row, row_scales, strict=True)
            for byte in block
            for code in (byte & 15, byte >> 4)
        ]
        for row, row_scales in zip(blocks.flatten(0, 1).tolist(), scales.flatten(0, 1).tolist(), strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64).unflatten(0, blocks.shape[:2])
