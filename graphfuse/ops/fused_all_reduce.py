"""The fused reductions as ops: functional, and complete whatever kernel serves them.

    s = all_reduce(x)                     rounded to x's dtype
    r = residual + s                      rounded to x's dtype      (all_reduce_add_rms_norm)
    f = float32(r); f = f * rsqrt(mean(f * f, -1) + eps)
    normed = (weight + bias) * cast(f)    if cast_before_weight, a product in x's dtype (Llama)
           = cast(f * (weight + bias))    else (Gemma with bias 1, gpt-oss)

The op looks up its kernel at run time, by the number of bytes, among those made ready for its group; where none is, or
the input is too large for it, the reference computes the same result. So declining a kernel never drops a reduction.
T tokens, H hidden size; any leading dimensions stand for T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphfuse.errors import ArgumentError

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
    if residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device:
        raise ArgumentError(
            f"residual is {_show(residual)}, x is {_show(x)}. Both must have one shape, dtype and device."
        )
    return _dispatch(x, residual, weight, eps, weight_bias, cast_before_weight, x_is_dead, group_name)


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
    return _dispatch(x, None, weight, eps, weight_bias, cast_before_weight, False, group_name)


@all_reduce_rms_norm.register_fake
def _(x, weight, eps, weight_bias, cast_before_weight, group_name):
    return _like(x), _like(x)


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
) -> tuple[Tensor, Tensor]:
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


def _show(t: Tensor) -> str:
    return f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}"
