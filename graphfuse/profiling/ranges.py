"""A compiled model that names its work while torch.profiler looks.

Eager executor: the graph runs node by node, each under a range. Inductor: each node carries the number of its label in
its stack trace, which Inductor passes on from node to kernel (its provenance tracking). A comment in front of each
kernel's call in the generated code names the kernel and a handle, and a line tracer (`sys.settrace`) opens the range of
that handle as the code runs. Nothing of Inductor is changed, and the kernels are those of an ordinary run.

Layers that were outlined (`passes/outline.py`) are one function of the generated code, called for each layer. What its
nodes are called in the k-th layer is known from the graph, and which call it is from counting.
"""

from __future__ import annotations

import json
import linecache
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor.runtime.runtime_utils import cache_dir
from torch.autograd.profiler import record_function
from torch.fx import GraphModule, Interpreter, Node

from graphfuse.backend import Session
from graphfuse.compiler import CompiledModel
from graphfuse.executors import compile_with_inductor, run_eagerly
from graphfuse.passes.outline import CHUNK
from graphfuse.profiling.labels import Label, label_graph, label_of_kernel

_MARK = "graphfuse label "
_HANDLE = re.compile(r"# \[Provenance debug handles\] (\S+:\d+)")
_SUBGRAPH = re.compile(r"# subgraph: ")


_PROVENANCE = {"trace.provenance_tracking_level": 2, "fx_graph_cache": False, "fx_graph_remote_cache": False}
"""A graph from a cache would carry another run's numbers."""


@dataclass
class _Switch:
    """Whether work is labelled now. Apart from the session, which compiled code must not keep alive."""

    on: bool = False


class LabelledSession(Session):
    """A session that labels the graphs it compiles."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._switch = _Switch()
        self._graphs: list[_Labels] = []

    @contextmanager
    def labelled(self) -> Iterator[None]:
        self._switch.on = True
        try:
            with lines_traced(self._graphs) if any(g.handles for g in self._graphs) else nullcontext():
                yield
        finally:
            self._switch.on = False

    def _execute(self, module: GraphModule, inputs: Sequence[Any], device: torch.device) -> Callable:
        labels = label_graph(module.graph)
        for number, node in enumerate(labels):
            node.meta["stack_trace"] = f"{_MARK}{number}"
        self._graphs.append(_Labels(list(labels.values())))
        return super()._execute(module, inputs, device)

    def _eagerly(self, module: GraphModule, inputs: Sequence[Any]) -> Callable:
        plain, labels, switch = run_eagerly(module, inputs), self._graphs[-1].labels, self._switch
        by_node = {node: labels[number] for node in module.graph.nodes if (number := _number(node)) is not None}
        named = _Named(module, by_node)

        def run(arguments: list[Any]) -> Any:
            if not switch.on:
                return plain(arguments)
            given = list(arguments)
            arguments.clear()
            return named.run(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _by_inductor(self, module: GraphModule, inputs: Sequence[Any]) -> Callable:
        graph = self._graphs[-1]
        graph.read_outlined(module)
        with inductor_config.patch(_PROVENANCE):
            compiled = compile_with_inductor(module, inputs, self.mode)
        graph.handles = json.loads(getattr(compiled, "inductor_provenance_stack_traces_str", None) or "{}")
        return compiled


class LabelledModel(CompiledModel):
    """`CompiledModel` whose work runs under ranges inside `with model.ranges():`, and as usual outside."""

    _session_type = LabelledSession

    def ranges(self) -> AbstractContextManager[None]:
        """A context in which calls of the model are labelled. Slower: Python looks at every line."""
        assert isinstance(self._session, LabelledSession)
        return self._session.labelled()


def _number(node: Node) -> int | None:
    return _read_number(str(node.meta.get("stack_trace", "")))


def _read_number(text: str) -> int | None:
    tail = text.removeprefix(_MARK)
    return int(tail) if tail != text and tail.isdecimal() else None


class _Named(Interpreter):
    """Runs a graph node by node, each under the range of its label."""

    def __init__(self, module: GraphModule, labels: dict[Node, Label]) -> None:
        super().__init__(module)
        self._labels = labels

    def run_node(self, n: Node) -> Any:
        label = self._labels.get(n)
        if label is None:
            return super().run_node(n)
        with record_function(label.text):
            return super().run_node(n)


@dataclass
class _Labels:
    """The labels of one compiled graph."""

    labels: list[Label]
    """By number."""

    handles: dict[str, list[str]] = field(default_factory=dict)
    """Of each kernel of Inductor's, "name:handle": the stack traces of its nodes."""

    outlined: dict[str, list[list[int]]] = field(default_factory=dict)
    """Of each outlined function, by call: the numbers of the nodes that it stands for, in order."""

    def read_outlined(self, module: GraphModule) -> None:
        for node in module.graph.nodes:
            if CHUNK in node.meta:
                numbers = [number for trace in node.meta[CHUNK] if (number := _read_number(str(trace))) is not None]
                self.outlined.setdefault(str(node.args[1]), []).append(numbers)

    def of_kernel(self, key: str, function: str, call: int) -> Label | None:
        """The label of a kernel in the call-th call of a function of the generated code."""
        numbers = [number for trace in self.handles.get(key, ()) if (number := _read_number(trace)) is not None]
        calls = self.outlined.get(function)
        if calls:
            # Inductor also names nodes outside of the function, whose results are handed in.
            place = {number: at for at, number in enumerate(calls[0])}
            own = [place[number] for number in numbers if number in place]
            now = calls[min(call, len(calls) - 1)]
            numbers = [now[at] for at in own if at < len(now)] or numbers
        else:
            inside = {number for calls in self.outlined.values() for number in calls[0]}
            numbers = [number for number in numbers if number not in inside] or numbers
        return label_of_kernel(key.rpartition(":")[0], [self.labels[number] for number in numbers])


