"""What one rank knows of the others, and what follows from it: who is gone, who failed, who is late.

Pure but for one look at the process table. Each rank publishes a `Place` once, a `Beat` every half second from a thread
of its own, and the number and the shapes of each call as it begins (`graphfuse.comm.watch` carries them). From these:

    its process is not there any more                          gone: certain at once, on the same host
    no beat for SILENCE                                        gone, on another host or in another container
    its last call failed, this rank's did not                  failed, with its error
    it has ended its program, and is waited for                left
    the same call with other shapes: at once by a rank that    the shapes are the cause, and are named
        is gone or failed, else once it does not end
    it has not come to the call this rank waits in             late: said in the log, an error only when debugging

A process that is there is never taken for gone, however long it compiles, is stopped, or holds the interpreter's lock.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SILENCE = 30.0
"""Seconds without a beat after which a rank whose process cannot be looked at counts as gone."""

DIFFERENCE_AFTER = 3.0
"""Seconds in one call after which another rank's other shapes in it are why it does not end."""


@dataclass(frozen=True)
class Place:
    """Where a rank runs."""

    host: str
    """Equal for processes that see each other: one host, one table of processes, one user."""
    pid: int
    started: int
    """When the process was started, in the kernel's clock ticks: numbers of processes are used again. 0: unknown."""

    @classmethod
    def here(cls, host: str) -> Place:
        try:
            host = f"{host}/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}"
        except OSError:
            host = f"{host}/{os.getppid()}"  # no table to look at: only processes of one parent see each other
        pid = os.getpid()
        return cls(host, pid, (_stat(pid) or ("", 0))[1])

    def is_there(self) -> bool:
        """Whether the process still runs. Only for a place on this host."""
        if not Path("/proc/self/stat").exists():
            try:
                os.kill(self.pid, 0)
            except OSError:
                return False
            return True
        stat = _stat(self.pid)
        return stat is not None and stat[0] not in "ZX" and stat[1] == self.started


def _stat(pid: int) -> tuple[str, int] | None:
    """(state, start time) of a process; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold anything
    return fields[0], int(fields[19])


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself."""

    count: int
    failures: int
    """Calls that ended in an error so far."""
    failure: str | None = None
    """The error of its last call, if that failed and no other call has begun."""
    left: bool = False
    """It ended its program in good order."""

    def to_text(self) -> str:
        return json.dumps([self.count, self.failures, self.failure, self.left])

    @classmethod
    def from_text(cls, text: str | bytes) -> Beat:
        return cls(*json.loads(text))


@dataclass(frozen=True)
class Call:
    """A call that a rank has begun: its number, what it is, and the shapes of its inputs as text."""

    number: int = 0
    what: str = ""
    shapes: str = ""

    @classmethod
    def from_text(cls, text: str) -> Call:
        number, what, shapes = text.split("|", 2)
        return cls(int(number), what, shapes)

    def __str__(self) -> str:
        return f"call {self.number} ({self.what}{' of ' + self.shapes if self.shapes else ''})"


@dataclass
class Peer:
    """One other rank, as this one has seen it so far."""

    rank: int
    place: Place | None = None
    beat: Beat | None = None
    beat_at: float = 0.0
    """When the last new beat was seen, by this rank's clock."""
    call: Call = field(default_factory=Call)
    in_sight: bool = False
    """Whether its process can be looked for."""
    there: bool = True

    def look(self, host: str) -> None:
        """See whether the process is there, where it can be seen."""
        if self.place is not None and self.there:
            self.in_sight = self.place.host == host
            self.there = not self.in_sight or self.place.is_there()

    def hear(self, beat: Beat, now: float) -> None:
        if beat != self.beat:
            self.beat, self.beat_at = beat, now

    @property
    def name(self) -> str:
        process = f" (process {self.place.pid})" if self.place is not None else ""
        return f"rank {self.rank}{process}"


@dataclass(frozen=True)
class Trouble:
    """There is nobody to wait for."""

    message: str
    in_good_order: bool = False
    """The others have ended their programs, which is trouble only to a rank that waits for them."""


def trouble(
    rank: int, mine: Call, failures: int, peers: Mapping[int, Peer], now: float, waited: float = 0.0
) -> Trouble | None:
    """Why this rank, in the call `mine` for `waited` seconds and after so many failed calls of its own, need not wait
    any longer. None while everybody may still come."""
    failed = [p for p in peers.values() if p.beat and p.beat.failure and p.beat.failures > failures]
    failed.sort(key=lambda p: (p.beat is not None and str(p.beat.failure).startswith("GroupError"), p.rank))
    gone = [p for p in peers.values() if not p.there or _silent(p, now)]
    lost = [p for p in gone if p.beat is None or (not p.beat.left and not p.beat.failure)]
    suspects = peers.values() if waited > DIFFERENCE_AFTER else [*failed, *gone]
    differing = [p for p in suspects if p.call.number == mine.number and p.call.shapes != mine.shapes]
    if differing:
        ended = f", and {_names(lost)} ended over it" if lost else ""
        shapes = ", ".join(f"{p.call.shapes} on rank {p.rank}" for p in differing)
        return Trouble(
            f"The ranks gave different shapes in call {mine.number} ({mine.what}): {mine.shapes} on rank {rank}, "
            f"{shapes}{ended}. Give every rank inputs of the same shapes."
        )
    if lost:
        where = "; ".join(f"{p.name} is gone without an error{_last(p)}" for p in lost)
        return Trouble(
            f"{where[0].upper()}{where[1:]}. It crashed, was killed, or memory ran out: see its output, and the "
            "kernel's log (dmesg) for killed processes."
        )
    if failed:
        peer = failed[0]
        assert peer.beat is not None
        failure = str(peer.beat.failure).rstrip(".")
        return Trouble(f"Rank {peer.rank} failed in {peer.call}: {failure}. See the error there first.")
    if gone:
        return Trouble(
            f"{_names(gone).capitalize()} ended the program after call {gone[0].call.number}, and this rank waits in "
            f"call {mine.number} ({mine.what}). Make the same calls on every rank.",
            in_good_order=True,
        )
    return None


def late(mine: Call, peers: Mapping[int, Peer], seconds: float) -> str | None:
    """Who has not come to the call that this rank has waited in for so long; None when all have."""
    missing = [p for p in peers.values() if p.call.number < mine.number]
    if not missing:
        return None
    where = "; ".join(
        f"{p.name} is at {p.call}" if p.place is not None else f"{p.name} has not begun to trace or to generate"
        for p in missing
    )
    return (
        f"{_names(missing).capitalize()} did not come to {mine} within {seconds:.0f} s: {where}. See what it does "
        "there, and make sure that all ranks make the same calls."
    )


def _silent(peer: Peer, now: float) -> bool:
    """No beat for long, from a rank whose process cannot be seen."""
    return not peer.in_sight and peer.beat is not None and now - peer.beat_at > SILENCE


def _last(peer: Peer) -> str:
    return f", last in {peer.call}" if peer.call.number else ""


def _names(peers: list[Peer]) -> str:
    return f"rank{'s' if len(peers) > 1 else ''} {', '.join(str(p.rank) for p in peers)}"
