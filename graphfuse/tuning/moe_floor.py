"""How long the experts of a layer take at least: the larger of moving bytes and doing arithmetic.

Bytes are the weights of each expert that is touched, once, and tokens in and out; what lies between the two products
can stay on the chip, and scales and biases are too few to count. Arithmetic is 2 operations for each of the 3 I H
weights that a token meets in each of its K experts.
"""

from __future__ import annotations

from graphfuse.tuning.moe_tiles import MoeShape

# What an H200 keeps up: 90 % of the data sheet's 4.8 TB/s, and 80 % of its 989 (bf16) and 1,979 (FP8) dense TFLOP/s.
BYTES_PER_US = 4.3e6
BF16_FLOP_PER_US = 790e6
FP8_FLOP_PER_US = 1580e6
ACTIVATION_BYTES = 2
"""Of an element of tokens and results: bf16 in all forms."""


def floor_us(shape: MoeShape, num_tokens: int, experts_touched: float, form: str) -> float:
    """Microseconds of a call of `num_tokens` tokens that choose `experts_touched` distinct experts (on average)."""
    rate = FP8_FLOP_PER_US if _is_fp8(form) else BF16_FLOP_PER_US
    return max(min_bytes(shape, num_tokens, experts_touched, form) / BYTES_PER_US, flop(shape, num_tokens) / rate)


def min_bytes(shape: MoeShape, num_tokens: int, experts_touched: float, form: str) -> float:
    """Bytes that must cross the memory's bus."""
    weights = 3 * shape.intermediate_size * shape.hidden_size * (1 if _is_fp8(form) else 2)
    return experts_touched * weights + 2 * num_tokens * shape.hidden_size * ACTIVATION_BYTES


def flop(shape: MoeShape, num_tokens: int) -> float:
    """Operations of both products, a multiplication and an addition being two."""
    return 6 * num_tokens * shape.top_k * shape.intermediate_size * shape.hidden_size


def _is_fp8(form: str) -> bool:
    return form.startswith("fp8")
