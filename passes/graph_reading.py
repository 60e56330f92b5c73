"""Reading ATen graphs: what a node holds, and seeing through ops that change nothing but the shape or the dtype.

Matching walks *forward* from a value to its readers. Between the ops of a pattern, views (which keep the last
dimension), copies and dtype casts may stand; `Step` records the ones passed, so that a rewrite can replay them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten
prims = torch.ops.prims

VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.expand.default,
        aten.alias.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.detach.default,
    }
)
CASTS = frozenset({prims.convert_element_type.default, aten._to_copy.default, aten.to.dtype})
SCALES = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default})
PARAMETER = "graphfuse_parameter"
"""In the meta of a graph's input: whether it is a parameter of the model."""

COPIES = frozenset({aten.copy.default})  # aten.copy_ writes to an input of the graph: a true reader


def value(node: object) -> torch.Tensor | None:
    """The fake tensor a node stands for; None for a node without one, or with several outputs."""
    val = node.meta.get("val") if isinstance(node, Node) else None
    return val if isinstance(val, torch.Tensor) else None


def is_call(node: object, *targets: object) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def argument(node: Node, name: str) -> Any:
    """An op's argument by its name in the schema, whether given by position, by name or not at all."""
    names, defaults = parameters(node.target)
    index = names.index(name)
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, defaults.get(name))


@functools.lru_cache(maxsize=1024)
def parameters(target: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names of an op's parameters, and the defaults of those that have one."""
    arguments = target._schema.arguments
    return tuple(a.name for a in arguments), {a.name: a.default_value for a in arguments if a.has_default_value()}


def same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two fake tensors are known to have equal shapes, symbols included."""
    return a.dim() == b.dim() and all(statically_known_true(x == y) for x, y in zip(a.shape, b.shape, strict=True))


def same_dim(x: object, y: object) -> bool:
    return bool(statically_known_true(x == y))


def widens(cast: Node) -> bool:
    """Whether a cast gives a dtype that holds every value of the one before, so that it rounds nothing."""
    before, after = value(cast.args[0]), value(cast)
    if before is None or after is None:
        return False
    return torch.promote_types(before.dtype, after.dtype) == after.dtype


def keeps_rows(node: Node) -> bool:
    """Whether a view keeps the last dimension and the number of elements, so that rows stay rows."""
    before, after = value(node.args[0]), value(node)
    if before is None or after is None or not before.dim() or not after.dim():
        return False
    if node.target is aten.expand.default:
        return same_shape(before, after)
    return same_dim(before.shape[-1], after.shape[-1])


@dataclass(frozen=True)
class Step:
    """A value reached from another one by views and casts: `node`, and the views passed on the way, in order."""

    node: Node
    views: tuple[Node, ...] = ()
    casts: tuple[Node, ...] = ()

    def through(self, user: Node) -> Step | None:
        """The step beyond `user`, if `user` is a view, a copy or a cast of this value."""
        if user.op != "call_function":
            return None
        if user.target in VIEWS and user.args[0] is self.node and keeps_rows(user):
            return replace(self, node=user, views=(*self.views, user))
        if user.target in CASTS and user.args[0] is self.node:
            before, after = value(self.node), value(user)
            if before is not None and after is not None and before.device != after.device:
                return None
            changes = before is None or after is None or before.dtype != after.dtype
            return replace(self, node=user, casts=(*self.casts, user) if changes else self.casts)
        if user.target in COPIES and len(user.args) > 1 and user.args[1] is self.node:
            # copy(destination, source): what in-place dist.all_reduce leaves behind
            before, after = value(self.node), value(user)
            if before is not None and after is not None and before.dtype == after.dtype and same_shape(before, after):
                return replace(self, node=user)
        return None


def reaches(start: Node) -> Iterator[Step]:
    """Every form of a value under views, copies and casts, itself first, in graph order."""
    pending = [Step(start)]
    while pending:
        step = pending.pop(0)
        yield step
        pending.extend(s for user in step.node.users if (s := step.through(user)) is not None)


def readers(start: Node) -> list[tuple[Step, Node]]:
    """Who truly reads a value: (the form it is read in, the reader) for each reader that is no view, copy or cast."""
    return [(step, user) for step in reaches(start) for user in step.node.users if step.through(user) is None]


def replay(views: tuple[Node, ...], start: Node) -> Node:
    """Apply recorded views to another value, at the graph's insertion point.

    A `view` becomes a `reshape`: the other value may have strides that no view of it fits.
    """
    current = start
    for view in views:
        graph, previous = start.graph, current
        current = graph.node_copy(view, lambda n, p=previous, v=view: p if n is v.args[0] else n)  # type: ignore[misc]
        if is_call(current, aten.view.default, aten._unsafe_view.default):
            current.target = aten.reshape.default
    return current


def is_parameter(node: object) -> bool:
    """Whether a value is an input of the graph, or a part of one, seen through views and casts."""
    while is_call(node, *VIEWS, *CASTS, aten.slice.Tensor, aten.select.int):
        node = node.args[0]  # type: ignore[attr-defined]
    return isinstance(node, Node) and node.op in ("placeholder", "get_attr")


_OURS = ("graphfuse.moe_experts", "graphfuse.fp8_linear", "graphfuse.linear")


def is_fresh_and_unshared(node: Node, reader: Node) -> bool:
    """Whether a value is memory of its own, made by a matrix product or an expert layer, that `reader` alone reads.

    Only ops that no later optimisation turns into a view of something else count.
    """
    while set(node.users) == {reader} and is_call(node, *VIEWS) and isinstance(node.args[0], Node):
        node, reader = node.args[0], node
    ours = node.op == "call_function" and str(node.target).startswith(_OURS)
    return set(node.users) == {reader} and (
        ours or is_call(node, aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
    )


def describe(node: Node) -> str:
    """An op's short name for reasons and reports: `mul`, `native_layer_norm`, `the graph's output`."""
    if node.op == "output":
        return "the model's output"
    if node.op == "call_function":
        target = node.target
        packet = getattr(target, "overloadpacket", None)
        name = getattr(packet, "__name__", None) or getattr(target, "__name__", str(target))
        return f"{name} ({node.name})"
    return node.name


def module_path(node: Node) -> str:
    """The path of the module a node was traced in (`model.layers.3.mlp.down_proj`); empty at the top."""
    return str(node.meta.get("graphfuse_path", ""))
