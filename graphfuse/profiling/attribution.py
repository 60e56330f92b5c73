"""Where the time of a profiler's trace went: from Chrome events, as torch.profiler writes them, to time by label.

    kernel ─ correlation ─► the call that launched it ─ thread, time ─► the innermost range that it stands in: a `Label`

On the CPU ops run where they are called, so the ranges themselves are the work, each without those inside it. Work
outside of all labelled ranges is unattributed. Pure functions of the trace: a saved one does as well. Times are
microseconds.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from graphfuse.profiling.labels import Label

PHASE = "graphfuse phase: "
"""Ranges named so enclose the calls of a phase: all that is measured is inside one."""

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class Work:
    """A stretch of time in which a kernel ran, or on the CPU an op."""

    phase: str
    name: str
    label: Label | None
    start: float
    end: float


@dataclass(frozen=True)
class Spent:
    """One phase: from its first work to the end of its last. The parts add up to `window`, overlapping work sharing the
    time that it overlaps."""

    window: float
    idle: float
    by_label: Mapping[Label, float]
    unattributed: float
    kernels: int

    @property
    def busy(self) -> float:
        return self.window - self.idle

    @property
    def attributed(self) -> float:
        """The part of busy time that has a label, 0 ... 1."""
        labelled = sum(self.by_label.values())
        return labelled / (labelled + self.unattributed) if labelled or self.unattributed else 1.0


def work_of(trace: Mapping[str, Any]) -> list[Work]:
    """All work of a trace that stands in a phase, by start. Kernels, if the trace has any; else ops and ranges of the
    CPU."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    threads = _Ranges(event for event in events if event.get("cat") == "user_annotation")
    on_device = [event for event in events if event.get("cat") in _ON_DEVICE]
    found = _on_device(on_device, events, threads) if on_device else _on_cpu(events, threads)
    return sorted(found, key=lambda work: (work.start, work.end))


def spent(work: Iterable[Work], phase: str) -> Spent:
    """The time of a phase."""
    pieces = [piece for piece in work if piece.phase == phase and piece.end > piece.start]
    if not pieces:
        return Spent(0.0, 0.0, {}, 0.0, 0)
    by_label: Counter[Label | None] = Counter()
    window = max(piece.end for piece in pieces) - min(piece.start for piece in pieces)
    busy = 0.0
    for length, running in _together(pieces):
        busy += length
        for piece in running:
            by_label[piece.label] += length / len(running)  # type: ignore[assignment]  # a Counter of floats
    unattributed = float(by_label.pop(None, 0.0))
    labelled = {label: float(time) for label, time in by_label.items() if label is not None}
    return Spent(window, max(0.0, window - busy), labelled, unattributed, len(pieces))


def with_labels_of(plain: Sequence[Work], labelled: Sequence[Work]) -> list[Work]:
    """Work of an undisturbed run, such as the replay of a CUDA graph, with the labels of a run of the same calls: the
    k-th kernel of a name in a phase is the same in both. A name that one of them has more often stays unlabelled,
    unless all of its kernels are labelled alike."""
    labels: defaultdict[tuple[str, str], list[Label | None]] = defaultdict(list)
    for piece in labelled:
        labels[piece.phase, piece.name].append(piece.label)
    counts = Counter((piece.phase, piece.name) for piece in plain)
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for piece in plain:
        key = (piece.phase, piece.name)
        known = labels.get(key, [])
        alike = known[0] if len(set(known)) == 1 else None
        label = known[seen[key]] if len(known) == counts[key] else alike
        seen[key] += 1
        found.append(Work(piece.phase, piece.name, label, piece.start, piece.end))
    return found


# --- kernels ----------------------------------------------------------------------------------------------------------


def _on_device(on_device: list[dict], events: list[dict], ranges: _Ranges) -> Iterator[Work]:
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    for event in on_device:
        launch = launches.get(event.get("args", {}).get("correlation"))
        if launch is None:
            continue  # launched before the profiler looked
        phase, label = ranges.at(_thread(launch), float(launch["ts"]))
        if phase is not None:
            start = float(event["ts"])
            yield Work(phase, event["name"], label, start, start + float(event["dur"]))


