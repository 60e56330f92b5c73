"""Which comm backend serves one call of a fused op: by message bytes, from the ranges the pool has active.

The choice looks only at what is the same on every rank (shapes, dtypes, active ranges) and needs no synchronisation,
so that it can run under CUDA-graph capture. Whatever it chooses, the reduction is complete; nothing active means
reference.
"""

from __future__ import annotations

import torch
from torch.distributed.distributed_c10d import _resolve_process_group

from graphfuse.comm import pool, reference
from graphfuse.comm.call import FusedCall
from graphfuse.comm.table import SizeRange


def run(call: FusedCall, group_name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduce over the named group, add, normalise: (normed, residual + reduced), each like `call.x`.

    Raises:
        BackendUnavailableError: a backend failed in the middle. It is not replaced by another one on this rank alone:
            the ranks would part ways.
    """
    active = pool.process_pool.active(group_name, call.x.dtype, call.hidden_size)
    if active is not None:
        chosen = choose(active.ranges, call.num_bytes)
        workspace = active.workspaces.get(chosen.backend) if chosen is not None else None
        if chosen is not None and workspace is not None and workspace.accepts(call):
            return workspace.run(call, chosen.variant)
    return reference.run(call, _resolve_process_group(group_name))  # type: ignore[arg-type]


def choose(ranges: tuple[SizeRange, ...], num_bytes: int) -> SizeRange | None:
    """The first range that holds the message; None when it is larger than all of them."""
    for size_range in ranges:
        if size_range.max_bytes is None or num_bytes <= size_range.max_bytes:
            return size_range
    return None
