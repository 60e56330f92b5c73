"""Draw what stands around a reduction, for the report page: what makes its summands, and who reads the sum.

    mm ─► all_reduce ─► add ─► rms_norm ─► mm ×3        one box an op; views, casts and waits are not drawn
              residual ─┘  └─► add

Forward it follows sums, products and norms, a few ops far; an RMSNorm is one box, however it is written.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
from torch.fx import Graph, Node

from graphfuse.passes.graph_reading import CASTS, COPIES, VIEWS, aten, describe, is_call, is_parameter, reaches, readers
from graphfuse.passes.reductions import all_reduce, c10d
from graphfuse.passes.rms_norm import RMSNorm, find_rms_norm
from graphfuse.passes.rule import Rule
from graphfuse.report_graph import Box, SmallGraph, Surroundings

MAX_BOXES = 12
MAX_NODES = 200  # of those looked at; a value with more readers is not worth its picture
MAX_STEPS = 3
_FOLLOWED = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)


def before_passes(node: Node) -> Surroundings:
    """The surroundings of an all_reduce in the graph as it came in."""
    drawing = _Drawing()
    start = drawing.box(node, "all_reduce", "reduction")
    drawing.producers(start, node.args[:1])
    for wait in node.users:
        drawing.follow(start, wait, "", MAX_STEPS)
    example = node.meta.get("val")
    tensor = example[0] if isinstance(example, (list, tuple)) and example else example
    dtype = str(tensor.dtype).removeprefix("torch.") if isinstance(tensor, torch.Tensor) else ""
    return Surroundings(dtype, _shape(example), drawing.graph())


def after_passes(fused: Node) -> SmallGraph:
    """The surroundings of the op that a reduction became."""
    drawing = _Drawing()
    start = drawing.box(fused, _name(fused), "fused")
    drawing.producers(start, fused.args)
    for user in list(fused.users):
        if is_call(user, operator.getitem):
            drawing.follow(start, user, _result(fused, user.args[1]), 1)
        else:
            drawing.reader(start, user, "", 1)
    return drawing.graph()


def emitted(graph: Graph, rule: Rule) -> set[Node]:
    """The nodes of a graph that a rule of reductions has put there."""
    ops: list[Any] = list(rule.reduces)
    return {node for op in ops for node in graph.find_nodes(op="call_function", target=op, sort=False)}


class _Drawing:
    def __init__(self) -> None:
        self._boxes: dict[Node, int] = {}
        self._labels: list[tuple[str, str, str]] = []
        self._edges: dict[tuple[int, int], str] = {}

    def box(self, node: Node, label: str, role: str = "other") -> int:
        if node not in self._boxes:
            self._boxes[node] = len(self._labels)
            self._labels.append((label, _shape(node.meta.get("val")), role))
        return self._boxes[node]

    def producers(self, index: int, args: object) -> None:
        """What makes the operands of a box; parameters are not drawn."""
        operands = [a for a in args if isinstance(a, Node) and not is_parameter(a)]  # type: ignore[attr-defined]
        for operand in operands:
            maker, name = _maker(operand)
            self._edge(self.box(maker, *_looks(maker)), index, name)

    def follow(self, index: int, value: Node, name: str, steps: int) -> None:
        """Everyone who reads a value that comes out of a box."""
        norm = find_rms_norm(value)
        inside = _inside(value, norm) if isinstance(norm, RMSNorm) else set()
        if isinstance(norm, RMSNorm):
            known = norm.output in self._boxes
            reached = self.box(norm.output, "rms_norm", "norm")
            self._edge(index, reached, name)
            if not known:
                for _, reader in readers(norm.output):
                    self.reader(reached, reader, "", 0)
        for _, reader in readers(value):
            if reader not in inside:
                self.reader(index, reader, name, 0 if inside else steps)  # behind the norm other sites begin

    def reader(self, index: int, node: Node, name: str, steps: int) -> None:
        if len(self._labels) >= MAX_NODES and node not in self._boxes:
            return
        known = node in self._boxes
        reached = self.box(node, *_looks(node))
        self._edge(index, reached, name)
        if known or steps == 0 or not is_call(node, *_FOLLOWED):
            return
        others = [a for a in node.args if isinstance(a, Node) and _maker(a)[0] not in self._boxes]
        self.producers(reached, others)
        self.follow(reached, node, "", steps - 1)

    def _edge(self, start: int, end: int, name: str) -> None:
        if start != end:
            self._edges.setdefault((start, end), name)

    def graph(self) -> SmallGraph:
        """The first boxes in graph order. Ops that nothing drawn reads, alike and with the same inputs, are one."""
        leaves = set(self._boxes.values()) - {start for start, _ in self._edges}
        merged: dict[tuple, int] = {}
        kept: dict[int, int] = {}
        count: Counter[int] = Counter()
        for node in sorted(self._boxes):
            index = self._boxes[node]
            inputs = tuple(sorted((s, name) for (s, e), name in self._edges.items() if e == index))
            key = (self._labels[index][0], inputs) if index in leaves and inputs else (index,)
            kept[index] = merged.setdefault(key, len(merged))
            count[kept[index]] += 1
        boxes: dict[int, Box] = {}
        for old, new in kept.items():
            boxes.setdefault(new, Box(*self._labels[old], count=count[new]))
        edges = {(kept[s], kept[e]): name for (s, e), name in self._edges.items()}
        return SmallGraph(
            tuple(boxes[index] for index in range(min(len(boxes), MAX_BOXES))),
            tuple((*ends, name) for ends, name in edges.items() if max(ends) < MAX_BOXES),
            start=kept[0],
        )


def _maker(node: Node) -> tuple[Node, str]:
    """The op that makes a value, seen through views, casts, copies and waits, and which of its results it is."""
    name = ""
    while node.op == "call_function":
        if node.target in COPIES and len(node.args) > 1:
            source = node.args[1]
        elif node.target in (*VIEWS, *CASTS, operator.getitem, c10d.wait_tensor.default):
            source = node.args[0]
            if node.target is operator.getitem and isinstance(source, Node):
                name = _result(source, node.args[1])
        else:
            break
        if not isinstance(source, Node):
            break
        node = source
    return node, name


def _looks(node: Node) -> tuple[str, str]:
    if all_reduce(node):
        return "all_reduce", "reduction"
    if getattr(node.target, "namespace", None) == "graphfuse" and "all_reduce" in _name(node):
        return _name(node), "fused"
    return _name(node), "add" if is_call(node, aten.add.Tensor) else "other"


def _name(node: Node) -> str:
    if node.op == "placeholder":
        return "input"
    return describe(node).split(" (")[0] if node.op == "call_function" else describe(node)


def _result(node: Node, index: object) -> str:
    """What the results of our fused ops are."""
    if getattr(node.target, "namespace", None) != "graphfuse":
        return ""
    second = "residual" if "_add_" in _name(node) else "reduced"
    return {0: "normed", 1: second}.get(index, "")  # type: ignore[call-overload]


def _inside(value: Node, norm: RMSNorm) -> set[Node]:
    """The ops between a value and the output of its norm, which are drawn as one."""
    forms = {step.node for step in reaches(value)}
    found, pending = set(), [norm.output]
    while pending:
        node = pending.pop()
        if node not in found and node not in forms and node.op == "call_function":
            found.add(node)
            pending += node.all_input_nodes
    return found


def _shape(example: object) -> str:
    """ "[T, 4096]": T stands for the one dimension that varies, B and S for the first and second of two."""
    if isinstance(example, (list, tuple)):
        example = next((part for part in example if isinstance(part, torch.Tensor)), None)
    if not isinstance(example, torch.Tensor):
        return ""
    varying = sum(not isinstance(size, int) for size in example.shape)
    letters = iter("T" if varying == 1 else "BSUVWXYZ")
    return "[" + ", ".join(str(size) if isinstance(size, int) else next(letters, "?") for size in example.shape) + "]"
