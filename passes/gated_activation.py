"""Recognise act(gate) * up behind the product of the first expert matrix, however it is spelled.

    gate_up [S, 2I] ─► gate, up [S, I] ─► clamps ─► act(gate) * up

Decomposition tables take activations apart, each torch version and device in a way of its own. So what stands between
the halves and the result is not compared op by op: it is computed, and the values are compared with those of the
formulas of `graphfuse::moe_experts`. Ops that work on elements one by one may stand there, and nothing else.

Legend: S rows (choices of tokens), I intermediate.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from graphfuse.ops.moe_formulas import identify
from graphfuse.ops.moe_reference import ACTIVATIONS
from graphfuse.passes.graph_reading import CASTS, argument, aten, describe, is_call, same_dim, value

_CLAMPS = (aten.clamp_max.default, aten.clamp_min.default, aten.clamp.default)


@dataclass(frozen=True)
class GatedActivation:
    source: Node
    """The rows `[S, 2I]` that are divided into gates and ups."""

    interleaved: bool
    name: str
    """A key of `ACTIVATIONS`."""

    limit: float | None
    nodes: frozenset[Node]
    """What stands between the source and the result, the result included."""


@dataclass(frozen=True)
class _Half:
    """One half of the columns of a source: the first or second I of them, or every other one."""

    source: Node
    second: bool
    interleaved: bool


def read_gated_activation(result: Node, dtype: torch.dtype) -> GatedActivation | str:
    """What gives the rows `result` `[S, I]` in no lower precision than `dtype`, or why it is nothing that is known."""
    halves: dict[Node, _Half] = {}
    nodes: dict[Node, None] = {}
    pending = [result]
    while pending:
        node = pending.pop()
        if node in nodes or node in halves:
            continue
        half = _half(node)
        if half is not None:
            halves[node] = half
            continue
        why_not = _why_not_elementwise(node, dtype)
        if why_not is not None:
            return why_not
        nodes[node] = None
        pending += node.all_input_nodes
    kinds = set(halves.values())
    if len(kinds) != 2 or len({(half.source, half.interleaved) for half in kinds}) != 1:
        return "its activation is not computed from the two halves of one product's columns"
    source, interleaved = next((half.source, half.interleaved) for half in kinds)
    ordered = sorted(nodes)  # in the order of the graph
    clamps = [number for node in ordered if is_call(node, *_CLAMPS) for number in _numbers(node)]
    formula = identify(lambda gate, up: _compute(ordered, halves, gate, up), clamps)
    if formula is None:
        return f"its activation is none of {', '.join(ACTIVATIONS)}"
    if formula.swapped:
        return "the first half of its columns is not the gate but what the gate is multiplied with"
    between = [n for half in halves for n in _down_to(source, half)]
    return GatedActivation(source, interleaved, formula.name, formula.limit, frozenset((*nodes, *between)))


def _half(node: Node) -> _Half | None:
    if is_call(node, getitem):
        split: Any = node.args[0]
        if not is_call(split, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default):
            return None
        pieces = split.meta.get("val")
        equal = isinstance(pieces, list | tuple) and len(pieces) == 2 and pieces[0].shape[-1] == pieces[1].shape[-1]
        on_columns = _is_last(argument(split, "dim"), value(split.args[0]))
        return _Half(_whole(split.args[0]), bool(node.args[1] == 1), False) if equal and on_columns else None
    if not is_call(node, aten.slice.Tensor):
        return None
    before = value(node.args[0])
    if before is None or not _is_last(argument(node, "dim"), before) or not isinstance(before.shape[-1], int):
        return None
    columns = before.shape[-1]
    start, end, step = argument(node, "start") or 0, argument(node, "end"), argument(node, "step")
    end = columns if end is None else min(end, columns)
    spans = {(0, columns, 2): (False, True), (1, columns, 2): (True, True)}
    spans |= {(0, columns // 2, 1): (False, False), (columns // 2, columns, 1): (True, False)}
    kind = spans.get((start, end, step)) if columns % 2 == 0 else None
    return None if kind is None else _Half(_whole(node.args[0]), *kind)


def _whole(node: Any) -> Node:
    """A value before slices that leave nothing out, as `x[:, :n]` has them."""
    while (
        is_call(node, aten.slice.Tensor)
        and not argument(node, "start")
        and argument(node, "end") in (None, sys.maxsize)
        and argument(node, "step") == 1
    ):
        node = node.args[0]
    return node


def _down_to(source: Node, half: Any) -> Iterator[Node]:
    """A half, and what stands between it and the source."""
    while half is not source:
        yield half
        half = half.args[0]


def _is_last(dim: Any, tensor: Tensor | None) -> bool:
    return tensor is not None and isinstance(dim, int) and dim % tensor.dim() == tensor.dim() - 1


def _why_not_elementwise(node: Node, dtype: torch.dtype) -> str | None:
    tensor = value(node)
    target = node.target
    if node.op != "call_function" or tensor is None or not isinstance(target, torch._ops.OpOverload):
        return f"its activation reads something else than the first product: {describe(node)}"
    if torch.Tag.pointwise not in target.tags and target not in CASTS:
        return f"its activation holds {describe(node)}, which does not work on elements one by one"
    if torch.promote_types(tensor.dtype, dtype) != tensor.dtype:
        return f"its activation is rounded to {str(tensor.dtype).removeprefix('torch.')} in {describe(node)}"
    rows = next((value(n) for n in node.all_input_nodes if value(n) is not None), None)
    if rows is None or rows.dim() != tensor.dim() or not same_dim(rows.shape[-1], tensor.shape[-1]):
        return f"its activation is broadcast in {describe(node)}"
    return None


def _compute(nodes: list[Node], halves: dict[Node, _Half], gate: Tensor, up: Tensor) -> Tensor:
    """What the nodes, in order, make of values for the halves; in the values' dtype, whatever they cast to."""
    values = {node: up if half.second else gate for node, half in halves.items()}
    for node in nodes:
        if node.target in CASTS:
            values[node] = values[node.args[0]]  # type: ignore[index]
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values[nodes[-1]]


def _numbers(node: Node) -> list[float]:
    return [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, int | float)]
