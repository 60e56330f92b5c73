"""The fused reductions as ops: functional, and complete whatever kernel serves them.

    s = all_reduce(x)                     rounded to x's dtype
    r = residual + s                      rounded to x's dtype      (all_reduce_add_rms_norm)
    f = float32(r); f = f * rsqrt(mean(f * f, -1) + eps)
    normed = (weight + bias) * cast(f)    if cast_before_weight, a product in x's dtype (Llama)
           = cast(f * (weight + bias))    else (Gemma with bias 1, gpt-oss)

The op looks up its kernel at run time, by the number of bytes, among those made ready for its group; where none is, or
the input is too large for it, the reference computes the same result. So declining a kernel never drops a reduction.
With `fp8` the normed value is given in FP8 as well.
T tokens, H hidden size; any leading dimensions stand for T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphfuse.errors import ArgumentError
from graphfuse.kernels.norm_epilogue import FP8_GROUP

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@torch.library.custom_op("graphfuse::all_reduce_add_rms_norm", mutates_args=())
def all_reduce_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_bias: float,
    cast_before_weight: bool,
    x_is_dead: bool,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """Sum x [..., H] over a group, add the residual, normalise.

    Args:
        x: this rank's partial sum [..., H], any strides, fp16, bf16, fp32 or fp64.
        residual: [..., H] of x's dtype, equal on every rank.
        weight: [H] of x's dtype, or None.
        eps: added to the mean of squares.
        weight_bias: added to the weight: 1.0 for Gemma and Qwen3-Next.
        cast_before_weight: where the model rounds; see the module's formula.
        x_is_dead: a promise that nobody reads x afterwards, so that its memory may be used. The compiler passes give it
            for the result of a matrix product with no other reader; it saves a copy of x at large sizes. Not declared
            as a mutation, since the value is gone for everybody alike.
        group_name: name of the process group to sum over.

    Returns:
        (normed, residual + sum), both shaped like x and contiguous.

    Raises:
        ArgumentError: shapes, dtypes or devices do not fit.
    """
    _check(x, weight, group_name)
    _check_residual(x, residual)
    normed, summed = _dispatch(x, residual, weight, eps, weight_bias, cast_before_weight, x_is_dead, group_name)
    return normed, summed


@all_reduce_add_rms_norm.register_fake
def _(x, residual, weight, eps, weight_bias, cast_before_weight, x_is_dead, group_name):
    return _like(x), _like(x)


@torch.library.custom_op("graphfuse::all_reduce_rms_norm", mutates_args=())
def all_reduce_rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_bias: float,
    cast_before_weight: bool,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """Sum x [..., H] over a group and normalise the sum. Returns (normed, sum). Arguments and errors as above."""
    _check(x, weight, group_name)
    normed, summed = _dispatch(x, None, weight, eps, weight_bias, cast_before_weight, False, group_name)
    return normed, summed


@all_reduce_rms_norm.register_fake
def _(x, weight, eps, weight_bias, cast_before_weight, group_name):
    return _like(x), _like(x)


@torch.library.custom_op("graphfuse::all_reduce_add_rms_norm_fp8", mutates_args=())
def all_reduce_add_rms_norm_fp8(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_bias: float,
    cast_before_weight: bool,
    x_is_dead: bool,
    fp8: str,
    scale: Tensor | None,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `all_reduce_add_rms_norm` (or `all_reduce_rms_norm`, without a residual), with the normed value in FP8 too.

    Args:
        fp8: "static": one scale for the tensor; "token": one for each row, from its largest element; "group": one for
            every 128 elements of a row. Formulas: `graphfuse.kernels.norm_epilogue`.
        scale: one float32 number [] or [1] for "static", else None.

    Returns:
        (normed, residual + sum, quantised [..., H] float8_e4m3fn, scale float32: a copy of the given one, [..., 1], or
        [..., H / 128]).

    Raises:
        ArgumentError: as above, or the scale does not fit the form.
    """
    _check(x, weight, group_name)
    if residual is not None:
        _check_residual(x, residual)
    _check_fp8(x, fp8, scale)
    normed, summed, quantised, scales = _dispatch(
        x, residual, weight, eps, weight_bias, cast_before_weight, x_is_dead, group_name, fp8, scale
    )
    return normed, summed, quantised, scales.clone() if scales is scale else scales  # an output may not be an input


@all_reduce_add_rms_norm_fp8.register_fake
def _(x, residual, weight, eps, weight_bias, cast_before_weight, x_is_dead, fp8, scale, group_name):
    _check_fp8(x, fp8, scale)
    shape = scale.shape if fp8 == "static" else (*x.shape[:-1], x.shape[-1] // FP8_GROUP if fp8 == "group" else 1)
    quantised = torch.empty_like(x, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    return _like(x), _like(x), quantised, x.new_empty(shape, dtype=torch.float32)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _dispatch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_bias: float,
    cast_before_weight: bool,
    x_is_dead: bool,
    group_name: str,
    fp8: str | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, ...]:
    from graphfuse.comm import dispatch
    from graphfuse.comm.call import FusedCall

    call = FusedCall(
        x=x.contiguous(),
        residual=None if residual is None else residual.contiguous(),
        weight=None if weight is None else weight.contiguous(),
        eps=eps,
        weight_bias=weight_bias,
        cast_before_weight=cast_before_weight,
        x_is_dead=x_is_dead,
        fp8=fp8,
        scale=scale,
    )
    return dispatch.run(call, group_name)


def _check(x: Tensor, weight: Tensor | None, group_name: str) -> None:
    if x.dim() == 0 or x.dtype not in FLOATS:
        raise ArgumentError(f"x is {_show(x)}. It must be a floating-point tensor [..., H].")
    if weight is not None and (weight.shape != x.shape[-1:] or weight.dtype != x.dtype or weight.device != x.device):
        raise ArgumentError(
            f"weight is {_show(weight)}, x is {_show(x)}. "
            f"The weight must be [{x.shape[-1]}] of x's dtype, on its device."
        )
    try:
        torch.distributed.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError, KeyError) as error:
        raise ArgumentError(
            f"There is no process group called {group_name!r}. Create it before the op runs, in every process."
        ) from error


def _check_residual(x: Tensor, residual: Tensor) -> None:
    if residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device:
        raise ArgumentError(
            f"residual is {_show(residual)}, x is {_show(x)}. Both must have one shape, dtype and device."
        )


def _check_fp8(x: Tensor, fp8: str, scale: Tensor | None) -> None:
    if fp8 not in ("static", "token", "group"):
        raise ArgumentError(f'fp8={fp8!r} is not known. Use "static", "token" or "group".')
    if fp8 == "static" and (
        scale is None or scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != x.device
    ):
        raise ArgumentError('fp8="static" needs the scale. Give a float32 tensor of one element, on the device of x.')
    if fp8 != "static" and scale is not None:
        raise ArgumentError(f'fp8={fp8!r} computes its scales. Leave scale out, or use "static".')
    if fp8 == "group" and x.shape[-1] % FP8_GROUP:
        raise ArgumentError(
            f'fp8="group" needs a hidden size of whole groups of {FP8_GROUP}, and it is {x.shape[-1]}. Use "token".'
        )


def _show(t: Tensor) -> str:
    return f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}"
