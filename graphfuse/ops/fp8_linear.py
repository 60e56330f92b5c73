"""Linear layers in FP8 as two ops: `graphfuse::quantise_fp8` rounds activations, `graphfuse::fp8_linear` multiplies.

    q, s = quantise_fp8(x, form, scale)         s: given, or the largest magnitude of each token or group over 448
    y = sum over k of (q * s)[t, k] * (weight * weight_scale)[n, k]  + bias[n]         in float32 (float64 for float64)

Two ops, so that several linears share one rounded input, and a pass lets the reduction and norm before them give it
(`passes/fuse_quantised_norm.py`). The plain formulas run on the CPU; on CUDA the rounding is a Triton kernel, and the
product torch's `_scaled_mm` where scales are those of whole rows. For blocks of weights the weight is brought to the
result's dtype first.

Legend: T tokens (any leading dimensions), K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from graphfuse.errors import ArgumentError
from graphfuse.kernels.norm_epilogue import FP8_GROUP, quantize_fp8

FP8 = torch.float8_e4m3fn
FORMS = ("static", "token", "group")
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@torch.library.custom_op("graphfuse::quantise_fp8", mutates_args=())
def quantise_fp8(x: Tensor, form: str, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Round x to FP8 (e4m3).

    Args:
        x: `[..., K]`, floating.
        form: "static": divided by `scale`; "token": one scale for each row, from its largest magnitude; "group": one
            for each 128 inputs of a row, the last group cut short where K asks for it.
        scale: one float32 number `[]` or `[1]` for "static", else None.

    Returns:
        (`[..., K]` float8_e4m3fn, float32 scales: a copy of the given one, `[..., 1]`, or `[..., ceil(K / 128)]`).

    Raises:
        ArgumentError: the form is not known, or x or scale do not fit it.
    """
    _check_form(x, form, scale)
    quantised, scales = round_rows(x, form, scale)
    return quantised, scales.clone() if scales is scale else scales  # an output may not be an input


