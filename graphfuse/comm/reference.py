"""The reference backend: the group's own all-reduce, then add and norm. It runs everywhere and serves every size.

On the CPU (gloo) it is the eager formula, rounding for rounding. On CUDA it is NCCL and one Triton kernel.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from graphfuse.comm.call import FusedCall
from graphfuse.kernels import add_rms_norm as kernel


def run(call: FusedCall, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduce over the group, add, normalise: (normed, residual + reduced), or (normed, reduced) without a residual.

    Collective: every rank of the group calls it with the same shape. Any dtype that the group can reduce.
    """
    # The sum itself is a result when there is no residual, and must not be the input's memory.
    in_place = call.x_is_dead and call.residual is not None
    reduced = all_reduce(call.x, group, in_place)
    if reduced.is_cuda and kernel.available() and reduced.dtype in kernel.SUPPORTED_DTYPES:
        return kernel.add_rms_norm(
            reduced, call.residual, call.weight, call.eps, call.weight_bias, call.cast_before_weight
        )
    return add_rms_norm(reduced, call.residual, call.weight, call.eps, call.weight_bias, call.cast_before_weight)


def all_reduce(x: torch.Tensor, group: ProcessGroup, in_place: bool = False) -> torch.Tensor:
    """The sum of x over the ranks. torch reduces in place; unless x may be overwritten, a copy is reduced."""
    reduced = x if in_place else x.clone(memory_format=torch.contiguous_format)
    if x.numel():
        dist.all_reduce(reduced, group=group)
    return reduced


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    weight_bias: float,
    cast_before_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The eager formula of `graphfuse.comm.call`, one rounding at a time: (normed, residual + x)."""
    summed = x if residual is None else residual + x
    wide = torch.float64 if summed.dtype == torch.float64 else torch.float32
    f = summed.to(wide)
    f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        if cast_before_weight:
            f = f.to(summed.dtype).to(wide)
        f = f * (weight.to(wide) + weight_bias)
    return f.to(summed.dtype), summed
