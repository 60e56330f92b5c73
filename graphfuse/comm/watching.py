"""The watches of this process: one for each group of several ranks, from its first trace to the end of the group."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from graphfuse.agreement import is_shared
from graphfuse.comm.control import control_channel
from graphfuse.comm.timeout import comm_timeout
from graphfuse.comm.watch import Watch
from graphfuse.probe import host_id

log = logging.getLogger("graphfuse")


class _Watches:
    def __init__(self) -> None:
        self._watches: weakref.WeakKeyDictionary[ProcessGroup, Watch] = weakref.WeakKeyDictionary()
        self._at_exit: Finalize | None = None

    def get(self, group: ProcessGroup) -> Watch | None:
        known = self._watches.get(group)
        if known is not None:
            return known
        channel = control_channel(group)
        reference = weakref.ref(group)
        try:
            begun = Watch(channel, host=host_id(), is_needed=lambda: _exists(reference()), timeout=comm_timeout())
        except RuntimeError as error:
            log.warning("No watch over the ranks of the group, whose store cannot be opened twice: %s", error)
            return None
        self._watches[group] = begun
        channel.check = begun.check
        weakref.finalize(group, begun.stop).atexit = False
        if self._at_exit is None:
            # A daemon thread that is inside the store when the interpreter goes takes the process down with it. This,
            # unlike atexit, runs at the end of the children of multiprocessing too, and of no process forked from here.
            self._at_exit = Finalize(None, self._stop_all, exitpriority=100)
        return begun

    def _stop_all(self) -> None:
        for begun in list(self._watches.values()):
            begun.stop()
            begun.end_if_stuck()


def _exists(group: ProcessGroup | None) -> bool:
    """Whether a group has not been destroyed. Caches of compilers keep the object of one that has."""
    try:
        return group is not None and bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return False


_watches = _Watches()


def watch(group: ProcessGroup | None) -> Watch | None:
    """The watch over a group, begun at the first call; None where there is nobody to watch: one rank, a fake group, or
    a store that makes no second connection."""
    return _watches.get(group) if is_shared(group) else None


def in_call(watch: Watch | None, what: str, values: Iterable[Any] = ()) -> contextlib.AbstractContextManager[None]:
    """`watch.call` with the shapes of the tensors among the values; nothing without a watch."""
    return _UNWATCHED if watch is None else watch.call(what, shapes_of(values))


_UNWATCHED = contextlib.nullcontext()


def shapes_of(values: Iterable[Any]) -> str:
    """The shapes of the tensors among the arguments of a call, as text. Two microseconds: it runs for each token."""
    return ", ".join([str(list(v.shape)) for v in values if isinstance(v, torch.Tensor)])
