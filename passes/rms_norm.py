"""Recognise an RMSNorm by its structure, whoever wrote it.

    x ─► [cast f32] ─► square ─► mean(-1, keepdim) ─► + eps ─► rsqrt ─┐
              └──────────────────────────────────────────────────────►mul ─► [cast] ─► [* weight] ─► [cast]

Square may be pow(2), x * x or square; the root rsqrt, pow(-0.5), reciprocal(sqrt) or a division by sqrt; the mean a sum
divided by H; operands in either order; the weight absent, plain or `1 + w`; views anywhere. The ops by name
(`aten.rms_norm`, `aten._fused_rms_norm`) count too. Three roundings are told apart, because fused kernels must keep
them: w * cast(x * rstd) (Llama), cast(x * rstd * w) (gpt-oss, and Gemma with 1 + w), and no cast at all.

A value that only looks like an RMSNorm gives a `NearMiss`, whose reason ends in the report.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from graphfuse.passes.graph_reading import (
    CASTS,
    VIEWS,
    Step,
    aten,
    is_call,
    reaches,
    readers,
    same_dim,
    value,
)


@dataclass(frozen=True)
class RMSNorm:
    """A norm found behind a value. Replacing `output` by the fused op's result removes it from the graph."""

    output: Node
    views: tuple[Node, ...]
    """Views between the value and the output, to be replayed on the fused result."""
    weight: Node | None
    weight_bias: float
    eps: float
    cast_before_weight: bool


@dataclass(frozen=True)
class NearMiss:
    """Something behind the value that is close to an RMSNorm and is none; `reason` says what differs."""

    reason: str


def find_rms_norm(start: Node) -> RMSNorm | NearMiss | None:
    """The first RMSNorm that reads `start` ([..., H]); else the closest near miss; else None."""
    miss: NearMiss | None = None
    for step, reader in readers(start):
        found = _by_name(step, reader) or _by_structure(step, reader)
        if isinstance(found, RMSNorm):
            return found
        miss = miss or found
    return miss


def _by_name(step: Step, reader: Node) -> RMSNorm | NearMiss | None:
    if is_call(reader, aten.native_layer_norm.default, aten.layer_norm.default) or (
        is_call(reader, aten.var_mean.correction, aten.var_mean.dim)
    ):
        return NearMiss("a LayerNorm follows, not an RMSNorm")
    if not is_call(reader, aten.rms_norm.default, aten._fused_rms_norm.default) or reader.args[0] is not step.node:
        return None
    x, weight, eps = value(step.node), _argument(reader, 2, "weight"), _argument(reader, 3, "eps")
    if x is None:
        return None
    normalized_shape = _argument(reader, 1, "normalized_shape")
    if not isinstance(normalized_shape, (list, tuple)) or len(normalized_shape) != 1:
        return NearMiss("the norm runs over more than the last dimension")
    if isinstance(eps, Node):
        return NearMiss("the norm's epsilon is a tensor; do not compile with dynamic=True")
    output = reader
    if is_call(reader, aten._fused_rms_norm.default):
        items = {n.args[1]: n for n in reader.users if n.op == "call_function"}
        if set(items) != {0}:
            return NearMiss("the norm's reciprocal root is read as well")
        output = items[0]
    return RMSNorm(
        output=output,
        views=step.views,
        weight=weight if isinstance(weight, Node) else None,
        weight_bias=0.0,
        eps=float(eps) if isinstance(eps, (int, float)) else torch.finfo(x.dtype).eps,
        cast_before_weight=False,
    )


def _argument(node: Node, index: int, name: str) -> object:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name)


def _by_structure(step: Step, square: Node) -> RMSNorm | NearMiss | None:
    """The chain from a square of the value to the norm's output."""
    if not _is_square(square, step.node):
        return None
    root = _reciprocal_root(square, value(step.node))
    if root is None or isinstance(root, NearMiss):
        return root
    product = _normalised(step, root)
    if product is None:
        return None
    return _with_weight(step, product, root)