# --- ops of the CPU ---------------------------------------------------------------------------------------------------


def _on_cpu(events: list[dict], ranges: _Ranges) -> Iterator[Work]:
    yield from ranges.labelled()
    outermost: dict[Any, float] = {}
    # torch also marks steps of its own so ("TorchDynamo Cache Lookup"), which are no ops.
    ops = [event for event in events if event.get("cat") == "cpu_op" and "::" in event["name"]]
    for event in sorted(ops, key=lambda event: (float(event["ts"]), -float(event["dur"]))):
        thread, start = _thread(event), float(event["ts"])
        end = start + float(event["dur"])
        if end <= outermost.get(thread, 0.0):
            continue
        phase, label = ranges.at(thread, start)
        if phase is not None and label is None and not ranges.starts_between(thread, start, end):
            outermost[thread] = end
            yield Work(phase, event["name"], None, start, end)


# --- ranges -----------------------------------------------------------------------------------------------------------


def _thread(event: Mapping[str, Any]) -> tuple[Any, Any]:
    return event.get("pid"), event.get("tid")


class _Ranges:
    """The named ranges of each thread, cut into stretches in which nothing changes: (start, phase, label, name)."""

    def __init__(self, events: Iterable[dict]) -> None:
        by_thread: defaultdict[Any, list[tuple[float, float, str]]] = defaultdict(list)
        for event in events:
            start = float(event["ts"])
            by_thread[_thread(event)].append((start, start + float(event["dur"]), event["name"]))
        self._stretches = {thread: _stretches(ranges) for thread, ranges in by_thread.items()}
        self._starts = {thread: [s[0] for s in stretches] for thread, stretches in self._stretches.items()}

    def at(self, thread: Any, time: float) -> tuple[str | None, Label | None]:
        """The phase and the innermost label at a moment."""
        index = bisect.bisect_right(self._starts.get(thread, []), time) - 1
        return self._stretches[thread][index][1:] if index >= 0 else (None, None)

    def starts_between(self, thread: Any, start: float, end: float) -> bool:
        """Whether a labelled range begins in a stretch of time: what surrounds it is no work of its own."""
        starts = self._starts.get(thread, [])
        inside = range(bisect.bisect_right(starts, start), bisect.bisect_left(starts, end))
        return any(self._stretches[thread][index][2] is not None for index in inside)

    def labelled(self) -> Iterator[Work]:
        for stretches in self._stretches.values():
            for (start, phase, label), (end, _, _) in pairwise(stretches):
                if phase is not None and label is not None and end > start:
                    yield Work(phase, label.op, label, start, end)


def _stretches(ranges: list[tuple[float, float, str]]) -> list[tuple[float, str | None, Label | None]]:
    """Nested ranges as a line of stretches, by start. Ranges of one thread are nested, as contexts are."""
    found: list[tuple[float, str | None, Label | None]] = []
    open_: list[tuple[float, str | None, Label | None]] = []  # (end, phase, label) from the outermost in

    def close(until: float) -> None:
        while open_ and open_[-1][0] <= until:
            end = open_.pop()[0]
            phase, label = open_[-1][1:] if open_ else (None, None)
            found.append((end, phase, label))

    for start, end, name in sorted(ranges, key=lambda r: (r[0], -r[1])):
        close(start)
        phase, label = open_[-1][1:] if open_ else (None, None)
        if name.startswith(PHASE):
            phase, label = name.removeprefix(PHASE), None
        else:
            label = Label.read(name) or label
        open_.append((end, phase, label))
        found.append((start, phase, label))
    close(float("inf"))
    return found


def _together(pieces: Sequence[Work]) -> Iterator[tuple[float, list[Work]]]:
    """(length, what runs) of each stretch in which the same work runs."""
    times = sorted(
        [(p.start, True, i) for i, p in enumerate(pieces)] + [(p.end, False, i) for i, p in enumerate(pieces)]
    )
    running: dict[int, Work] = {}
    before = times[0][0]
    for time, begins, index in times:
        if running and time > before:
            yield time - before, list(running.values())
        before = time
        if begins:
            running[index] = pieces[index]
        else:
            running.pop(index, None)
