"""Elementwise ops. Shards stay shards of the broadcast result; partial sums pass through what is linear, and only that.

partial + partial, partial * replicated, -partial, where(mask, partial, 0)      a partial sum
partial + replicated                                                            added once a rank: wrong
partial * partial, f(partial)                                                   not the sum of the ranks' values
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from graphfuse.passes.graph_reading import aten, prims, value
from graphfuse.passes.placement.call import Call, Operand, ignorance, is_one, partials
from graphfuse.passes.placement.lattice import (
    PARTIAL,
    REPLICATED,
    Kind,
    Lookup,
    Outcome,
    Partial,
    Placement,
    Replicated,
    Shard,
    Unknown,
    Violation,
    equal_sizes,
)

ONE_RANK_ADDS = "graphfuse_one_rank_adds"
"""Metadata of an `add` whose alpha is 1 on the group's first rank and 0 on the others."""


def broadcast(operands: list[Operand], num_dims: int) -> Placement:
    """The placement of an elementwise result of operands that are no partial sums."""
    unknown = ignorance(operands)
    if unknown is not None:
        return unknown
    shards = {}
    for o in operands:
        if isinstance(o.placement, Shard):
            shards[o.placement.dim + num_dims - o.dim] = o
    if not shards:
        return Replicated(_uniform(operands, num_dims))
    if len(shards) > 1:
        return Unknown(f"its operands are sharded along different dimensions ({', '.join(map(str, sorted(shards)))})")
    ((dim, sharded),) = shards.items()
    assert isinstance(sharded.placement, Shard)
    for o in operands:
        own = dim - num_dims + o.dim
        if isinstance(o.placement, Shard):
            if not equal_sizes(o.placement.outer, sharded.placement.outer):
                return Unknown("its operands are divided into different parts")
        elif own >= 0 and not is_one(o.shape[own]) and own not in o.placement.uniform:  # type: ignore[union-attr]
            return Unknown("one operand is a shard, and another one of its size is the same on every rank")
    return Shard(dim, sharded.placement.outer)


def _uniform(operands: list[Operand], num_dims: int) -> frozenset[int]:
    def is_uniform(dim: int, o: Operand) -> bool:
        own = dim - num_dims + o.dim
        return own < 0 or is_one(o.shape[own]) or own in o.placement.uniform  # type: ignore[union-attr]

    return frozenset(d for d in range(num_dims) if all(is_uniform(d, o) for o in operands))


def nonlinear(call: Call) -> Outcome:
    """Any elementwise function of its operands."""
    operands = call.tensors()
    for o in partials(operands):
        raise Violation(Kind.NON_LINEAR, o.node, f"{call.name} is not linear, and reads a {o.placement}")
    return broadcast(operands, len(call.shape))


def scaled(call: Call) -> Outcome:
    """One operand, times a number or cast: whatever it is, it stays."""
    x = call.first()
    if isinstance(x.placement, Partial) and not _keeps_fractions(call.node):
        raise Violation(Kind.NON_LINEAR, x.node, f"{call.name} rounds a {x.placement} to whole numbers")
    if isinstance(x.placement, Partial) and x.placement.op in ("max", "min") and call.node.target is aten.neg.default:
        return Partial("min" if x.placement.op == "max" else "max")
    return x.placement


def _keeps_fractions(node: Node) -> bool:
    tensor = value(node)
    before = value(node.args[0])
    if tensor is None or before is None:
        return True
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex or not before.dtype.is_floating_point


def add(call: Call) -> Outcome:
    a, b = (call.as_operand(argument) for argument in call.node.args[:2])
    scale = call.node.kwargs.get("alpha", 1)
    if ONE_RANK_ADDS in call.node.meta and isinstance(a.placement, Partial) and scale == float(call.groups.rank == 0):
        return a.placement if isinstance(b.placement, Replicated) else _sum(call, a, b)
    if scale == 0:
        return a.placement
    return _sum(call, a, b)


def _sum(call: Call, a: Operand, b: Operand) -> Placement:
    if isinstance(a.placement, Partial) and isinstance(b.placement, Partial):
        if a.placement.op == b.placement.op and a.placement.op in ("sum", "avg"):
            return a.placement
        raise Violation(Kind.NON_LINEAR, a.node, f"{call.name} joins a {a.placement} and a {b.placement}")
    for partial, other in ((a, b), (b, a)):
        if not isinstance(partial.placement, Partial):
            continue
        if isinstance(other.placement, Replicated):
            if other.placement.zero:
                return partial.placement
            raise _added_on_every_rank(call, partial, other)
        if isinstance(other.placement, Shard):
            text = f"{call.name} joins a {partial.placement} and a {other.placement}"
            raise Violation(Kind.RESIDUAL, partial.node, text)
    placement = broadcast([a, b], len(call.shape))
    if isinstance(placement, Replicated) and a.placement == b.placement == Replicated(a.placement.uniform, True):  # type: ignore[union-attr]
        return Replicated(placement.uniform, True)
    return placement