# --- ranges around the lines of generated code -----------------------------------------------------------------------


_ENTRY = "call"
"""What the function that runs a whole graph is called."""


@dataclass(frozen=True)
class _Plan:
    """One function of generated code: which kernel each of its lines belongs to, by the line's number."""

    graph: _Labels
    name: str
    kernels: dict[int, str | None]


class _Tracer:
    """Opens and closes ranges as lines of generated code are reached."""

    def __init__(self, graphs: Sequence[_Labels]) -> None:
        self._graphs = graphs
        self._folder = cache_dir()
        self._plans: dict[CodeType, _Plan | None] = {}
        self._texts: dict[tuple[int, str, int], str | None] = {}
        self._calls: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Callable | None:
        code = frame.f_code
        plan = self._plans.get(code, False)
        if plan is False:
            plan = self._plans[code] = self._plan(code)
        if not isinstance(plan, _Plan):
            return None
        if code.co_name == _ENTRY:
            self._calls.clear()
        call = self._calls[plan.name]
        self._calls[plan.name] += 1
        current: str | None = None
        opened: record_function | None = None

        def line(frame: FrameType, event: str, _argument: Any) -> Callable:
            nonlocal current, opened
            kernel = plan.kernels.get(frame.f_lineno) if event == "line" else None
            if event in ("line", "return") and kernel != current:
                if opened is not None:
                    opened.__exit__(None, None, None)
                    opened = None
                text = kernel and self._text(plan, kernel, call)
                if text:
                    opened = record_function(text)
                    opened.__enter__()
                current = kernel
            return line

        return line

    def _text(self, plan: _Plan, kernel: str, call: int) -> str | None:
        key = (id(plan), kernel, call)
        if key not in self._texts:
            label = plan.graph.of_kernel(kernel, plan.name, call)
            self._texts[key] = None if label is None else label.text
        return self._texts[key]

    def _plan(self, code: CodeType) -> _Plan | None:
        if not code.co_filename.startswith(self._folder):
            return None
        lines = linecache.getlines(code.co_filename)
        kernels: dict[int, str | None] = {}
        current: str | None = None
        last = max((number for *_, number in code.co_lines() if number), default=0)
        for number in range(code.co_firstlineno, last + 1):
            text = lines[number - 1] if number <= len(lines) else ""
            if found := _HANDLE.search(text):
                current = found[1]
            elif _SUBGRAPH.search(text):
                current = None
            kernels[number] = current
        used = {kernel for kernel in kernels.values() if kernel}
        graph = next((graph for graph in self._graphs if used <= graph.handles.keys()), None)
        return _Plan(graph, code.co_name, kernels) if used and graph else self._call_only(code, lines)

    def _call_only(self, code: CodeType, lines: list[str]) -> _Plan | None:
        """The entry of a graph that only calls others: it is where counting starts."""
        if code.co_name == _ENTRY and self._graphs and any("Provenance debug handles" in line for line in lines):
            return _Plan(self._graphs[0], code.co_name, {})
        return None


@contextmanager
def lines_traced(graphs: Sequence[_Labels]) -> Iterator[None]:
    """While open, kernels of these graphs run under ranges in this thread. A debugger's tracer is back afterwards."""
    before = sys.gettrace()
    sys.settrace(_Tracer(graphs))
    try:
        yield
    finally:
        sys.settrace(before)
