"""What one GPU does of a tuning run: its numbers of tokens, one after the other, each a search of its own.

What it finds goes out as events at once, so that nothing is lost with the process. What is known from an earlier run
is taken from there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from graphfuse.errors import BackendUnavailableError
from graphfuse.tuning.moe_cost import Device, seconds
from graphfuse.tuning.moe_journal import OK, Known, Trial
from graphfuse.tuning.moe_search import Best, Effort, openings, search
from graphfuse.tuning.moe_shapes import Workload
from graphfuse.tuning.moe_space import ranked
from graphfuse.tuning.moe_tiles import MoeShape, Tiles


class Meter(Protocol):
    """What times candidates: `moe_meter.GpuMeter`, or a stand-in."""

    def prepare(self, num_tokens: int, candidates: Sequence[Tiles]) -> None:
        """These will be measured: begin with what can be done ahead. Returns at once."""

    def measure(self, num_tokens: int, candidates: Sequence[Tiles], rounds: int) -> list[Trial]:
        """A trial of each, in their order. A candidate that does not run is a trial too."""

    def close(self) -> None: ...


MakeMeter = Callable[[Workload, int, int], Meter]
"""(what to measure, number of the GPU, number of GPUs at work) → its meter."""


@dataclass(frozen=True)
class Winner:
    """A number of tokens is done."""

    num_tokens: int
    best: Best


Event = Trial | Winner


@dataclass(frozen=True)
class Share:
    """The part of one GPU."""

    gpu: int
    num_gpus: int
    workload: Workload
    token_counts: tuple[int, ...]
    """Rising: each begins with what was best for the one before."""

    effort: Effort
    device: Device
    deadline: float = math.inf
    """By `time.time()`, after which nothing more is measured."""

    known: Known = field(default_factory=Known)
    """Trials of an earlier run."""


@dataclass
class BrokenGpu(Exception):
    """A candidate left this process without a GPU. Never leaves the tuner."""

    tiles: Tiles
    reason: str


class TimeUp(Exception):
    """The deadline has passed. Never leaves the tuner."""


def run_share(share: Share, make_meter: MakeMeter, emit: Callable[[Event], object]) -> None:
    """Search all numbers of tokens of a share.

    Raises:
        TimeUp: not all of them are done.
        BackendUnavailableError: no candidate runs for one of them, or one of the candidates broke the GPU.
    """
    shape, effort, device = share.workload.shape, share.effort, share.device
    recorder = _Recorder(share, make_meter, emit)
    neighbour: Tiles | None = None
    try:
        for num_tokens, following in zip(share.token_counts, [*share.token_counts[1:], None], strict=True):
            others = heuristics(shape, num_tokens)
            seeds = [*([neighbour] if neighbour else []), *others]
            recorder.foresee(num_tokens, _foreseen(shape, num_tokens, device, effort, seeds))
            if following is not None:
                # Compiled while this number is timed; behind all that this one needs, but for its neighbours.
                more = _foreseen(shape, following, device, effort, heuristics(shape, following))
                recorder.foresee(following, more)

            def measure(candidates: Sequence[Tiles], rounds: int, num_tokens: int = num_tokens) -> list[float]:
                return recorder.measure(num_tokens, candidates, rounds)

            best = search(shape, num_tokens, measure, device=device, effort=effort, neighbour=neighbour, others=others)
            neighbour = best.tiles
            emit(Winner(num_tokens, best))
    finally:
        recorder.close()


def heuristics(shape: MoeShape, num_tokens: int) -> list[Tiles]:
    """What serves without a table."""
    from graphfuse.tuning.moe_heuristic import heuristic

    return [heuristic(shape, num_tokens)]


def deal(shape: MoeShape, token_counts: Sequence[int], num_gpus: int, device: Device) -> list[tuple[int, ...]]:
    """Numbers of tokens for each GPU, about as much work each: neighbours stay together, since they seed each other."""
    counts = sorted(set(token_counts))
    work = [CONSTANT_WORK + _layer_seconds(shape, num_tokens, device) for num_tokens in counts]
    total, done = sum(work), 0.0
    shares: list[list[int]] = [[] for _ in range(num_gpus)]
    for num_tokens, part in zip(counts, work, strict=True):
        shares[min(int((done + part / 2) / total * num_gpus), num_gpus - 1)].append(num_tokens)
        done += part
    return [tuple(share) for share in shares if share]


CONSTANT_WORK = 1e-3
"""What a trial costs besides its calls, in seconds of one call: compiling, capturing."""


def _layer_seconds(shape: MoeShape, num_tokens: int, device: Device) -> float:
    return sum(
        min(
            (seconds(shape, num_tokens, name, tiles[0], device) for size in (16, 64, 128)
             if (tiles := ranked(shape, num_tokens, name, size, device))),
            default=0.0,
        )
        for name in ("gate_up", "down")
    )  # fmt: skip


def _foreseen(shape: MoeShape, num_tokens: int, device: Device, effort: Effort, seeds: Sequence[Tiles]) -> list[Tiles]:
    opening = openings(shape, num_tokens, device, effort, seeds)
    return [*seeds, *(tiles for each in opening.values() for tiles in each.candidates())]


class _Recorder:
    """A meter that is made when first needed, asked only for what is not known, and stopped at the deadline."""

    def __init__(self, share: Share, make_meter: MakeMeter, emit: Callable[[Event], object]) -> None:
        self._share, self._make, self._emit = share, make_meter, emit
        self._known = share.known
        self._meter: Meter | None = None
        self._foreseen: dict[int, list[Tiles]] = {}

    def foresee(self, num_tokens: int, candidates: Sequence[Tiles]) -> None:
        """These may be asked for. The meter is told when something is measured: all may be known."""
        few = self._share.effort.rounds[0]
        new = [tiles for tiles in dict.fromkeys(candidates) if self._known.get(num_tokens, tiles, few) is None]
        self._foreseen.setdefault(num_tokens, []).extend(new)

    def measure(self, num_tokens: int, candidates: Sequence[Tiles], rounds: int) -> list[float]:
        new = [tiles for tiles in dict.fromkeys(candidates) if self._known.get(num_tokens, tiles, rounds) is None]
        if new:
            self._check_time()
            for trial in self._measure_new(num_tokens, new, rounds):
                self._known.add(trial)
                self._emit(trial)
        found = [self._known.get(num_tokens, tiles, rounds) for tiles in candidates]
        return [trial.us if trial is not None and trial.status == OK else math.inf for trial in found]

    def close(self) -> None:
        if self._meter is not None:
            self._meter.close()

    def _measure_new(self, num_tokens: int, new: Sequence[Tiles], rounds: int) -> list[Trial]:
        meter = self._get_meter()
        try:
            foreseen, self._foreseen = self._foreseen, {}
            for later, tiles in sorted(foreseen.items()):
                if later >= num_tokens and tiles:
                    meter.prepare(later, tiles)
            return meter.measure(num_tokens, new, rounds)
        except BrokenGpu as broken:
            self._emit(Trial(num_tokens, broken.tiles, rounds, math.inf, broken.reason))
            raise BackendUnavailableError(
                f"A candidate for {num_tokens} tokens left GPU {self._share.gpu} unusable: {broken.reason}. It is in "
                "the CSV file of trials, so start again: the next run goes on without it."
            ) from broken

    def _get_meter(self) -> Meter:
        if self._meter is None:
            self._meter = self._make(self._share.workload, self._share.gpu, self._share.num_gpus)
        return self._meter

    def _check_time(self) -> None:
        if time.time() > self._share.deadline:
            raise TimeUp
