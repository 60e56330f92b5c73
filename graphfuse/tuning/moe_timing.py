"""Times of candidates on one GPU, side by side: round k runs each candidate once, so that drift, heat and clocks meet
all alike.

    record: run all calls once (compiles, loads modules) ─► capture them as one CUDA graph
    rounds: for each candidate: hold the stream ─► replay                            µs a call, median over the rounds

A graph holds several calls on different tokens and routings: the same call again would find its weights in the L2
cache, as no layer of a model does. See `moe_inputs.num_sets`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphfuse.errors import BackendUnavailableError
from graphfuse.tuning.measured import median

Call = Callable[[], object]

ROUNDS = 7
# Until clocks have risen from idle.
WARM_SECONDS = 0.02
# About 300 µs on an H200: longer than the host takes to enqueue a graph and the events around it.
HOLD_CYCLES = 600_000


@dataclass(frozen=True)
class Recording:
    """Calls captured as one graph."""

    graph: torch.cuda.CUDAGraph
    num_calls: int


def time_calls(calls: Sequence[Call], *, rounds: int = ROUNDS) -> float:
    """Microseconds of a call, on average over `calls`.

    Raises:
        BackendUnavailableError: there is no GPU.
    """
    return time_candidates({"": calls}, rounds=rounds)[""]


def time_candidates(candidates: Mapping[str, Sequence[Call]], *, rounds: int = ROUNDS) -> dict[str, float]:
    """`time_calls` of several candidates in turn. What a call raises ends all; `record` alone tells them apart.

    Raises:
        BackendUnavailableError: there is no GPU.
    """
    check_gpu()
    pool = new_pool()
    times = replay_rounds({name: record(calls, pool) for name, calls in candidates.items()}, rounds=rounds)
    return {name: median(each) for name, each in times.items()}


@torch.no_grad()
def record(calls: Sequence[Call], pool: Any = None) -> Recording:
    """Calls as one graph. Their results are thrown away, so recordings may share a `new_pool()`."""
    check_gpu()
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for call in calls:
            call()
    return Recording(graph, len(calls))


def replay_rounds(recordings: Mapping[str, Recording], *, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Microseconds a call of each recording in each round."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    while recordings and time.perf_counter() - start < WARM_SECONDS:
        for recording in recordings.values():
            recording.graph.replay()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in recordings}
    for _ in range(rounds):
        finish = {name: _start(recording) for name, recording in recordings.items()}
        torch.cuda.synchronize()
        for name, microseconds in finish.items():
            times[name].append(microseconds())
    return times


def new_pool() -> Any:
    """Memory for intermediate results that recordings can share, being replayed one after the other."""
    return torch.cuda.graph_pool_handle()


def check_gpu() -> None:
    """Raises `BackendUnavailableError` where nothing can be timed."""
    if not torch.cuda.is_available():
        raise BackendUnavailableError(
            "MoE layers are timed as CUDA graphs, and there is no CUDA GPU here. Run this on a host with one."
        )


def _start(recording: Recording) -> Callable[[], float]:
    """Replay once; returns what gives microseconds a call when the device has finished."""
    torch.cuda._sleep(HOLD_CYCLES)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    recording.graph.replay()
    end.record()
    return lambda: start.elapsed_time(end) * 1e3 / recording.num_calls