def _is_square(node: Node, x: Node) -> bool:
    if is_call(node, aten.pow.Tensor_Scalar):
        return bool(node.args[0] is x and node.args[1] == 2)
    if is_call(node, aten.square.default):
        return node.args[0] is x
    return is_call(node, aten.mul.Tensor) and node.args[0] is x and node.args[1] is x


@dataclass(frozen=True)
class _Root:
    """1 / sqrt(mean(x²) + eps), or sqrt(...) itself when the value is divided by it."""

    node: Node
    divides: bool
    eps: float


def _reciprocal_root(square: Node, x: torch.Tensor | None) -> _Root | NearMiss | None:
    miss: NearMiss | None = None
    for mean in _means(square):
        if isinstance(mean, NearMiss):
            miss = miss or mean
            continue
        for added in mean.users:
            eps = _added_epsilon(added, mean)
            if isinstance(eps, NearMiss):
                miss = miss or eps
            elif eps is not None:
                root = _root_of(added, eps)
                if root is not None:
                    return root
    return miss


def _means(square: Node) -> list[Node | NearMiss]:
    """Means of the square over the last dimension, kept: mean([-1], True), or sum([-1], True) / H."""
    found: list[Node | NearMiss] = []
    val = value(square)
    if val is None:
        return found
    for reader in square.users:
        if not is_call(reader, aten.mean.dim, aten.sum.dim_IntList):
            continue
        dims = reader.args[1]
        if not isinstance(dims, (list, tuple)) or [d % val.dim() for d in dims] != [val.dim() - 1]:  # type: ignore[operator]
            shown = list(dims) if isinstance(dims, (list, tuple)) else dims
            found.append(NearMiss(f"the norm runs over dimensions {shown}, not over the last one"))
            continue
        if not (len(reader.args) > 2 and reader.args[2]):
            found.append(NearMiss("the norm's mean drops its dimension (keepdim=False)"))
            continue
        if reader.target is aten.mean.dim:
            found.append(reader)
            continue
        size = val.shape[-1]
        for scaled in reader.users:
            divided = is_call(scaled, aten.div.Tensor, aten.div.Scalar) and scaled.args[0] is reader
            if divided and isinstance(scaled.args[1], (int, float)) and same_dim(scaled.args[1], size):
                found.append(scaled)
    return found


def _added_epsilon(node: Node, mean: Node) -> float | NearMiss | None:
    if not is_call(node, aten.add.Tensor, aten.add.Scalar):
        return None
    other = node.args[1] if node.args[0] is mean else node.args[0]
    if isinstance(other, (int, float)) and node.kwargs.get("alpha", 1) == 1:
        return float(other)
    val = other.meta.get("val") if isinstance(other, Node) else None
    if isinstance(val, (torch.SymFloat, torch.SymInt)) or (isinstance(val, torch.Tensor) and val.dim() == 0):
        return NearMiss("the norm's epsilon is a tensor; do not compile with dynamic=True")
    return None


def _root_of(added: Node, eps: float) -> _Root | None:
    for reader in added.users:
        if is_call(reader, aten.rsqrt.default):
            return _Root(reader, False, eps)
        if is_call(reader, aten.pow.Tensor_Scalar) and reader.args[0] is added and reader.args[1] == -0.5:
            return _Root(reader, False, eps)
        if is_call(reader, aten.sqrt.default) or (
            is_call(reader, aten.pow.Tensor_Scalar) and reader.args[0] is added and reader.args[1] == 0.5
        ):
            for user in reader.users:
                if is_call(user, aten.reciprocal.default):
                    return _Root(user, False, eps)
            return _Root(reader, True, eps)
    return None


def _normalised(step: Step, root: _Root) -> Node | None:
    """x * rstd, or x / sqrt(...), where x is the squared value itself."""
    for reader in root.node.users:
        if root.divides:
            if is_call(reader, aten.div.Tensor) and reader.args == (step.node, root.node):
                return reader
        elif is_call(reader, aten.mul.Tensor) and set(reader.args) == {step.node, root.node}:
            return reader
    return None


