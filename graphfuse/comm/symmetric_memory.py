"""Memory that every rank of a group can address: torch's symmetric memory, without multicast.

Only plain loads and stores to peers' buffers are ever used, never torch's multimem operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

from graphfuse.comm.control import STEP_TIMEOUT, ControlChannel


@dataclass(frozen=True)
class SymmetricBuffer:
    """One rank's part of a symmetric allocation."""

    local: torch.Tensor
    """This rank's memory, one dimension of integers."""
    pointers: torch.Tensor
    """[world size] int64 on the device: the address of each rank's memory, as this process reaches it."""
    owner: Any
    """Keeps the mappings of the peers' memory alive."""


def allocate(
    num_elements: int, dtype: torch.dtype, group: ProcessGroup, device: torch.device, channel: ControlChannel
) -> SymmetricBuffer:
    """A buffer with all bits set, on every rank of the group. Collective.

    The part that can fail on one rank alone, allocating, comes before a vote, so that no rank waits for one that gave
    up.

    Args:
        num_elements: of an integer dtype; equal on every rank.
        channel: the group's control channel.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    local = symmetric_memory.empty(num_elements, dtype=dtype, device=device)
    local.fill_(-1)
    torch.cuda.synchronize(device)
    channel.exchange("allocated", STEP_TIMEOUT)
    handle = symmetric_memory.rendezvous(local, group.group_name)
    pointers = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=device)
    # A peer may push as soon as its own buffer is ready: all of them are filled before anyone returns.
    channel.exchange("filled", STEP_TIMEOUT)
    return SymmetricBuffer(local, pointers, handle)
