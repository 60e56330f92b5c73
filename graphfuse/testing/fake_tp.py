"""A tensor-parallel group without other processes: collectives trace and do nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch.distributed as dist

from graphfuse.errors import GroupError


@contextlib.contextmanager
def fake_tp(world_size: int, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    """Make a fake default group of `world_size` ranks, of which this process is `rank`, and take it down at the end.

    Build the model inside. RANK and WORLD_SIZE are set meanwhile, as device meshes read them.

    Raises:
        GroupError: a process group exists already, or the numbers make no group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise GroupError("A process group exists already. Use fake_tp in a process that has not made one.")
    if not 0 <= rank < world_size:
        raise GroupError(f"rank {rank} of {world_size} is no rank. Give 0 <= rank < world_size.")
    names = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
