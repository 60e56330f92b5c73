"""Recognise the reciprocal root of an RMSNorm, up to where it meets the value again.

    x ─► square ─► mean(-1, keepdim) ─► + eps ─► rsqrt

Square may be pow(2), x * x or square; the mean a sum divided by H; the root rsqrt, pow(-0.5), reciprocal(sqrt), or a
sqrt by which the value is then divided. Chains that come close give a `NearMiss`, whose reason ends in the report.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from graphfuse.passes.graph_reading import aten, is_call, same_dim, value

TENSOR_EPS = "the norm's epsilon is a tensor; do not compile with dynamic=True"


@dataclass(frozen=True)
class NearMiss:
    """Something behind a value that is close to an RMSNorm and is none; `reason` says what differs."""

    reason: str


@dataclass(frozen=True)
class ReciprocalRoot:
    """1 / sqrt(mean(x²) + eps), or sqrt(...) itself when the value is divided by it."""

    node: Node
    divides: bool
    eps: float


def find_reciprocal_root(x: Node, square: Node) -> ReciprocalRoot | NearMiss | None:
    """The reciprocal root behind `square`, if that squares x; None when it does not look like one."""
    if not _is_square(square, x):
        return None
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


def _is_square(node: Node, x: Node) -> bool:
    if is_call(node, aten.pow.Tensor_Scalar):
        return node.args == (x, 2)
    if is_call(node, aten.square.default):
        return node.args[0] is x
    return is_call(node, aten.mul.Tensor) and node.args[0] is x and node.args[1] is x


def _means(square: Node) -> Iterator[Node | NearMiss]:
    """Means of the square over the last dimension, kept: mean([-1], True), or sum([-1], True) / H."""
    val = value(square)
    if val is None:
        return
    for reader in square.users:
        if not is_call(reader, aten.mean.dim, aten.sum.dim_IntList):
            continue
        dims = reader.args[1]
        if not isinstance(dims, (list, tuple)) or [d % val.dim() for d in dims] != [val.dim() - 1]:  # type: ignore[operator]
            shown = list(dims) if isinstance(dims, (list, tuple)) else dims
            yield NearMiss(f"the norm runs over dimensions {shown}, not over the last one")
        elif not (len(reader.args) > 2 and reader.args[2]):
            yield NearMiss("the norm's mean drops its dimension (keepdim=False)")
        elif reader.target is aten.mean.dim:
            yield reader
        else:
            yield from (user for user in reader.users if _divides_by(user, reader, val.shape[-1]))


def _divides_by(node: Node, total: Node, size: object) -> bool:
    if not is_call(node, aten.div.Tensor, aten.div.Scalar) or node.args[0] is not total or node.kwargs:
        return False
    return isinstance(node.args[1], (int, float)) and same_dim(node.args[1], size)


def _added_epsilon(node: Node, mean: Node) -> float | NearMiss | None:
    if not is_call(node, aten.add.Tensor, aten.add.Scalar) or len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    other = node.args[1] if node.args[0] is mean else node.args[0]
    if isinstance(other, (int, float)):
        return float(other)
    val = other.meta.get("val") if isinstance(other, Node) else None
    if isinstance(val, (torch.SymFloat, torch.SymInt)) or (isinstance(val, torch.Tensor) and val.dim() == 0):
        return NearMiss(TENSOR_EPS)
    return None


def _root_of(added: Node, eps: float) -> ReciprocalRoot | None:
    for reader in added.users:
        if is_call(reader, aten.rsqrt.default) or _is_power(reader, added, -0.5):
            return ReciprocalRoot(reader, False, eps)
        if is_call(reader, aten.sqrt.default) or _is_power(reader, added, 0.5):
            for user in reader.users:
                if is_call(user, aten.reciprocal.default):
                    return ReciprocalRoot(user, False, eps)
            return ReciprocalRoot(reader, True, eps)
    return None


def _is_power(node: Node, base: Node, exponent: float) -> bool:
    return is_call(node, aten.pow.Tensor_Scalar) and node.args == (base, exponent)
