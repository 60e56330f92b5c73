"""Chrome traces as torch.profiler writes them, in little."""

from __future__ import annotations

from typing import Any

from graphfuse.profiling.attribution import PHASE
from graphfuse.profiling.labels import Label

MM = Label("layers.0.mlp.down_proj", "dense GEMM", "aten.mm")
SUM = Label("layers.0.mlp.down_proj", "reduction", "graphfuse.all_reduce_add_rms_norm")


class Trace:
    """Events of one host thread and of the streams that it launches on; times in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]

    def add(self, cat: str, name: str, start: float, end: float, tid: int = 7, **args: Any) -> Trace:
        event = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": end - start}
        self.events.append({**event, "args": args})
        return self

    def phase(self, name: str, start: float, end: float) -> Trace:
        return self.add("user_annotation", PHASE + name, start, end)

    def range(self, label: Label, start: float, end: float) -> Trace:
        return self.add("user_annotation", label.text, start, end)

    def op(self, name: str, start: float, end: float) -> Trace:
        return self.add("cpu_op", name, start, end)

    def kernel(self, name: str, launched: float, start: float, end: float, stream: int = 20, tid: int = 7) -> Trace:
        number = len(self.events)
        self.add("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, tid, correlation=number)
        return self.add("kernel", name, start, end, stream, correlation=number)

    @property
    def json(self) -> dict[str, Any]:
        return {"schemaVersion": 1, "traceEvents": self.events}
