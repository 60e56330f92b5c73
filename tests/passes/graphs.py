"""ATen graphs written by hand, for what no traced model shows: each node carries the fake tensor it stands for."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map

from graphfuse.gate import Decision, SizeRange
from graphfuse.passes.groups import Groups
from graphfuse.passes.rule import Context

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
HIDDEN, TOKENS = 64, 4


class Builder:
    """`b = Builder(); x = b.input(4, 64); b.output(b(aten.relu.default, x))` gives a graph module."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.graph, self.mode, self.dtype = Graph(), FakeTensorMode(), dtype

    def input(self, *shape: int) -> Node:
        node = self.graph.placeholder(f"arg{len(self.graph.nodes)}_1")
        with self.mode:
            node.meta["val"] = torch.empty(*shape, dtype=self.dtype)
        return node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        with self.mode:
            node.meta["val"] = target(*tree_map(_value, args), **tree_map(_value, kwargs))
        return node

    def all_reduce(self, x: Node, group_name: str) -> Node:
        return self(c10d.wait_tensor.default, self(c10d.all_reduce.default, x, "sum", group_name))

    def rms_norm(self, x: Node, weight: Node, eps: float = 1e-6) -> Node:
        f = self(torch.ops.prims.convert_element_type.default, x, torch.float32)
        mean = self(aten.mean.dim, self(aten.pow.Tensor_Scalar, f, 2), [-1], True)
        y = self(aten.mul.Tensor, f, self(aten.rsqrt.default, self(aten.add.Tensor, mean, eps)))
        return self(aten.mul.Tensor, weight, self(torch.ops.prims.convert_element_type.default, y, self.dtype))

    def output(self, *nodes: Node) -> GraphModule:
        self.graph.output(nodes)
        return GraphModule({}, self.graph)


def _value(arg: Any) -> Any:
    return arg.meta["val"] if isinstance(arg, Node) else arg


def flat_layers(num_layers: int, group_name: str) -> GraphModule:
    """A flat tensor-parallel model: norm → mm → all_reduce → add, `num_layers` times, and a final norm."""
    b = Builder()
    residual = b.input(TOKENS, HIDDEN)
    matrices = [b.input(HIDDEN, HIDDEN) for _ in range(num_layers)]
    weights = [b.input(HIDDEN) for _ in range(num_layers + 1)]
    for matrix, weight in zip(matrices, weights, strict=False):
        partial = b(aten.mm.default, b.rms_norm(residual, weight), matrix)
        residual = b(aten.add.Tensor, residual, b.all_reduce(partial, group_name))
    return b.output(b.rms_norm(residual, weights[-1]))


def context(group: Any) -> Context:
    """A context whose gate allows everything by the reference."""
    allowed = Decision(allowed=True, ranges=(SizeRange(None, "reference", None),), reasons=(), table=None)
    return Context(Groups.of(group), lambda _dtype, _hidden_size: allowed)
