"""The inverse of a small triangular matrix with ones on its diagonal, within a kernel.

    eager equivalent:  torch.linalg.inv(torch.eye(C) + a)               for a strictly below the diagonal

Exact substitution, in float32: within blocks of 16, column by column, all blocks at once; then over the blocks, where
D, the inverses of blocks, and L, what is below them, give T = D - (D L) T, a block row more at each turn. Doubling,
(I - a)(I + a^2)(I + a^4)..., is of no use for rows that are alike: there powers of a reach 10^18, while T stays small.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unit_triangular_inverse(a, C: tl.constexpr):
    """`[C, C]`, for a `[C, C]` float32 that is zero on the diagonal and above; C a multiple of 16."""
    BLOCKS: tl.constexpr = C // 16
    block = tl.arange(0, BLOCKS)
    within = tl.arange(0, 16)
    on_diagonal = block[:, None, None, None] == block[None, None, :, None]
    strict = tl.sum(tl.where(on_diagonal, tl.reshape(a, [BLOCKS, 16, BLOCKS, 16]), 0.0), 2)  # [BLOCKS, 16, 16]
    inverses = tl.where(within[None, :, None] == within[None, None, :], 1.0, 0.0) + tl.zeros_like(strict)
    for i in range(15):  # row i is done: take it out of the later ones
        column = tl.sum(tl.where(within[None, None, :] == i, strict, 0.0), 2)  # [BLOCKS, 16]
        row = tl.sum(tl.where(within[None, :, None] == i, inverses, 0.0), 1)  # [BLOCKS, 16]
        inverses -= column[:, :, None] * row[:, None, :]
    spread = tl.where(on_diagonal, tl.expand_dims(inverses, 2), 0.0)  # [BLOCKS, 16, BLOCKS, 16]
    diagonal = tl.reshape(spread, [C, C])
    at = tl.arange(0, C) // 16
    below = tl.where(at[:, None] > at[None, :], a, 0.0)
    coupling = tl.dot(diagonal, below, input_precision="tf32x3")
    found = diagonal
    for _ in range(BLOCKS - 1):
        found = diagonal - tl.dot(coupling, found, input_precision="tf32x3")
    return found
