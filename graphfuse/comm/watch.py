"""The watch: each rank of a group says that it lives and what it does, and notices when another one is gone.

    main thread     with watch.call("forward", shapes): …     publishes its number and shapes: one message, no answer
    watch thread    every half second: publishes a beat, reads the others', looks for their processes

Nothing waits for the watch, and it sends nothing through the group: all goes over torch.distributed's store, on a
connection of its own. When a peer is gone or has failed (`graphfuse.comm.peers` says what that means), and this rank is
in a call, it is told in the mildest way that works:

    at once         exchanges of the control channel raise `GroupError`, and an error that the communicator raises for
                    its lost connection becomes one, with the peer's name
    after 2 s       `GroupError` is raised in the thread that is in the call, wherever its Python code stands
    after 4 s       the process ends with the message: it is stuck in a collective, or its GPU in a kernel that waits
                    for the peer's data, and nothing else stops those

A rank that is outside of any call, with an idle GPU, is left alone; its next call raises at once.

One watch a group, begun by the first trace or `LLM`, ended with the group or the process. Nothing runs at import.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn

import torch

from graphfuse import last_words
from graphfuse.comm.control import ControlChannel
from graphfuse.comm.lost_peer import first_line, is_of_the_communicator, raise_in, synchronize
from graphfuse.comm.peers import Beat, Call, Peer, Place, Trouble, late, trouble
from graphfuse.errors import GroupError

log = logging.getLogger("graphfuse")

PERIOD = 0.5
RAISE_AFTER = 2.0
END_AFTER = 4.0
LATE_WARNING = 30.0
# A store that does not answer must not keep the thread from looking for processes.
STORE_TIMEOUT = timedelta(seconds=10)
# How long an error of the communicator waits for the watch to find its cause.
EXPLAIN_WITHIN = 3.0


class Watch:
    """The watch of one rank over the others of its group. Made by `graphfuse.comm.watching.watch`."""

    def __init__(
        self, channel: ControlChannel, *, host: str, is_needed: Callable[[], bool], timeout: float | None
    ) -> None:
        rank, size = channel.rank, channel.size
        self.rank, self.size = rank, size
        self.verdict: str | None = None
        """Why this rank was stopped by force in its call, if it was."""
        self._calls, self._beats = channel.open_store("watch"), channel.open_store("watch")
        self._beats.set_timeout(STORE_TIMEOUT)
        self._place = Place.here(host)
        self._peers = {r: Peer(r) for r in range(size) if r != rank}
        self._is_needed = is_needed
        self._timeout = timeout
        self._call = Call()
        self._depth = 0
        self._entered = 0.0
        self._thread_id = 0
        self._device: int | None = None
        self._synchronising: threading.Thread | None = None
        self._synchronising_since = 0.0
        self._failures = 0
        self._failure: str | None = None
        self._count = 0
        self._store_lost = False
        self._problem: Trouble | None = None
        self._problem_at = 0.0
        self._warned = 0
        self._publishing = threading.Lock()
        self._wake, self._stopped = threading.Event(), False
        self._calls.set(f"place/{rank}", f"{self._place.host}|{self._place.pid}|{self._place.started}")
        self._thread = threading.Thread(target=self._run, name=f"graphfuse watch {rank}/{size}", daemon=True)
        self._thread.start()

    # --- the main thread -------------------------------------------------------------------------------------------

    def call(self, what: str, shapes: str = "") -> _InCall:
        """A context in which this rank may wait for the others. Inside another one it does nothing.

        Raises:
            GroupError: on entering or leaving, or in between: a rank is gone or failed.
        """
        return _InCall(self, what, shapes)

    def check(self) -> None:
        """Raise `GroupError` if there is nobody to wait for. For loops that wait."""
        if self._problem is None:
            return
        # It is half a second old: this rank may have failed since, like the others.
        problem = self._trouble(time.monotonic())
        if problem is not None:
            raise GroupError(problem.message)

    def insist(self) -> None:
        """Raise `GroupError` again if this rank was stopped by force in this call, and something has caught it."""
        if self.verdict is not None:
            raise GroupError(self.verdict)

    def _enter(self, what: str, shapes: str) -> None:
        if self._depth:
            self._depth += 1
            return
        self._entered = time.monotonic()  # before the thread may see that this rank is in a call
        self._call = Call(self._call.number + 1, what, shapes)
        self.check()
        self._failure = self.verdict = None
        self._thread_id = threading.get_ident()
        if self._device is None and torch.cuda.is_initialized():
            self._device = torch.cuda.current_device()
        self._depth = 1
        self._use_store(self._calls.set, f"call/{self.rank}", f"{self._call.number}|{what}|{shapes}")

    def _leave(self, error: BaseException | None) -> None:
        self._depth -= 1
        if self._depth:
            return
        if error is None:
            return
        if is_of_the_communicator(error):
            self._find_cause()
        self._failures += 1
        self._failure = f"{type(error).__name__}: {first_line(error)}".rstrip(": ")
        self._publish()
        cause = self.verdict
        if cause is None and self._problem is not None and is_of_the_communicator(error):
            cause = self._problem.message
        if cause is not None and not isinstance(error, GroupError):
            raise GroupError(cause) from error

    def _find_cause(self) -> None:
        end = time.monotonic() + EXPLAIN_WITHIN
        while self._problem is None and time.monotonic() < end and self._thread.is_alive():
            self._wake.set()
            time.sleep(0.05)

    # --- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped and self._is_needed():
            now = time.monotonic()
            for peer in self._peers.values():
                peer.look(self._place.host)  # first: of one that is gone, the last words are read afterwards
            self._publish()
            self._use_store(self._read, now)
            self._judge(now)
            self._wake.wait(PERIOD)
            self._wake.clear()
        self._publish(left=True)

    def _publish(self, left: bool = False) -> None:
        with self._publishing:
            self._count += 1
            beat = Beat(self._count, self._failures, self._failure, left)
            self._use_store(self._beats.set, f"beat/{self.rank}", beat.to_text())

    def _use_store(self, use: Callable[..., object], *arguments: object) -> None:
        """A store that has failed is not used again, nor is its silence that of the ranks: processes can still be
        looked at."""
        if self._store_lost:
            return
        try:
            use(*arguments)
        except RuntimeError as error:
            self._store_lost = True
            log.debug("the store does not answer: %s", error)

    def _read(self, now: float) -> None:
        for rank, peer in self._peers.items():
            if peer.place is None:
                if not self._beats.check([f"place/{rank}"]):
                    continue
                host, pid, started = self._beats.get(f"place/{rank}").decode().rsplit("|", 2)
                peer.place = Place(host, int(pid), int(started))
            if peer.beat or self._beats.check([f"beat/{rank}"]):
                peer.hear(Beat.from_text(self._beats.get(f"beat/{rank}")), now)
            if peer.call.number or self._beats.check([f"call/{rank}"]):
                peer.call = Call.from_text(self._beats.get(f"call/{rank}").decode())

    def _judge(self, now: float) -> None:
        waiting = self._depth > 0
        found = self._trouble(now)
        if found is None and waiting:
            found = self._lateness(now - self._entered)
        if found is None or self._problem is None or not waiting:
            self._problem_at = now
        self._problem = found
        if found is None:
            return
        # A call that has just begun gets its own time to notice.
        since = now - max(self._problem_at, self._entered)
        if (waiting and since >= END_AFTER) or (not found.in_good_order and self._gpu_is_stuck(now)):
            self._end(found.message)
        if waiting and since >= RAISE_AFTER and self.verdict is None:
            self.verdict = found.message
            raise_in(self._thread_id, found.message)

    def _trouble(self, now: float) -> Trouble | None:
        waited = now - self._entered if self._depth else 0.0
        heard = not self._store_lost
        return trouble(self.rank, self._call, self._failures, self._peers, now if heard else 0.0, waited)

    def _lateness(self, seconds: float) -> Trouble | None:
        debugging = self._timeout is not None and seconds > self._timeout
        if not debugging and (seconds <= LATE_WARNING or self._warned == self._call.number):
            return None
        text = late(self._call, self._peers, seconds)
        if text is None or debugging:
            return Trouble(text) if text else None
        self._warned = self._call.number
        log.warning("Rank %d waits: %s", self.rank, text)
        return None

    def _gpu_is_stuck(self, now: float) -> bool:
        """Whether the GPU has not finished for so long what it had been given. Asked only once there is trouble: while
        a CUDA graph is captured, nobody may ask."""
        if self._device is None:
            return False
        if self._synchronising is None or not self._synchronising.is_alive():
            self._synchronising_since = now
            self._synchronising = threading.Thread(target=synchronize, args=(self._device,), daemon=True)
            self._synchronising.start()
        return now - self._synchronising_since >= END_AFTER

    def _end(self, problem: str) -> NoReturn:
        stuck = "a collective" if self._device is None else "a collective, or its GPU in a kernel"
        self._failures += 1
        self._failure = f"GroupError: {problem}"
        self._publish()
        last_words.leave(f"{problem} This process ends: it is stuck in {stuck}.", self.rank)
        os._exit(1)

    def end_if_stuck(self) -> None:
        """At the end of the program, after a failure: a kernel that waits for a rank that is gone would keep the
        interpreter from freeing the GPU's memory, and so the process from ending."""
        if self._device is None or (self._problem is None and self._failure is None):
            return
        finished = threading.Thread(target=synchronize, args=(self._device,), daemon=True)
        finished.start()
        finished.join(END_AFTER)
        if finished.is_alive():
            self._end(self._problem.message if self._problem is not None else "This rank failed.")

    def stop(self) -> None:
        """End the thread, and tell the others that this rank left in good order."""
        self._stopped = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * PERIOD)


class _InCall:
    """One call. A class, since a generator would cost more than all the rest of it."""

    __slots__ = ("_shapes", "_watch", "_what")

    def __init__(self, watch: Watch, what: str, shapes: str) -> None:
        self._watch, self._what, self._shapes = watch, what, shapes

    def __enter__(self) -> None:
        self._watch._enter(self._what, self._shapes)

    def __exit__(self, _type: Any, error: BaseException | None, _traceback: TracebackType | None) -> None:
        self._watch._leave(error)
