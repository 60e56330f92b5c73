"""Residual add and RMSNorm in one pass over memory: the local half of the reference comm backend on CUDA.

Equivalent eager code, for x and residual [T, H] of one dtype and weight [H]:

    r = residual + x                       # or x, without a residual; rounded to the dtype
    f = r.float()
    f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
    if cast_before_weight:                 # Llama: the normalised value is rounded before the weight multiplies it
        f = f.to(r.dtype).float()
    normed = (f * (weight.float() + weight_bias)).to(r.dtype)

One program handles one row: H is padded to a power of two and masked, so any H works. Row offsets are 64-bit, since
tokens * hidden passes 2**31 in long prefills. Legend: T tokens, H hidden.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # triton is published for Linux only; elsewhere `available` says no and nothing here is called
    triton = None

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def available() -> bool:
    """True where Triton can be imported, so that `add_rms_norm` can be called."""
    return triton is not None


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    weight_bias: float = 0.0,
    cast_before_weight: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The eager code of the module docstring as one kernel.

    Args:
        x: [..., H], contiguous, float16, bfloat16 or float32. Not modified.
        residual: like x, or None for a norm without an add.
        weight: [H], contiguous, any float dtype, or None for a norm without one (then `weight_bias` is not used).
        eps: added to the mean of squares.
        weight_bias: added to the weight in float32: 1.0 for Gemma and Qwen3-Next.
        cast_before_weight: where the cast stands, see above.

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
        num_warps=_num_warps(block_size),
    )
    return normed, summed


def _num_warps(block_size: int) -> int:
    """16 elements a thread up to H = 8192: two 16-byte loads of a 16-bit dtype per tensor in flight."""
    return min(max(block_size // 512, 1), 16)


if triton is not None:

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
        row = tl.program_id(0).to(tl.int64) * hidden_size
        column = tl.arange(0, BLOCK_SIZE)
        inside = column < hidden_size
        dtype = normed_ptr.dtype.element_ty

        r = tl.load(x_ptr + row + column, mask=inside, other=0.0)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + row + column, mask=inside, other=0.0)
            r = (residual.to(tl.float32) + r.to(tl.float32)).to(dtype)  # the model's own add rounds here
            tl.store(summed_ptr + row + column, r, mask=inside)

        f = r.to(tl.float32)
        mean_of_squares = tl.sum(f * f, axis=0) / hidden_size  # masked columns hold zeros
        f = f * tl.rsqrt(mean_of_squares + eps)
        if HAS_WEIGHT:
            if CAST_BEFORE_WEIGHT:
                f = f.to(dtype).to(tl.float32)
            weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
            f = f * (weight + weight_bias)
        tl.store(normed_ptr + row + column, f.to(dtype), mask=inside)
