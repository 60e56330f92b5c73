"""Measure candidates at every size: set up, record, time in rounds, one row a size."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from graphfuse.comm.control import control_channel
from graphfuse.facts import Facts, gather_facts
from graphfuse.tuning.allreduce_candidates import DISPATCHED, Candidates
from graphfuse.tuning.allreduce_inputs import Inputs, Shape
from graphfuse.tuning.allreduce_result import Row
from graphfuse.tuning.allreduce_timing import Recording, Stopwatch
from graphfuse.tuning.measured import median, spread

LINK = "link"


@dataclass(frozen=True)
class Plan:
    """What to measure. Rising sizes; `warm` rounds go before the `timed` ones that count."""

    candidates: tuple[str, ...]
    hidden_sizes: tuple[int, ...]
    tokens: tuple[int, ...]
    dtype: torch.dtype
    warm: int = 5
    timed: int = 9


@dataclass
class Measured:
    """What a run found."""

    facts: Facts
    link_gbps: float | None
    rows: list[Row] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)


@torch.no_grad()
def measure(
    group: ProcessGroup,
    device: torch.device,
    plan: Plan,
    *,
    begin: Callable[[Measured], object] = lambda measured: None,
    each: Callable[[Row], object] = lambda row: None,
) -> Measured:
    """Run the plan on the group. Collective; every rank gets the same result.

    Args:
        begin: called with facts and link before the first size.
        each: called with every row when it is measured.

    Raises:
        GroupError: a rank did not answer.
    """
    facts = gather_facts(group, device)
    shapes = [Shape(tokens, hidden, plan.dtype) for hidden in plan.hidden_sizes for tokens in plan.tokens]
    stopwatch = Stopwatch(group, device, control_channel(group))
    dist.barrier(group)  # makes the communicator
    measured = Measured(facts, stopwatch.link_gbps())
    begin(measured)
    candidates = Candidates(plan.candidates, shapes, facts, group, device)
    measured.absent = candidates.absent
    for hidden_size in plan.hidden_sizes:
        candidates.prepare(hidden_size)
        for shape in (shape for shape in shapes if shape.hidden_size == hidden_size):
            row = _measure_shape(shape, candidates, stopwatch, plan, group, device, measured.link_gbps)
            measured.rows.append(row)
            each(row)
        gc.collect()  # graphs go before the workspaces whose addresses they hold
        candidates.release(hidden_size)
    return measured


def _measure_shape(
    shape: Shape,
    candidates: Candidates,
    stopwatch: Stopwatch,
    plan: Plan,
    group: ProcessGroup,
    device: torch.device,
    link_gbps: float | None,
) -> Row:
    inputs = Inputs(shape, group, device)
    recordings: list[Recording] = []
    for candidate in candidates.at(inputs):
        recording = stopwatch.record(candidate, inputs)
        if isinstance(recording, str):
            candidates.miss(candidate.name, f"At {shape.num_tokens} x {shape.hidden_size}: {recording}")
        else:
            recordings.append(recording)
    times = stopwatch.rounds(recordings, plan.warm, plan.timed)
    named = {recording.candidate.name: each for recording, each in zip(recordings, times, strict=True)}
    us = {name: round(median(each), 2) for name, each in named.items()}
    if link_gbps is not None:
        us[LINK] = round(shape.num_bytes * link_factor(dist.get_world_size(group)) / link_gbps / 1e3, 2)
    return Row(
        tokens=shape.num_tokens,
        hidden=shape.hidden_size,
        us=us,
        spread={name: round(spread(each), 4) for name, each in named.items()},
        dispatched=candidates.dispatched(shape) if DISPATCHED in named else None,
    )


def link_factor(world_size: int) -> float:
    """Times that a message has to cross a GPU's links: once between two, else a reduce-scatter and an all-gather."""
    return 1.0 if world_size == 2 else 2 * (world_size - 1) / world_size
