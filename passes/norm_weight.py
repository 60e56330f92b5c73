"""The weight of a norm: the vector it multiplies by, and the parameter and constant that vector is made of.

    w ─► [cast f32] ─► [+ 1] ─► [view] ─► the vector          read as (w, 1.0)

Only steps that round nothing are seen through, so that float(w) + bias *is* the vector: a `w + 1` in bf16 rounds, and
is itself the weight, with bias 0; so is an fp32 weight's cast to bf16.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from graphfuse.passes.graph_reading import CASTS, VIEWS, aten, is_call, keeps_rows, same_dim, value, widens

_WIDE = (torch.float32, torch.float64)


def weight_operand(node: Node, x: Node, size: object) -> Node | None:
    """The vector when `node` multiplies x [..., H] by one over the last dimension: [H] or [1, ..., H]."""
    if not is_call(node, aten.mul.Tensor) or x not in node.args:
        return None
    other = node.args[1] if node.args[0] is x else node.args[0]
    w = value(other)
    if w is None or not w.dim() or not same_dim(w.shape[-1], size):
        return None
    return other if all(same_dim(s, 1) for s in w.shape[:-1]) else None  # type: ignore[return-value]


def plain_weight(vector: Node, dtype: torch.dtype, size: object) -> tuple[Node, float]:
    """(w, bias) with vector == w + bias, where w is a vector [H] of `dtype`, as near to a parameter as there is one.

    Where there is none, the node where the search ended, for the reason of the decline.
    """
    node, bias = vector, 0.0
    found: tuple[Node, float] | None = None
    while True:
        val = value(node)
        if val is not None and val.dtype == dtype and val.dim() == 1 and same_dim(val.shape[0], size):
            found = node, bias
        source = _exact_source(node)
        if source is None:
            return found or (node, bias)
        node, bias = source[0], bias + source[1]


def _exact_source(node: Node) -> tuple[Node, float] | None:
    """(source, constant) when a node is its source, plus a constant, rounded no more than a float32 sum is."""
    if node.op != "call_function":
        return None
    if node.target in VIEWS:
        return (node.args[0], 0.0) if keeps_rows(node) else None  # type: ignore[return-value]
    if node.target in CASTS:
        return (node.args[0], 0.0) if widens(node) else None  # type: ignore[return-value]
    val = value(node)
    if not is_call(node, aten.add.Tensor, aten.add.Scalar) or val is None or val.dtype not in _WIDE:
        return None
    constants = [a for a in node.args if isinstance(a, (int, float))]
    if len(node.args) != 2 or len(constants) != 1 or node.kwargs.get("alpha", 1) != 1:
        return None
    source = next(a for a in node.args if isinstance(a, Node))
    return (source, float(constants[0])) if value(source) is not None else None


def comes_from_inputs(weight: Node) -> bool:
    """Whether a weight is computed from one input of the graph alone, so that `bring_before` may move it."""
    return all(len(node.all_input_nodes) == 1 for node in _chain(weight)[:-1]) and _is_input(_chain(weight)[-1])


def bring_before(weight: Node, place: Node) -> None:
    """Move a weight that comes from the graph's inputs, with what it is computed from, in front of `place`."""
    for node in reversed(_chain(weight)):
        if node.op != "placeholder" and node > place:
            place.prepend(node)


def _chain(weight: Node) -> list[Node]:
    chain = [weight]
    while not _is_input(chain[-1]) and len(chain[-1].all_input_nodes) == 1:
        chain.append(chain[-1].all_input_nodes[0])
    return chain


def _is_input(node: Node) -> bool:
    return node.op in ("placeholder", "get_attr")
