"""Recognise act(gate) * up behind the product of the first expert matrix, however it is spelled.

    gate_up [S, 2I] ─► gate, up [S, I] ─► clamps ─► act(gate) * up

Decomposition tables take activations apart, each torch version and device in a way of its own. So what stands between
the halves and the result is not compared op by op: it is computed, in float64 on a grid of values, and compared with
the formulas of `graphfuse::moe_experts`. Ops that work on elements one by one may stand there, and nothing else.

Legend: S rows (choices of tokens), I intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node

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
    found = _formula(ordered, halves)
    if isinstance(found, str):
        return found
    splits = {node.args[0] for node in halves if node.target is getitem}
    return GatedActivation(source, interleaved, *found, frozenset((*nodes, *halves, *splits)))  # type: ignore[arg-type]


def _half(node: Node) -> _Half | None:
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    if node.target is getitem:
        split = node.args[0]
        if not is_call(split, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default):
            return None
        source, pieces = split.args[0], split.meta.get("val")
        equal = isinstance(pieces, list | tuple) and len(pieces) == 2 and pieces[0].shape[-1] == pieces[1].shape[-1]
        on_columns = isinstance(source, Node) and _is_last(argument(split, "dim"), value(source))
        return _Half(source, node.args[1] == 1, False) if equal and on_columns else None  # type: ignore[arg-type]
    if not is_call(node, aten.slice.Tensor):
        return None
    source, before = node.args[0], value(node.args[0])
    if before is None or not _is_last(argument(node, "dim"), before) or not isinstance(before.shape[-1], int):
        return None
    columns = before.shape[-1]
    start, end, step = argument(node, "start") or 0, argument(node, "end"), argument(node, "step")
    end = columns if end is None else min(end, columns)
    spans = {(0, columns, 2): (False, True), (1, columns, 2): (True, True)}
    spans |= {(0, columns // 2, 1): (False, False), (columns // 2, columns, 1): (True, False)}
    kind = spans.get((start, end, step)) if columns % 2 == 0 else None
    return None if kind is None else _Half(source, *kind)


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


def _formula(nodes: list[Node], halves: dict[Node, _Half]) -> tuple[str, float | None] | str:
    """The name and limit of the one formula that gives what the nodes compute."""
    limits: list[float | None] = [None]
    limits += sorted({abs(float(n)) for node in nodes if is_call(node, *_CLAMPS) for n in _numbers(node)})
    with unset_fake_temporarily(), torch.no_grad():
        first, second = _grid([limit for limit in limits if limit is not None])
        try:
            got = _compute(nodes, {node: second if half.second else first for node, half in halves.items()})
        except (RuntimeError, TypeError, ValueError):
            return "its activation cannot be computed on its own"
        for name, limit, gate, up in _known(limits, first, second):
            if _equal(got, ACTIVATIONS[name](gate, up)):
                return name, limit
        if any(_equal(got, ACTIVATIONS[name](gate, up)) for name, _, gate, up in _known(limits, second, first)):
            return "the first half of its columns is not the gate but what the gate is multiplied with"
    return f"its activation is none of {', '.join(ACTIVATIONS)}"


def _known(limits: list[float | None], gate: Tensor, up: Tensor) -> Iterator[tuple[str, float | None, Tensor, Tensor]]:
    """The formulas to compare with: (name, limit, clamped gate, clamped up)."""
    for limit in limits:
        a = gate if limit is None else gate.clamp(max=limit)
        b = up if limit is None else up.clamp(min=-limit, max=limit)
        for name in ACTIVATIONS:
            yield name, limit, a, b


def _grid(limits: list[float]) -> tuple[Tensor, Tensor]:
    """Pairs of values, small and large, on both sides of every limit."""
    points = [0.0, *torch.linspace(-9.1, 9.3, 47, dtype=torch.float64).tolist(), -31.7, 29.3, -400.5, 400.5]
    points += [sign * factor * limit for limit in limits for sign in (-1, 1) for factor in (0.5, 0.999, 1.001, 2)]
    values = torch.tensor(points, dtype=torch.float64, device="cpu")
    return values.repeat_interleave(len(points)), values.repeat(len(points))


def _compute(nodes: list[Node], values: dict[Node, Tensor]) -> Tensor:
    for node in nodes:
        if node.target in CASTS:  # float64 throughout
            values[node] = values[node.args[0]]  # type: ignore[index]
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values[nodes[-1]]


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def _numbers(node: Node) -> list[float]:
    return [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, int | float)]
