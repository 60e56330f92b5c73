"""Before each call of a fused op, while debugging: do all ranks call it, and with the same shapes?

Only with GRAPHFUSE_COMM_TIMEOUT set. The calls of a group are numbered; each rank waits at most that many seconds for
the others to come to the same one, whichever comm backend serves it. Calls under CUDA-graph capture are not checked:
what is captured ran before, and was checked then.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from graphfuse.comm.call import FusedCall
from graphfuse.comm.control import control_channel
from graphfuse.comm.timeout import TIMEOUT_VARIABLE, comm_timeout
from graphfuse.errors import GroupError


def is_on() -> bool:
    return TIMEOUT_VARIABLE in os.environ


def check(call: FusedCall, group: dist.ProcessGroup) -> None:
    """Compare a call with the other ranks'. Collective.

    Raises:
        GroupError: a rank called with another shape or dtype, or did not call in time.
    """
    seconds = comm_timeout()
    if seconds is None or dist.get_backend(group) == "fake" or dist.get_world_size(group) == 1:
        return
    if call.x.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    channel = control_channel(group)
    shape = f"{list(call.x.shape)} {str(call.x.dtype).removeprefix('torch.')}"
    shapes = channel.exchange(shape, timedelta(seconds=min(seconds, 1e6)), subject="a fused all-reduce")
    if len(set(shapes)) > 1:
        given = ", ".join(f"{theirs} on rank {rank}" for rank, theirs in enumerate(shapes))
        raise GroupError(f"The ranks gave different shapes to a fused all-reduce: {given}. Give each the same tokens.")
