"""What follows the sum in every fused reduction kernel: residual add, RMSNorm, optional FP8, for one row in registers.

Equivalent eager code, for a row `total` [H] that is already rounded to its dtype:

    r = residual + total                   # or total, without a residual; rounded to the dtype
    f = r.float()
    f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
    if cast_before_weight:                 # Llama: the normalised value is rounded before the weight multiplies it
        f = f.to(r.dtype).float()
    normed = (f * (weight.float() + weight_bias)).to(r.dtype)

and with FP8 (e4m3, largest value 448), of the rounded normed value, since that is what a model's graph quantises:

    n = normed.float()
    scale = given                                                        # "static": one number for the tensor
    scale = n.abs().amax(-1).clamp(min=1e-10) / 448                      # "token": one a row
    scale = n.view(-1, 128).abs().amax(-1).clamp(min=1e-10) / 448        # "group": one for 128 elements
    quantised = (n / scale).clamp(-448, 448).to(torch.float8_e4m3fn)

Masked columns hold zeros throughout, so they add nothing to a mean or a maximum. T tokens, H hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # triton is published for Linux only; elsewhere `available` says no and nothing here is called
    triton = None

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8_FORMS = {None: 0, "static": 1, "token": 2, "group": 3}
FP8_GROUP = 128
FP8_MAX = 448.0
SMALLEST_AMAX = 1e-10


def available() -> bool:
    """True where Triton can be imported, so that the kernels of this folder can be called."""
    return triton is not None


def quantize_fp8(
    normed: torch.Tensor, form: str, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The eager quantisation of the module docstring.

    Args:
        normed: [..., H].
        form: "static", "token" or "group".
        scale: one float32 number, for "static".

    Returns:
        (quantised [..., H] float8_e4m3fn, scale float32: [] as given, [..., 1], or [..., ceil(H / 128)]).
    """
    n = normed.float()
    if form == "static":
        assert scale is not None
        return (n / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale
    size = n.shape[-1]
    group = min(FP8_GROUP, size) if form == "group" else size
    groups = F.pad(n, (0, -size % group)).unflatten(-1, (-1, group))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_AMAX) / FP8_MAX
    quantised = (groups / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return quantised.flatten(-2)[..., :size].contiguous(), scales.squeeze(-1)


def empty_fp8(x: torch.Tensor, form: str, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a kernel writes the quantised form of an output like x: (quantised, scale)."""
    quantised = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    if form == "static":
        assert scale is not None
        return quantised, scale
    groups = x.shape[-1] // FP8_GROUP if form == "group" else 1
    return quantised, torch.empty((*x.shape[:-1], groups), dtype=torch.float32, device=x.device)


def num_warps(block_size: int) -> int:
    """16 elements a thread up to H = 8192: two 16-byte loads of a 16-bit dtype per tensor in flight."""
    return min(max(block_size // 512, 1), 16)


if triton is not None:

    @triton.jit
    def add_norm_store(
        total,
        residual,
        weight,
        row,
        column,
        inside,
        normed_ptr,
        summed_ptr,
        quantised_ptr,
        scale_ptr,
        hidden_size,
        eps,
        weight_bias,
        HAS_RESIDUAL: tl.constexpr,
        HAS_WEIGHT: tl.constexpr,
        CAST_BEFORE_WEIGHT: tl.constexpr,
        WRITE_SUMMED: tl.constexpr,
        FP8: tl.constexpr,
        BLOCK_SIZE: tl.constexpr,
    ):
        """`total`, `residual` and `weight` are the row's values, [BLOCK_SIZE]; `row` is a 64-bit row number."""
        dtype = normed_ptr.dtype.element_ty
        offset = row * hidden_size
        r = total
        if HAS_RESIDUAL:
            r = (residual.to(tl.float32) + total.to(tl.float32)).to(dtype)  # the model's own add rounds here
        if WRITE_SUMMED:
            tl.store(summed_ptr + offset + column, r, mask=inside)

        f = r.to(tl.float32)
        mean_of_squares = tl.sum(f * f, axis=0) / hidden_size
        f = f * tl.rsqrt(mean_of_squares + eps)
        if HAS_WEIGHT:
            if CAST_BEFORE_WEIGHT:
                f = f.to(dtype).to(tl.float32)
            f = f * (weight.to(tl.float32) + weight_bias)
        normed = f.to(dtype)
        tl.store(normed_ptr + offset + column, normed, mask=inside)

        if FP8 != 0:
            n = tl.where(inside, normed.to(tl.float32), 0.0)
            if FP8 == 1:
                scaled = n / tl.load(scale_ptr)
            elif FP8 == 2:
                scale = tl.maximum(tl.max(tl.abs(n), axis=0), 1e-10) / 448.0
                tl.store(scale_ptr + row, scale)
                scaled = n / scale
            else:
                GROUPS: tl.constexpr = BLOCK_SIZE // 128
                groups = tl.reshape(n, (GROUPS, 128))
                scales = tl.maximum(tl.max(tl.abs(groups), axis=1), 1e-10) / 448.0
                group = tl.arange(0, GROUPS)
                tl.store(scale_ptr + row * (hidden_size // 128) + group, scales, mask=group < hidden_size // 128)
                scaled = tl.reshape(groups / tl.expand_dims(scales, 1), (BLOCK_SIZE,))
            scaled = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
            tl.store(quantised_ptr + offset + column, scaled.to(tl.float8e4nv), mask=inside)
