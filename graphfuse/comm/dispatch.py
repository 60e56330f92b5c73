"""Which comm backend serves one call of a fused op: by message bytes, from the ranges the pool has active.

The choice looks only at what is the same on every rank (shapes, dtypes, active ranges) and needs no synchronisation,
so that it can run under CUDA-graph capture. Whatever it chooses, the reduction is complete; nothing active means
reference.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.distributed.distributed_c10d import _resolve_process_group

from graphfuse.comm import call_check, pool, reference
from graphfuse.comm.call import FusedCall
from graphfuse.comm.table import SizeRange
from graphfuse.comm.workspace import Workspace
from graphfuse.ops.fp8_linear import round_rows


def run(call: FusedCall, group_name: str) -> tuple[torch.Tensor, ...]:
    """Reduce over the named group, add, normalise: (normed, residual + reduced), each like `call.x`; and (quantised,
    scale) for a call with `fp8`.

    Raises:
        GroupError: while debugging (`graphfuse.comm.call_check`): a rank gives another shape, or does not call.
        BackendUnavailableError: a backend failed in the middle. It is not replaced by another one on this rank alone:
            the ranks would part ways.
    """
    workspace, variant = _find(call, group_name)
    if call.fp8 is None or (workspace is not None and workspace.quantises):
        return _run(call, group_name, workspace, variant)
    normed, summed = _run(dataclasses.replace(call, fp8=None, scale=None), group_name, workspace, variant)
    return normed, summed, *round_rows(normed, call.fp8, call.scale)


def choose(ranges: tuple[SizeRange, ...], num_bytes: int) -> SizeRange | None:
    """The first range that holds the message; None when it is larger than all of them."""
    for size_range in ranges:
        if size_range.max_bytes is None or num_bytes <= size_range.max_bytes:
            return size_range
    return None


def _find(call: FusedCall, group_name: str) -> tuple[Workspace | None, str | None]:
    """The workspace that takes the call, with its variant; None for the reference."""
    active = pool.process_pool.active(group_name, call.x.dtype, call.hidden_size)
    chosen = choose(active.ranges, call.num_bytes) if active is not None else None
    if active is None or chosen is None:
        return None, None
    workspace = active.workspaces.get(chosen.backend)
    return (workspace, chosen.variant) if workspace is not None and workspace.accepts(call) else (None, None)


def _run(
    call: FusedCall, group_name: str, workspace: Workspace | None, variant: str | None
) -> tuple[torch.Tensor, ...]:
    if call_check.is_on():
        call_check.check(call, _resolve_process_group(group_name))  # type: ignore[arg-type]
    if workspace is not None:
        return workspace.run(call, variant)
    return reference.run(call, _resolve_process_group(group_name))  # type: ignore[arg-type]