def _added_on_every_rank(call: Call, partial: Operand, other: Operand) -> Violation:
    if other.dim < partial.dim:
        what = "a number" if other.node is None else "a bias"
        text = f"{call.name} adds {what} to a {partial.placement} on every rank: it is summed with it"
        return Violation(Kind.BIAS, partial.node, text)
    return Violation(Kind.RESIDUAL, partial.node, f"{call.name} joins a {partial.placement} and a whole value")


def multiply(call: Call) -> Outcome:
    return product(call, *(call.as_operand(argument) for argument in call.node.args[:2]))


def product(call: Call, a: Operand, b: Operand) -> Placement:
    if isinstance(a.placement, Partial) and isinstance(b.placement, Partial):
        raise Violation(Kind.NON_LINEAR, a.node, f"{call.name} multiplies two partial sums")
    for one, other in ((a, b), (b, a)):
        if isinstance(one.placement, Lookup) and isinstance(other.placement, Replicated):
            return PARTIAL if is_mask(other.node) else one.placement
        if not isinstance(one.placement, Partial):
            continue
        if isinstance(other.placement, Shard):
            text = f"{call.name} multiplies a {one.placement} by a {other.placement}, which differs from rank to rank"
            raise Violation(Kind.GATE, other.node, text)
        if isinstance(other.placement, Replicated):
            if one.placement.op in ("max", "min"):
                raise Violation(Kind.NON_LINEAR, one.node, f"{call.name} scales a {one.placement}")
            return one.placement
    placement = broadcast([a, b], len(call.shape))
    zero = any(isinstance(o.placement, Replicated) and o.placement.zero for o in (a, b))
    return Replicated(placement.uniform, zero) if isinstance(placement, Replicated) else placement


def divide(call: Call) -> Outcome:
    a, b = (call.as_operand(argument) for argument in call.node.args[:2])
    rounds = call.node.kwargs.get("rounding_mode") is not None
    if isinstance(b.placement, Partial) or (rounds and isinstance(a.placement, Partial)):
        return nonlinear(call)
    return product(call, a, b)


def power(call: Call) -> Outcome:
    return call.first().placement if call.node.args[1] == 1 else nonlinear(call)


def where(call: Call) -> Outcome:
    mask, *branches = (call.as_operand(argument) for argument in call.node.args)
    return choose(call, mask, branches)


def masked_fill(call: Call) -> Outcome:
    x, mask, filled = (call.as_operand(argument) for argument in call.node.args)
    return choose(call, mask, [x, filled])


def choose(call: Call, mask: Operand, branches: list[Operand]) -> Placement:
    """Elements of one operand or the other: of partial sums if both are, zero being one."""
    kinds = {type(o.placement) for o in branches if not _is_zero(o)}
    if Lookup in kinds and isinstance(mask.placement, Replicated) and kinds == {Lookup}:
        return PARTIAL
    for partial in partials([mask, *branches]):
        if partial is mask:
            raise Violation(Kind.NON_LINEAR, mask.node, f"{call.name} decides by a {mask.placement}")
        if isinstance(mask.placement, Shard):
            raise Violation(Kind.GATE, mask.node, f"{call.name} selects parts of a {partial.placement} by a shard")
        if isinstance(mask.placement, Unknown) or Unknown in kinds:
            break
        if kinds != {Partial} or partial.placement != next(partials(branches)).placement:
            raise Violation(Kind.MIXED, partial.node, f"{call.name} joins a {partial.placement} and a whole value")
        return partial.placement
    return broadcast([mask, *branches], len(call.shape))


def _is_zero(o: Operand) -> bool:
    return isinstance(o.placement, Replicated) and o.placement.zero


def is_mask(node: Node | None) -> bool:
    """A tensor of truth values, seen through casts and views."""
    while node is not None:
        tensor = value(node)
        if tensor is not None and tensor.dtype is torch.bool:
            return True
        source = node.args[0] if node.op == "call_function" and node.args and node.target in _SEEN_THROUGH else None
        node = source if isinstance(source, Node) else None
    return False


_CASTS = (prims.convert_element_type.default, aten._to_copy.default, aten.to.dtype)
_SEEN_THROUGH = (*_CASTS, aten.unsqueeze.default, aten.view.default, aten.expand.default, aten.slice.Tensor)


def copy(call: Call) -> Outcome:
    """copy(destination, source): the source's values."""
    source = call.as_operand(call.node.args[1])
    destination = call.first()
    if source.dim != destination.dim:
        return REPLICATED if isinstance(source.placement, Replicated) else Unknown("a copy that broadcasts")
    return source.placement


Rule = Callable[[Call], Outcome]

RULES: dict[Any, Rule] = {
    **dict.fromkeys((*_CASTS, aten.neg.default), scaled),
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar), add),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), multiply),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar, aten.div.Tensor_mode), divide),
    aten.pow.Tensor_Scalar: power,
    **dict.fromkeys((aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf), where),
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), masked_fill),
    **dict.fromkeys((aten.copy.default, aten.copy_.default), copy),
}
"""Other ops that torch tags as pointwise are `nonlinear`."""
