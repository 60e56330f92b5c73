"""Small messages between the ranks of a tensor-parallel group, outside its own communicator.

They go through torch.distributed's own store, under the group's ranks, so any backend will do, no rank outside the
group takes part, and nothing mixes with the model's reductions. (A gloo subgroup by `new_group(...,
use_local_synchronization=True)` would not do: its name holds the number of groups each process is in, so ranks that are
in different numbers of groups wait for each other under different names, for ever.)

Every exchange carries a status, which makes failing together possible: a rank that fails posts its failure into
whatever exchange its peers are waiting in, and they raise `PeerFailed` at that moment instead of timing out.
"""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store
from torch.distributed.distributed_c10d import _get_default_store

from graphfuse.errors import GroupError

# Ranks may reach an exchange minutes apart: one compiles a kernel that its peers have in their cache.
ARRIVAL_TIMEOUT = timedelta(minutes=30)
# Once all have arrived they move together.
STEP_TIMEOUT = timedelta(seconds=60)
# Seconds between two looks at the store: ranks that move together do not wait, long waits cost nothing.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0002, 0.02


class PeerFailed(Exception):
    """Another rank of the group posted a failure into the exchange. Never leaves the comm layer."""


class ControlChannel:
    """Exchanges Python values between the ranks of one group, in lock-step: each rank makes the same calls."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        # The store outlives groups, and several can have the same ranks: count the channels made under them.
        generation = store.add(f"channels/{rank}", 1)
        self._store = PrefixStore(f"{generation}/", store)
        self._step = 0
        self.check: Callable[[], None] = _nothing
        """Raises `GroupError` when a rank will not answer any more. Set by the watch over the group, if there is."""

    def exchange(self, value: Any, timeout: timedelta = ARRIVAL_TIMEOUT, *, subject: str = "") -> list[Any]:
        """Every rank's value, in rank order. Collective.

        Args:
            subject: what is exchanged, as the ranks' error says it when they exchange different things.

        Raises:
            PeerFailed: a rank called `fail` instead.
            GroupError: a rank did not answer in time, is gone, or exchanges something else; or the store is gone.
        """
        messages = self._all_gather((None, (subject, value)), timeout)
        if any(failure is not None for failure, _ in messages):
            raise PeerFailed(_describe(messages))
        subjects = [theirs for _, (theirs, _) in messages]
        if len(set(subjects)) > 1:
            places = ", ".join(f"rank {rank}: {theirs or 'a step of set-up'}" for rank, theirs in enumerate(subjects))
            raise GroupError(
                f"The ranks have come to different steps ({places}). Make the same calls, in the same order, on all."
            )
        return [value for _, (_, value) in messages]

    def open_store(self, name: str) -> Store:
        """A second connection to the store, for another thread: on one connection a wait holds up everybody else.

        Raises:
            RuntimeError: the store makes none.
        """
        return PrefixStore(f"{name}/", self._store.clone())  # type: ignore[attr-defined]  # the stub lacks it

    def fail(self, reason: str, timeout: timedelta = STEP_TIMEOUT) -> str:
        """Post a failure in place of the value that the peers' current exchange waits for.

        Returns what they all see: the failures of every rank that posted one, in rank order.
        """
        return _describe(self._all_gather((reason, None), timeout))

    def _all_gather(self, message: tuple[str | None, Any], timeout: timedelta) -> list[tuple[str | None, Any]]:
        self._step += 1
        keys = [f"{self._step}/{rank}" for rank in range(self.size)]
        try:
            self._store.set(keys[self.rank], pickle.dumps(message))  # type: ignore[arg-type]  # the stub knows str only
            self._wait(keys, timeout)
            messages = [pickle.loads(self._store.get(key)) for key in keys]
            # Everyone is in this step, so everyone has read the one before.
            self._store.delete_key(f"{self._step - 1}/{self.rank}")
        except RuntimeError as error:
            raise GroupError(
                f"The store that the ranks of the group meet in cannot be reached ({error}). See whether the process "
                "that holds it, of rank 0 or of the launcher, has ended."
            ) from error
        return messages

    def _wait(self, keys: list[str], timeout: timedelta) -> None:
        # Asking again and again, where `Store.wait` would neither see Ctrl-C nor that a rank is gone.
        end = time.monotonic() + timeout.total_seconds()
        pause = SHORTEST_PAUSE
        while not self._store.check(keys):
            self.check()
            if time.monotonic() > end:
                self._raise_missing(keys, timeout)
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE)

    def _raise_missing(self, keys: list[str], timeout: timedelta) -> NoReturn:
        missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
        raise GroupError(
            f"Rank{'s' if len(missing) > 1 else ''} {', '.join(missing)} of the tensor-parallel group did not answer "
            f"within {timeout.total_seconds():.0f} s. Look for the first error of the other ranks, and make sure that "
            "all of them make the same calls."
        )


def _nothing() -> None:
    """No watch over the ranks."""


def _describe(messages: list[tuple[str | None, Any]]) -> str:
    return "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in enumerate(messages) if failure is not None)


class _Channels:
    """The channels of this process, by group name. A name may come back after `destroy_process_group`: the group that
    a channel was made for is remembered (weakly), and another one gets a channel of its own."""

    def __init__(self) -> None:
        self._channels: dict[str, tuple[Callable[[], ProcessGroup | None], ControlChannel]] = {}

    def get(self, group: ProcessGroup) -> ControlChannel:
        known = self._channels.get(group.group_name)
        if known is not None and known[0]() is group:
            return known[1]
        members = "-".join(map(str, dist.get_process_group_ranks(group)))
        store = PrefixStore(f"graphfuse/{members}/", _get_default_store())
        channel = ControlChannel(store, dist.get_rank(group), dist.get_world_size(group))
        self._channels[group.group_name] = (weakref.ref(group), channel)
        return channel


_channels = _Channels()


def control_channel(group: ProcessGroup) -> ControlChannel:
    """The control channel of a group, made at the first call. It waits for nobody, but the ranks of a group must ask
    for their groups' channels in the same order.

    Raises:
        GroupError: torch.distributed is not initialised, or the group was not made by it.
    """
    try:
        return _channels.get(group)
    except (RuntimeError, ValueError, KeyError) as error:
        raise GroupError(
            f"No control channel could be made between the ranks of the tensor-parallel group: {error}. "
            f"Check that torch.distributed is initialised and that the group was made by it."
        ) from error
