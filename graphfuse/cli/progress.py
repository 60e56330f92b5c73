"""How far a run over a file is, while it lasts and at its end."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.progress import Task as Bar
from rich.text import Text

from graphfuse.generation.completion import Completion
from graphfuse.generation.record import Record

if TYPE_CHECKING:
    from graphfuse.cli.input_survey import Task
    from graphfuse.generation import LLM

_SECONDS_BETWEEN_LINES = 30.0
_WINDOW = 20.0
"""Seconds over which speed is averaged."""


class Latencies:
    """Percentiles of any number of times, within 1 %, in little memory."""

    _STEP = math.log(1.02)

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.num = 0

    def add(self, seconds: float) -> None:
        place = round(math.log(max(seconds, 1e-6)) / self._STEP)
        self._counts[place] = self._counts.get(place, 0) + 1
        self.num += 1

    def percentile(self, share: float) -> float:
        """The time that `share` of all stay within, in seconds; 0.0 of none."""
        needed, seen = share * self.num, 0
        for place in sorted(self._counts):
            seen += self._counts[place]
            if seen >= needed:
                return math.exp(place * self._STEP)
        return 0.0


@dataclass
class Tally:
    """What has become of the records so far."""

    num_before: int = 0
    """Answered before this run, errors among them."""

    num_errors_before: int = 0
    num_completed: int = 0
    num_errors: int = 0
    num_tokens: int = 0
    """Generated, of completed records."""

    num_bytes: int = 0
    """Of the lines of the input that are done with, in this run or before."""

    num_bytes_passed: int = 0
    """Of those, of lines that this run had nothing to do with."""

    latencies: Latencies = field(default_factory=Latencies)
    """From the time the engine takes a record to its last token."""

    def completed(self, record: Record, completions: Sequence[Completion], seconds: float) -> None:
        self.num_completed += 1
        self.num_tokens += sum(len(completion.token_ids) for completion in completions)
        self.num_bytes += record.size
        self.latencies.add(seconds)

    def refused(self, record: Record) -> None:
        self.num_errors += 1
        self.num_bytes += record.size

    def passed(self, record: Record) -> None:
        self.num_bytes += record.size
        self.num_bytes_passed += record.size

    @property
    def found_no_use(self) -> bool:
        """Whether there were records, and none that could be completed, now or before."""
        errors = self.num_errors + self.num_errors_before
        return errors > 0 and self.num_completed + self.num_before - self.num_errors_before == 0


def summary(task: Task, llm: LLM | None, tally: Tally) -> str:
    """What the run did, in a few lines. Without an LLM there was nothing to do."""
    lines = [
        f"{tally.num_completed} records completed, {tally.num_errors} could not be used, "
        f"{tally.num_before} were done before: see {task.output}"
    ]
    if llm is None:
        return "\n".join([*lines, "Nothing is left to do. To start anew, give --overwrite."])
    lines.append(llm.stats.to_text())
    if tally.latencies.num:
        p50, p90, p99 = (f"{tally.latencies.percentile(share):.2f} s" for share in (0.5, 0.9, 0.99))
        lines.append(f"latency of a record: p50 {p50}, p90 {p90}, p99 {p99}")
    if llm.report is not None:
        lines.append(llm.report.headline())
    return "\n".join(lines)


class _State:
    """Speed and time left, from what is counted."""

    def __init__(self, llm: LLM, tally: Tally, num_bytes: int) -> None:
        self._llm, self._tally, self._num_bytes = llm, tally, num_bytes
        self._since = time.monotonic()
        self._samples = deque([(self._since, 0)])

    @property
    def share(self) -> float:
        """How much of the input is done, 0 … 1."""
        return min(1.0, self._tally.num_bytes / self._num_bytes) if self._num_bytes else 1.0

    def to_text(self) -> str:
        num_done = self._tally.num_completed + self._tally.num_errors
        cache_used = 100 * self._llm.progress.cache_used
        return f"{num_done} records, {self._speed():.0f} tokens/s, cache {cache_used:.0f} %, {self._left()} left"

    def _speed(self) -> float:
        now, samples = time.monotonic(), self._samples
        samples.append((now, self._llm.stats.decode_tokens))
        while len(samples) > 2 and samples[0][0] < now - _WINDOW:
            samples.popleft()
        (first, before), (last, after) = samples[0], samples[-1]
        return max(0, after - before) / (last - first) if last > first else 0.0

    def _left(self) -> str:
        """By bytes of the input: nothing else is known of records that have not been read."""
        done = self._tally.num_bytes - self._tally.num_bytes_passed
        if not done:
            return "?"
        seconds = (time.monotonic() - self._since) / done * (self._num_bytes - self._tally.num_bytes)
        minutes, seconds = divmod(int(max(0.0, seconds)), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


class _StateColumn(ProgressColumn):
    def __init__(self, state: _State) -> None:
        super().__init__()
        self._state = state

    def render(self, task: Bar) -> Text:
        return Text(self._state.to_text(), no_wrap=True, overflow="ellipsis")


@contextmanager
def shown(task: Task, llm: LLM, tally: Tally, *, visible: bool) -> Iterator[Callable[[], None]]:
    """Shows how far the run is, on stderr: as a bar where that is a terminal and nobody else draws one there, else as a
    line now and then. To be called after each record."""
    if not visible:
        yield lambda: None
        return
    state = _State(llm, tally, task.input.stat().st_size)
    console = Console(stderr=True)
    if not console.is_terminal or task.num_replicas > 1:
        name = f"replica {task.replica}: " if task.num_replicas > 1 else ""
        last = time.monotonic()

        def say() -> None:
            nonlocal last
            if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                print(f"{name}{100 * state.share:.0f} %, {state.to_text()}", file=sys.stderr, flush=True)

        yield say
        return
    columns = (TextColumn("{task.percentage:>3.0f} %"), BarColumn(16), _StateColumn(state))
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as progress:
        bar = progress.add_task("", total=1.0)
        yield lambda: progress.update(bar, completed=state.share)
