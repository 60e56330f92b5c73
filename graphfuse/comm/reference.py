"""The reference backend: the group's own all-reduce, then add and norm. It runs everywhere and serves every size.

On the CPU (gloo) it is the eager formula, rounding for rounding. On CUDA it is NCCL and one Triton kernel.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from graphfuse.comm.call import FusedCall
from graphfuse.kernels import add_rms_norm as kernel

# The op must not change its input, and torch's all-reduce works in place: small messages are copied first. From this
# size on the copy costs more than a second launch, and reduce-scatter into a new tensor plus all-gather, which moves
# the same bytes over the links, takes the copy's place.
COPY_BYTES = 16 << 20


def run(call: FusedCall, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduce over the group, add, normalise: (normed, residual + reduced), or (normed, reduced) without a residual.

    Collective: every rank of the group calls it with the same shape. Any dtype that the group can reduce.
    """
    reduced = all_reduce(call.x, group)
    if reduced.is_cuda and kernel.available() and reduced.dtype in kernel.SUPPORTED_DTYPES:
        return kernel.add_rms_norm(
            reduced, call.residual, call.weight, call.eps, call.weight_bias, call.cast_before_weight
        )
    return add_rms_norm(reduced, call.residual, call.weight, call.eps, call.weight_bias, call.cast_before_weight)


def all_reduce(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The sum of x over the ranks, as a new tensor."""
    num_bytes = x.numel() * x.element_size()
    if x.is_cuda and num_bytes >= COPY_BYTES and x.numel() % dist.get_world_size(group) == 0:
        return reduce_by_shards(x, group)
    reduced = x.clone(memory_format=torch.contiguous_format)
    if num_bytes:
        dist.all_reduce(reduced, group=group)
    return reduced


def reduce_by_shards(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """`all_reduce` without the copy: each rank reduces a shard, then all gather. The ranks divide the elements."""
    shard = x.new_empty(x.numel() // dist.get_world_size(group))
    dist.reduce_scatter_tensor(shard, x.view(-1), group=group)
    reduced = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_gather_into_tensor(reduced.view(-1), shard, group=group)
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
