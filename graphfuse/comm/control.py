"""Small messages between the ranks of a tensor-parallel group, outside its own communicator.

The channel is a gloo subgroup of exactly the group's ranks, made once per group with local synchronisation, so that a
group that is only a part of the world cannot hang the rest, and CPU messages never mix with the model's reductions.
Every exchange carries a status, which makes failing together possible: a rank that fails posts its failure into
whatever exchange its peers are waiting in, and they raise `PeerFailed` at that moment instead of timing out.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes

from graphfuse.errors import GroupError

# Ranks may reach an exchange minutes apart: one compiles a kernel that its peers have in their cache.
ARRIVAL_TIMEOUT = timedelta(minutes=30)
# Once all have arrived they move together.
STEP_TIMEOUT = timedelta(seconds=60)


class PeerFailed(Exception):
    """Another rank of the group posted a failure into the exchange. Never leaves the comm layer."""


class ControlChannel:
    """Exchanges Python values between the ranks of one group."""

    def __init__(self, gloo_group: ProcessGroup) -> None:
        self._group = gloo_group
        self.rank: int = dist.get_rank(gloo_group)
        self.size: int = dist.get_world_size(gloo_group)

    def exchange(self, value: Any, timeout: timedelta = ARRIVAL_TIMEOUT) -> list[Any]:
        """Every rank's value, in rank order. Collective.

        Raises:
            PeerFailed: a rank called `fail` instead.
            GroupError: a rank did not answer in time, or is gone.
        """
        messages = self._all_gather((None, value), timeout)
        failures = [f"rank {rank}: {failure}" for rank, (failure, _) in enumerate(messages) if failure is not None]
        if failures:
            raise PeerFailed("; ".join(failures))
        return [value for _, value in messages]

    def fail(self, reason: str, timeout: timedelta = STEP_TIMEOUT) -> str:
        """Post a failure in place of the value that the peers' current exchange waits for.

        Returns what they all see: the failures of every rank that posted one, in rank order.
        """
        messages = self._all_gather((reason, None), timeout)
        return "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in enumerate(messages) if failure is not None)

    def _all_gather(self, message: Any, timeout: timedelta) -> list[Any]:
        # Compilers call this with fake-tensor modes on; these are real bytes.
        with _disable_current_modes(), torch.no_grad():
            data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
            sizes = self._gather_tensor(torch.tensor([data.numel()], dtype=torch.int64, device="cpu"), timeout)
            longest = max(int(size.item()) for size in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
            padded[: data.numel()] = data
            parts = self._gather_tensor(padded, timeout)
            return [
                pickle.loads(part[: int(size.item())].numpy().tobytes())
                for part, size in zip(parts, sizes, strict=True)
            ]

    def _gather_tensor(self, tensor: torch.Tensor, timeout: timedelta) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        try:
            work = dist.all_gather(parts, tensor, group=self._group, async_op=True)
            assert work is not None
            work.wait(timeout)
        except RuntimeError as error:
            raise GroupError(
                f"A rank of the tensor-parallel group did not answer within {timeout.total_seconds():.0f} s ({error}). "
                f"Look for the first error of the other ranks, and make sure that all of them make the same calls."
            ) from error
        return parts


class _Channels:
    """The channels of this process, by group name. A name may come back after `destroy_process_group`: the group that
    a channel was made for is remembered (weakly), and another one gets a channel of its own."""

    def __init__(self) -> None:
        self._channels: dict[str, tuple[Callable[[], ProcessGroup | None], ControlChannel]] = {}

    def get(self, group: ProcessGroup) -> ControlChannel:
        known = self._channels.get(group.group_name)
        if known is not None and known[0]() is group:
            return known[1]
        gloo_group = dist.new_group(
            dist.get_process_group_ranks(group),
            backend="gloo",
            timeout=ARRIVAL_TIMEOUT,
            use_local_synchronization=True,
            group_desc="graphfuse control",
        )
        channel = ControlChannel(gloo_group)
        self._channels[group.group_name] = (weakref.ref(group), channel)
        return channel


_channels = _Channels()


def control_channel(group: ProcessGroup) -> ControlChannel:
    """The control channel of a group. The first call is collective over the group's ranks, later ones return the same.

    Raises:
        GroupError: torch.distributed is not initialised, or cannot make the subgroup.
    """
    try:
        with _disable_current_modes():
            return _channels.get(group)
    except (RuntimeError, ValueError) as error:
        raise GroupError(
            f"No control channel could be made between the ranks of the tensor-parallel group: {error}. "
            f"Check that torch.distributed is initialised with a store that all of its ranks reach."
        ) from error