def _with_weight(step: Step, product: Node, root: _Root) -> RMSNorm | NearMiss | None:
    """From x * rstd through casts and the weight to the norm's output."""
    x = value(product)
    if x is None:
        return None
    before = _furthest_cast(Step(product, step.views, ()))
    for form in reaches(product):
        for reader in form.node.users:
            weight = _weight_operand(reader, form.node, x.shape[-1])
            if weight is None:
                continue
            done = _furthest_cast(Step(reader, (*step.views, *form.views), ()))
            gate = _gate_of(done.node)
            if gate is not None:
                return NearMiss(f"a gated RMSNorm follows (its output is multiplied by {gate})")
            node, bias = _plain_weight(weight)
            return RMSNorm(done.node, done.views, node, bias, root.eps, cast_before_weight=bool(form.casts))
    return RMSNorm(before.node, before.views, None, 0.0, root.eps, cast_before_weight=False)


def _furthest_cast(step: Step) -> Step:
    """The value after the one cast that is its only reader: where a norm rounds back to the model's dtype."""
    users = list(step.node.users)
    if len(users) == 1 and users[0].target in CASTS:
        beyond = step.through(users[0])
        if beyond is not None:
            return beyond
    return step


def _weight_operand(node: Node, x: Node, size: object) -> Node | None:
    """The weight when `node` multiplies x by a vector over the last dimension."""
    if not is_call(node, aten.mul.Tensor) or x not in node.args:
        return None
    other = node.args[1] if node.args[0] is x else node.args[0]
    w = value(other)
    if w is None or not w.dim() or not same_dim(w.shape[-1], size):
        return None
    return other if all(same_dim(s, 1) for s in w.shape[:-1]) else None  # type: ignore[return-value]


def _plain_weight(node: Node) -> tuple[Node, float]:
    """The parameter behind a weight, and the constant added to it: (w, 1.0) for cast(w) + 1."""
    bias = 0.0
    while True:
        if node.target in CASTS or (node.op == "call_function" and node.target in VIEWS):
            source = node.args[0]
        elif is_call(node, aten.add.Tensor, aten.add.Scalar) and node.kwargs.get("alpha", 1) == 1:
            constants = [a for a in node.args if isinstance(a, (int, float))]
            nodes = [a for a in node.args if isinstance(a, Node)]
            if len(constants) != 1 or len(nodes) != 1:
                return node, bias
            source, bias = nodes[0], bias + float(constants[0])
        else:
            return node, bias
        if not isinstance(source, Node):
            return node, bias
        node = source


def _gate_of(output: Node) -> str | None:
    """The name of an activation that the norm's only reader multiplies it with: the mark of a gated norm."""
    users = [user for step in reaches(output) for user in step.node.users if step.through(user) is None]
    if len(users) != 1 or not is_call(users[0], aten.mul.Tensor):
        return None
    forms = {step.node for step in reaches(output)}
    for operand in users[0].args:
        if isinstance(operand, Node) and operand not in forms:
            return _activation_behind(operand)
    return None


def _activation_behind(node: Node) -> str | None:
    """silu or sigmoid, whole or as Inductor's table decomposes them, behind casts and views."""
    while isinstance(node, Node) and node.op == "call_function":
        if is_call(node, aten.silu.default, aten.sigmoid.default):
            return node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
        if is_call(node, aten.div.Tensor) and isinstance(node.args[1], Node):
            if any(is_call(a, aten.exp.default) for a in node.args[1].args if isinstance(a, Node)):
                return "silu"
            return None
        if is_call(node, aten.mul.Tensor) and any(is_call(a, aten.sigmoid.default) for a in node.args):
            return "silu"
        if node.target in CASTS or node.target in VIEWS:
            node = node.args[0]  # type: ignore[assignment]
            continue
        return None
    return None
