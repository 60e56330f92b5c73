"""Put the bodies of sealed regions back: the flat ATen graph that passes work on (see `graphfuse/regions.py`)."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from graphfuse.regions import OPEN_CHAINS, Call, Outer, RegionsUnsupported, Result, memory


def inline(top: GraphModule) -> GraphModule:
    """The flat graph: every region op of an ATen graph replaced by the bodies it stands for."""
    return _Inliner(top).run()


class _Inliner:
    """Rebuilds the top graph node by node, putting bodies in place of region ops.

    `current` maps an input of the whole graph that some body wrote to, to its newest value, so that later readers see
    the write, and the end of the graph can store it. `views` maps nodes to the input whose memory they show: they
    would not see the write, so a graph that reads them afterwards is not inlined.
    """

    def __init__(self, top: GraphModule) -> None:
        self._top = top
        self._graph = Graph()
        self._env: dict[Node, Any] = {}
        self._results: dict[Node, list[Any]] = {}
        self._current: dict[Node, Node] = {}
        self._views: dict[Node, Node] = {}
        self._inputs: dict[int, list[Node]] = defaultdict(list)  # by the memory they show

    def run(self) -> GraphModule:
        for node in self._top.graph.nodes:
            if node.target is torch.ops.graphfuse._regions.default:
                self._results[node] = self._inline_chain(node)
            elif node.target is operator.getitem and node.args[0] in self._results:
                self._env[node] = self._results[node.args[0]][node.args[1]]
            elif node.op == "output":
                for base, newest in self._current.items():
                    written = self._graph.call_function(torch.ops.aten.copy_.default, (base, newest))
                    written.meta = {"val": base.meta["val"]}
                self._graph.node_copy(node, self._lookup).meta = dict(node.meta)
            else:
                if node.target is torch.ops.aten.copy_.default and self._env[node.args[0]] in self._current:
                    raise RegionsUnsupported("a tensor is written to both inside a layer and outside of it")
                copy = self._env[node] = self._graph.node_copy(node, self._lookup)
                copy.meta = dict(node.meta)
                self._note_memory(copy)
        with _use_lazy_graph_module(True):  # passes change the graph before anybody runs it
            return _make_graph_module(self._top, self._graph)

    def _lookup(self, node: Node) -> Any:
        return self._newest(self._env[node])

    def _newest(self, found: Any) -> Any:
        if not isinstance(found, Node):
            return found
        if self._views.get(found) in self._current:
            raise RegionsUnsupported("a view of a tensor that a layer writes to is read behind the layer")
        return self._current.get(found, found)

    def _note_memory(self, node: Node) -> None:
        key = memory(node.meta.get("val"))
        if key is None:
            return
        if node.op == "placeholder":
            self._inputs[key].append(node)
        elif key in self._inputs and self._inputs[key][0] not in self._current:
            self._views[node] = self._inputs[key][0]

    def _write(self, base: Any, newest: Node) -> None:
        """A body has written to one of its operands."""
        if not (isinstance(base, Node) and base.op == "placeholder"):
            raise RegionsUnsupported("a layer writes to a tensor that is no input of the model")
        if len(self._inputs[memory(base.meta["val"])]) > 1:  # type: ignore[index]
            raise RegionsUnsupported("a layer writes to a tensor that shares memory with another input")
        self._current[base] = newest

    def _inline_chain(self, op: Node) -> list[Any]:
        tensors, sizes, key = op.args
        outer = [self._env[o] if isinstance(o, Node) else o for o in (*tensors, *sizes)]  # type: ignore[misc]
        results: list[list[Any]] = []
        for call in OPEN_CHAINS[key].calls:  # type: ignore[index]
            operands = []
            for operand in call.operands:
                if isinstance(operand, Outer):
                    operands.append(outer[operand.index])
                else:
                    operands.append(results[operand.call][operand.index] if isinstance(operand, Result) else operand)
            results.append(self._inline_call(call, operands))
        last = OPEN_CHAINS[key].calls[-1].region.outputs  # type: ignore[index]
        return [value for value, recorded in zip(results[-1], last, strict=True) if isinstance(recorded, Tensor)]

    def _inline_call(self, call: Call, operands: list[Any]) -> list[Any]:
        region = call.region
        assert region.body is not None
        placeholders = [n for n in region.body.nodes if n.op == "placeholder"]
        if len(placeholders) != len(operands):
            raise RegionsUnsupported("a layer's inputs change in number while it is traced")
        given = dict(zip(placeholders, operands, strict=True))
        env = {p: self._newest(o) for p, o in given.items()}
        move = region.mover(call.stack)
        for node in region.body.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                (outputs,) = node.args
                return [env[o] if isinstance(o, Node) else o for o in outputs[: len(region.outputs)]]
            if node.op == "get_attr":
                raise RegionsUnsupported("a layer holds constants that are no parameters or buffers")
            if node.target is torch.ops.aten.copy_.default and node.args[0] in given:
                env[node.args[0]] = env[node.args[1]]
                self._write(given[node.args[0]], env[node.args[1]])
                continue
            copy = self._graph.node_copy(node, env.__getitem__)
            copy.meta = dict(node.meta)
            copy.meta["nn_module_stack"] = move(node.meta.get("nn_module_stack"))
            env[node] = copy
        raise AssertionError("a graph without output")