def round_rows(x: Tensor, form: str, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """What the op does, by one kernel on CUDA; the scale that is given comes back as it is."""
    if not x.is_cuda or x.numel() == 0 or x.dtype == torch.float64:
        return quantize_fp8(x.contiguous(), form, scale)
    from graphfuse.kernels.quantise import quantise, quantise_static

    rows = x.contiguous().view(-1, x.shape[-1])
    if scale is not None:
        return quantise_static(rows, scale.view(1), FP8, {}).view(x.shape), scale
    quantised, scales = quantise(rows, FP8_GROUP if form == "group" else x.shape[-1], FP8, {})
    return quantised.view(x.shape), scales.view(*x.shape[:-1], -1)


@quantise_fp8.register_fake
def _(x, form, scale):
    _check_form(x, form, scale)
    quantised = torch.empty_like(x, dtype=FP8, memory_format=torch.contiguous_format)
    if form == "static":
        return quantised, torch.empty_like(scale)
    groups = -(-x.shape[-1] // FP8_GROUP) if form == "group" else 1
    return quantised, x.new_empty((*x.shape[:-1], groups), dtype=torch.float32)


@torch.library.custom_op("graphfuse::fp8_linear", mutates_args=())
def fp8_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    block_shape: Sequence[int] | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """A linear layer of inputs and weights in FP8, which is what they stand for without any rounding between.

    Args:
        x: `[..., K]` float8_e4m3fn.
        x_scale: what x is multiplied by, float32: `[]` or `[1]`, `[..., 1]`, or one for each 128 inputs,
            `[..., ceil(K / 128)]`.
        weight: `[N, K]` float8_e4m3fn.
        weight_scale: float32: `[]`, one for each output `[N]`, or with `block_shape = (n, k)` one for each block,
            `[ceil(N / n), ceil(K / k)]`.
        bias: `[N]`, floating, added before the result is rounded.
        out_dtype: of the result; floating.

    Returns:
        `[..., N]` in out_dtype.

    Raises:
        ArgumentError: shapes, dtypes or devices do not fit.
    """
    _check_linear(x, x_scale, weight, weight_scale, bias, block_shape, out_dtype)
    rows, scales = x.reshape(-1, x.shape[-1]), x_scale if x_scale.numel() == 1 else x_scale.flatten(0, -2)
    if _scaled_mm_takes(rows, scales, weight, weight_scale, out_dtype):
        y = _scaled_mm(rows, scales, weight, weight_scale, out_dtype)
        y = y if bias is None else y + bias
    elif x.is_cuda:
        y = F.linear(
            _spread_inputs(rows.float(), scales).to(out_dtype),
            dequantised(weight, weight_scale, block_shape, out_dtype),
            None if bias is None else bias.to(out_dtype),
        )
    else:
        y = _plain(rows, scales, weight, weight_scale, block_shape, torch.promote_types(out_dtype, torch.float32))
        y = (y if bias is None else y + bias.to(y.dtype)).to(out_dtype)
    return y.view(*x.shape[:-1], weight.shape[0])


@fp8_linear.register_fake
def _(x, x_scale, weight, weight_scale, bias, block_shape, out_dtype):
    _check_linear(x, x_scale, weight, weight_scale, bias, block_shape, out_dtype)
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)


def dequantised(weight: Tensor, weight_scale: Tensor, block_shape: Sequence[int] | None, dtype: torch.dtype) -> Tensor:
    """The weight `[N, K]` that is meant, rounded to a dtype. Plain ops, which trace."""
    if block_shape is not None:
        n, k = weight.shape
        weight_scale = weight_scale.repeat_interleave(block_shape[0], 0)[:n].repeat_interleave(block_shape[1], 1)[:, :k]
    elif weight_scale.dim() == 1:
        weight_scale = weight_scale[:, None]
    return (weight.to(torch.promote_types(dtype, torch.float32)) * weight_scale).to(dtype)


def _plain(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    block_shape: Sequence[int] | None,
    dtype: torch.dtype,
) -> Tensor:
    """The formula in float32 or float64, `[T, N]`. Scales of whole rows are left to the end: products of FP8 are
    exact."""
    by_row = x_scale.numel() == 1 or x_scale.shape[-1] == 1
    left = x.to(dtype) if by_row else _spread_inputs(x.to(dtype), x_scale)
    if block_shape is None:
        y = F.linear(left, weight.to(dtype)) * weight_scale
    else:
        y = F.linear(left, dequantised(weight, weight_scale, block_shape, dtype))
    return y * x_scale if by_row else y


def _spread_inputs(x: Tensor, x_scale: Tensor) -> Tensor:
    if x_scale.dim() == 2 and x_scale.shape[-1] > 1:
        x_scale = x_scale.repeat_interleave(FP8_GROUP, -1)[:, : x.shape[-1]]
    return x * x_scale


def _scaled_mm_takes(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, out_dtype: torch.dtype) -> bool:
    """Tensor cores for FP8 (compute capability 8.9 on), scales of whole rows, sizes in whole 16 bytes."""
    return (
        x.is_cuda
        and torch.cuda.get_device_capability(x.device) >= (8, 9)
        and out_dtype == torch.bfloat16  # the only dtype that row-wise scales give
        and weight_scale.dim() < 2
        and (x_scale.numel() == 1 or x_scale.shape[-1] == 1)
        and x.shape[0] > 0
        and x.shape[1] % 16 == weight.shape[0] % 16 == 0
    )


def _scaled_mm(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Either one scale on both sides or one for each row on both: a mixture is spread to rows."""
    if x_scale.numel() > 1 or weight_scale.numel() > 1:
        x_scale = x_scale.reshape(-1, 1).expand(x.shape[0], 1).contiguous()
        weight_scale = weight_scale.reshape(1, -1).expand(1, weight.shape[0]).contiguous()
    else:
        x_scale, weight_scale = x_scale.reshape(()), weight_scale.reshape(())
    return torch._scaled_mm(x, weight.t(), x_scale, weight_scale, out_dtype=out_dtype)


def _check_form(x: Tensor, form: str, scale: Tensor | None) -> None:
    if form not in FORMS:
        raise ArgumentError(f"form={form!r} is not known. Use {', '.join(map(repr, FORMS))}.")
    if x.dim() == 0 or x.dtype not in FLOATS or x.shape[-1] == 0:
        raise ArgumentError(f"x is {list(x.shape)} {x.dtype}. It must be a floating-point tensor [..., K].")
    if (form == "static") != (scale is not None):
        raise ArgumentError(f"form={form!r} with scale={scale}. Give a scale for 'static', and for no other form.")
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != x.device):
        raise ArgumentError(
            f"scale is {list(scale.shape)} {scale.dtype} on {scale.device}. Give one float32 number on {x.device}."
        )


def _check_linear(x, x_scale, weight, weight_scale, bias, block_shape, out_dtype) -> None:
    if x.dtype != FP8 or weight.dtype != FP8 or x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ArgumentError(
            f"x is {list(x.shape)} {x.dtype}, weight {list(weight.shape)} {weight.dtype}. Pass x [..., K] and weight "
            f"[N, K], both {FP8}."
        )
    n, k = weight.shape
    groups = -(-k // FP8_GROUP)
    # A tuple's == would look at the token dimension, which is unknown while tracing, before the lengths.
    is_one = x_scale.dim() == 0 or (x_scale.dim() == 1 and x_scale.shape[0] == 1)
    if not is_one and (x_scale.dim() != x.dim() or x_scale.shape[-1] not in (1, groups)):
        raise ArgumentError(
            f"x_scale is {list(x_scale.shape)} for x {list(x.shape)}. Pass one number, or one for each token, "
            f"[..., 1], or group, [..., {groups}]."
        )
    if block_shape is not None and (len(block_shape) != 2 or min(block_shape) < 1):
        raise ArgumentError(f"block_shape is {list(block_shape)}. Pass two positive sizes, (output, input).")
    allowed = [(), (n,)] if block_shape is None else [(-(-n // block_shape[0]), -(-k // block_shape[1]))]
    if tuple(weight_scale.shape) not in allowed:
        shapes = " or ".join(str(list(shape)) for shape in allowed)
        raise ArgumentError(f"weight_scale has shape {list(weight_scale.shape)}. Pass {shapes}.")
    if x_scale.dtype != torch.float32 or weight_scale.dtype != torch.float32:
        raise ArgumentError(f"The scales are {x_scale.dtype} and {weight_scale.dtype}. Pass float32.")
    if bias is not None and (tuple(bias.shape) != (n,) or bias.dtype not in FLOATS):
        raise ArgumentError(f"bias is {list(bias.shape)} {bias.dtype}. Pass a floating [{n}].")
    if out_dtype not in FLOATS:
        raise ArgumentError(f"out_dtype is {out_dtype}. Use float16, bfloat16, float32 or float64.")
    for t in (x_scale, weight, weight_scale, *([bias] if bias is not None else [])):
        if t.device != x.device:
            raise ArgumentError(f"x is on {x.device}, another input on {t.device}. Use one device.")
