"""Residual add and RMSNorm in one pass over memory: the local half of the reference comm backend on CUDA.

The eager equivalent is in `graphfuse.kernels.norm_epilogue`, for `total` = x. One program handles one row: H is padded
to a power of two and masked, so any H works. Row offsets are 64-bit, since tokens * hidden passes 2**31 in long
prefills.
"""

from __future__ import annotations

import torch

from graphfuse.kernels.norm_epilogue import SUPPORTED_DTYPES, available, num_warps

if available():
    import triton
    import triton.language as tl

    from graphfuse.kernels.norm_epilogue import add_norm_store

__all__ = ["SUPPORTED_DTYPES", "add_rms_norm", "available"]


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    weight_bias: float = 0.0,
    cast_before_weight: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residual and normalise.

    Args:
        x: [..., H], contiguous, float16, bfloat16 or float32. Not modified.
        residual: like x, or None for a norm without an add.
        weight: [H], contiguous, any float dtype, or None for a norm without one (then `weight_bias` is not used).
        eps: added to the mean of squares.
        weight_bias: added to the weight in float32: 1.0 for Gemma and Qwen3-Next.
        cast_before_weight: where the cast stands.

    Returns:
        (normed, r), both like x. Without a residual, r is x itself.
    """
    hidden_size = x.shape[-1]
    num_tokens = x.numel() // hidden_size if hidden_size else 0
    normed = torch.empty_like(x)
    summed = x if residual is None else torch.empty_like(x)
    if num_tokens == 0:
        return normed, summed
    block_size = triton.next_power_of_2(hidden_size)
    _add_rms_norm[(num_tokens,)](
        x,
        x if residual is None else residual,
        x if weight is None else weight,
        normed,
        summed,
        hidden_size,
        eps,
        weight_bias,
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        CAST_BEFORE_WEIGHT=cast_before_weight,
        BLOCK_SIZE=block_size,
        num_warps=num_warps(block_size),
    )
    return normed, summed


if available():

    @triton.jit
    def _add_rms_norm(
        x_ptr,
        residual_ptr,
        weight_ptr,
        normed_ptr,
        summed_ptr,
        hidden_size,
        eps,
        weight_bias,
        HAS_RESIDUAL: tl.constexpr,
        HAS_WEIGHT: tl.constexpr,
        CAST_BEFORE_WEIGHT: tl.constexpr,
        BLOCK_SIZE: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK_SIZE)
        inside = column < hidden_size
        x = tl.load(x_ptr + row * hidden_size + column, mask=inside, other=0.0)
        residual = x
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + row * hidden_size + column, mask=inside, other=0.0)
        weight = x
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
        add_norm_store(
            x,
            residual,
            weight,
            row,
            column,
            inside,
            normed_ptr,
            summed_ptr,
            normed_ptr,
            normed_ptr,
            hidden_size,
            eps,
            weight_bias,
            HAS_RESIDUAL,
            HAS_WEIGHT,
            CAST_BEFORE_WEIGHT,
            HAS_RESIDUAL,
            0,
            BLOCK_SIZE,
        )
