"""Profile a model, fused and unfused: one run under ranges says what each kernel is, and on GPUs a second one, of CUDA
graphs, how long it takes.

Ranges and the line tracer behind them slow the host down, so that a GPU idles between kernels. Therefore times on GPUs
come from a run without them, in which steps are replays of a CUDA graph, as the engine runs them, and labels from the
run under ranges (`attribution.with_labels_of`). Where a step cannot be captured, it runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity

from graphfuse.config import FuseConfig
from graphfuse.executors import resolve_executor
from graphfuse.probe import version_of
from graphfuse.profiling.attribution import PHASE, Work, spent, with_labels_of, work_of
from graphfuse.profiling.calls import PHASES, PREFILL, STEP, Calls
from graphfuse.profiling.ranges import LabelledModel
from graphfuse.profiling.result import FUSED, UNFUSED, VARIANTS, Phase, Profile
from graphfuse.profiling.trace_file import trace_of

WARM_UP = 3
GRAPHS, PLAIN, UNDER_RANGES = "steps as CUDA graphs", "no CUDA graphs", "timed under ranges"


@dataclass(frozen=True)
class Plan:
    """What is run: a prefill of `[batch, input_len]`, `steps` steps, and each prefill `prefills` times."""

    batch: int = 1
    input_len: int = 128
    steps: int = 8
    prefills: int = 2

    def calls(self, phase: str) -> int:
        return self.prefills if phase == PREFILL else self.steps


@dataclass
class Variant:
    """One run of the plan."""

    work: list[Work]
    totals: Mapping[str, int]
    trace: dict[str, Any]
    """As torch wrote it, with the ranges."""

    timed: str
    notes: list[str] = field(default_factory=list)


def measure(
    model: nn.Module, name: str, group: dist.ProcessGroup | None, device: torch.device, plan: Plan, config: FuseConfig
) -> tuple[Profile, dict[str, dict[str, Any]]]:
    """The profile of this rank, and the trace of each variant. Every rank of the group must call it."""
    variants = {}
    for variant in VARIANTS:
        chosen = replace(config, fusion="off") if variant == UNFUSED else config
        variants[variant] = _run(model, group, device, plan, chosen)
    phases = {
        phase: {v: Phase.of(spent(variants[v].work, phase), plan.calls(phase)) for v in VARIANTS} for phase in PHASES
    }
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    parameter: torch.Tensor = next(p for p in model.parameters() if p.dim() > 1)
    profile = Profile(
        model=name,
        device=kind,
        ranks=1 if group is None else group.size(),
        batch=plan.batch,
        input_len=plan.input_len,
        steps=plan.steps,
        dtype=str(getattr(model, "dtype", parameter.dtype)).removeprefix("torch."),
        executor=resolve_executor(config.executor, device),
        timed=variants[FUSED].timed,
        date=date.today().isoformat(),
        versions={"torch": str(torch.__version__), "triton": version_of("triton") or ""},
        all_reduces={v: variants[v].totals for v in VARIANTS},
        phases=phases,
        notes=[f"{v}: {note}" for v in VARIANTS for note in variants[v].notes],
    )
    return profile, {v: variants[v].trace for v in VARIANTS}


@torch.no_grad()
def _run(
    model: nn.Module, group: dist.ProcessGroup | None, device: torch.device, plan: Plan, config: FuseConfig
) -> Variant:
    with LabelledModel(model, group, config) as compiled:
        calls = Calls(compiled, model, plan.batch, plan.input_len, device)
        for phase in PHASES:
            for _ in range(WARM_UP):
                calls.run(phase)
        trace = _traced(calls.run, plan, device, compiled.ranges)
        found = Variant(work_of(trace), compiled.report.totals, trace, UNDER_RANGES, list(compiled.report.notes))
        if device.type == "cuda":
            run, found.timed = _with_graph(calls, device)
            found.work = with_labels_of(work_of(_traced(run, plan, device)), found.work)
        return found


def _traced(
    run: Callable[[str], None],
    plan: Plan,
    device: torch.device,
    context: Callable[[], AbstractContextManager] = nullcontext,
) -> dict[str, Any]:
    """The trace of the plan's calls, as torch writes it. Each runs once before, so that nothing is met for the first
    time."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with context():
        for phase in PHASES:
            run(phase)
        _settle(device)
        with torch.profiler.profile(activities=activities) as profiler:
            for phase in PHASES:
                with record_function(PHASE + phase):
                    for _ in range(plan.calls(phase)):
                        run(phase)
                    _settle(device)
    return trace_of(profiler)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _with_graph(calls: Calls, device: torch.device) -> tuple[Callable[[str], None], str]:
    """Runs a call, a step by replaying its CUDA graph if one can be captured. And which of these it is."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            calls.run(STEP)
    except RuntimeError:  # an op of the model that waits for the GPU, for one
        _settle(device)
        return calls.run, PLAIN
    return lambda phase: graph.replay() if phase == STEP else calls.run(phase), GRAPHS
