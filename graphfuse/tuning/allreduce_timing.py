"""Times of candidates measured side by side: round k runs each candidate once, so that drift and noise meet all alike.

    warm up, record (a CUDA graph of some calls), replay once and check the results      on every rank, or absent
    rounds: for each candidate: refill ─► wait for the other ranks ─► replay             µs a call, maximum over ranks

On the GPU a round is queued as a whole: while a kernel that does nothing holds the stream, the host enqueues a small
all-reduce, which lets go of all ranks at once, and the graph behind it. On the CPU it is wall clock around the calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from graphfuse.comm.control import ControlChannel
from graphfuse.tuning.agreement import attempt
from graphfuse.tuning.allreduce_candidates import Candidate, Outputs
from graphfuse.tuning.allreduce_inputs import Inputs

# Calls in a graph: few of large messages, of which a replay is long enough.
MIN_ITERATIONS, MAX_ITERATIONS, REPLAYED_BYTES = 4, 20, 512 << 20
CPU_ITERATIONS = 3
WARM_UPS = 3
# About 300 µs on an H200: longer than the host takes to enqueue what waits behind.
HOLD_CYCLES = 600_000
LINK_BYTES, LINK_REPEATS = 256 << 20, 10


@dataclass(frozen=True)
class Recording:
    """A candidate ready to be timed: `replay` makes `iterations` calls; `outputs` are those of the first one."""

    candidate: Candidate
    iterations: int
    replay: Callable[[], None]
    outputs: Callable[[], Outputs]


class Stopwatch:
    """Records and times candidates on one device of a group. Collective throughout."""

    def __init__(self, group: ProcessGroup, device: torch.device, channel: ControlChannel) -> None:
        self._group, self._device, self._channel = group, device, channel
        self._flag = torch.zeros(1, device=device)

    @property
    def _is_gpu(self) -> bool:
        return self._device.type == "cuda"

    def record(self, candidate: Candidate, inputs: Inputs) -> Recording | str:
        """The candidate ready to be timed, or why it cannot be: it fails, cannot be captured, or is wrong."""
        count = inputs.shape.num_buffers
        iterations = CPU_ITERATIONS
        if self._is_gpu:
            iterations = max(MIN_ITERATIONS, min(MAX_ITERATIONS, REPLAYED_BYTES // inputs.shape.num_bytes))

        def warm_up() -> None:
            candidate.refill()
            for iteration in range(WARM_UPS):  # compiles and loads modules, which a capture may not
                candidate.call(iteration % count)
            self._synchronize()

        _, reason = attempt(self._channel, warm_up)
        if reason:
            return reason
        record = self._capture if self._is_gpu else self._loop
        recording, reason = attempt(self._channel, lambda: record(candidate, iterations, count))
        if recording is None:
            return reason or ""

        def check() -> None:
            candidate.refill()
            self._synchronize()
            dist.barrier(self._group)
            recording.replay()
            self._synchronize()
            mistake = inputs.mistake(*recording.outputs())
            if mistake:
                raise WrongResult(mistake)

        _, reason = attempt(self._channel, check)
        return reason or recording

    def rounds(self, recordings: Sequence[Recording], warm: int, timed: int) -> list[list[float]]:
        """Microseconds a call of each recording in each timed round, the maximum over the ranks."""
        if not recordings:
            return []
        kept: list[list[Callable[[], float]]] = []
        for number in range(warm + timed):
            started = [self._start(recording) for recording in recordings]
            self._synchronize()
            if number >= warm:
                kept.append(started)
        times = [[finish() / r.iterations for finish, r in zip(each, recordings, strict=True)] for each in kept]
        slowest = torch.tensor(times, dtype=torch.float64, device=self._device)  # [rounds, recordings]
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self._group)
        return slowest.t().tolist()

    def _start(self, recording: Recording) -> Callable[[], float]:
        """Run a recording once; returns what gives its microseconds when the device has finished."""
        recording.candidate.refill()
        if not self._is_gpu:
            dist.barrier(self._group)
            started = time.perf_counter()
            recording.replay()
            elapsed = (time.perf_counter() - started) * 1e6
            return lambda: elapsed
        torch.cuda._sleep(HOLD_CYCLES)
        dist.all_reduce(self._flag, group=self._group)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        recording.replay()
        end.record()
        return lambda: start.elapsed_time(end) * 1e3

    def _capture(self, candidate: Candidate, iterations: int, count: int) -> Recording:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            outputs = candidate.call(0)  # kept, so that no later call writes there
            for iteration in range(1, iterations):
                candidate.call(iteration % count)
        return Recording(candidate, iterations, graph.replay, lambda: outputs)

    def _loop(self, candidate: Candidate, iterations: int, count: int) -> Recording:
        first: list[Outputs] = []

        def replay() -> None:
            first[:] = [candidate.call(0)]
            for iteration in range(1, iterations):
                candidate.call(iteration % count)

        return Recording(candidate, iterations, replay, lambda: first[0])

    def _synchronize(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize()

    def link_gbps(self) -> float | None:
        """GB/s of a copy between GPU 0 and GPU 1, best of several; None where rank 0 does not see both."""

        def copy() -> float | None:
            peer = 0 if self._device.index else 1
            if self._channel.rank or peer >= torch.cuda.device_count():
                return None
            source = torch.empty(LINK_BYTES, dtype=torch.uint8, device=self._device)
            target = torch.empty(LINK_BYTES, dtype=torch.uint8, device=torch.device("cuda", peer))
            return max(_copy_rate(source, target) for _ in range(LINK_REPEATS))

        if not self._is_gpu:
            return None
        rate, _ = attempt(self._channel, copy)
        return self._channel.exchange(rate)[0]


class WrongResult(Exception):
    """A candidate's results are not those of the formula. Never leaves this package."""


def _copy_rate(source: torch.Tensor, target: torch.Tensor) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    target.copy_(source, non_blocking=True)
    end.record()
    torch.cuda.synchronize()
    return source.numel() / (start.elapsed_time(end) * 1e6)
