"""Matrix products, as sums over labelled dimensions: mm is "mk,kn->mn".

shard(k) x shard(k)            a partial sum
shard(m) x replicated          a shard
partial  x replicated          a partial sum
partial  x partial or shard    not the sum of the ranks' values
"""

from __future__ import annotations

from typing import Any

from graphfuse.ops import linear as _linear_op
from graphfuse.passes.graph_reading import aten
from graphfuse.passes.placement.call import Call, Operand, all_replicated, ignorance, is_one, partials
from graphfuse.passes.placement.lattice import (
    PARTIAL,
    REPLICATED,
    Kind,
    Outcome,
    Partial,
    Placement,
    Replicated,
    Shard,
    Unknown,
    Violation,
    equal_sizes,
    expression,
)
from graphfuse.passes.placement.pointwise import _sum


def contract(call: Call, a: Operand, b: Operand, labels: str) -> Placement:
    inputs, out = labels.split("->")
    names_a, names_b = inputs.split(",")
    for o, other in ((a, b), (b, a)):
        if not isinstance(o.placement, Partial):
            continue
        if isinstance(other.placement, Partial):
            raise Violation(Kind.NON_LINEAR, o.node, f"{call.name} multiplies two partial sums")
        if isinstance(other.placement, Shard):
            text = f"{call.name} multiplies a {o.placement} by a {other.placement}: it must be summed before"
            raise Violation(Kind.NON_LINEAR, o.node, text)
        if isinstance(other.placement, Replicated) and o.placement.op in ("max", "min"):
            raise Violation(Kind.NON_LINEAR, o.node, f"{call.name} multiplies a {o.placement}")
    unknown = ignorance([a, b])
    if unknown is not None:
        return unknown
    for o in partials([a, b]):
        return o.placement
    at_a, at_b = _sharded_labels(a, names_a), _sharded_labels(b, names_b)
    if at_a and at_b:
        both = [(label, outer) for label, outer in at_a for other in at_b if _same_part((label, outer), other)]
        if not both:
            return Unknown("both factors are sharded, along different dimensions")
        label, outer = both[0]
    elif at_a or at_b:
        label, outer = (at_a or at_b)[0]
        whole, names = (b, names_b) if at_a else (a, names_a)
        if label in names and not is_one(whole.shape[names.index(label)]):
            return Unknown("one factor is sharded along a dimension in which the other one is whole")
    else:
        return REPLICATED
    return Shard(out.index(label), outer) if label in out else PARTIAL


def _sharded_labels(o: Operand, names: str) -> list[tuple[str, Any]]:
    """The dimension along which a factor is sharded, and the one that it may be as well."""
    shard = o.placement
    if not isinstance(shard, Shard):
        return []
    found = [(names[shard.dim], shard.outer)]
    if shard.beside is not None:
        found.append((names[shard.beside], expression(o.shape[shard.beside])))
    return found


def _same_part(a: tuple[str, Any], b: tuple[str, Any]) -> bool:
    return a[0] == b[0] and equal_sizes(a[1], b[1])


def mm(call: Call) -> Outcome:
    a, b = (call.as_operand(argument) for argument in call.node.args[:2])
    return contract(call, a, b, "mk,kn->mn")


def bmm(call: Call) -> Outcome:
    a, b = (call.as_operand(argument) for argument in call.node.args[:2])
    return contract(call, a, b, "bmk,bkn->bmn")


def mv(call: Call) -> Outcome:
    a, b = (call.as_operand(argument) for argument in call.node.args[:2])
    return contract(call, a, b, "mk,k->m")


def linear(call: Call) -> Outcome:
    x, weight, bias = call.first(), call.operand("weight"), call.optional("bias")
    batch = "abcdefgh"[: x.dim - 1]
    return with_bias(call, bias, contract(call, x, weight, f"{batch}k,nk->{batch}n"))


def addmm(call: Call) -> Outcome:
    bias, a, b = (call.as_operand(argument) for argument in call.node.args[:3])
    return with_bias(call, bias, contract(call, a, b, "mk,kn->mn"))


def baddbmm(call: Call) -> Outcome:
    bias, a, b = (call.as_operand(argument) for argument in call.node.args[:3])
    return with_bias(call, bias, contract(call, a, b, "bmk,bkn->bmn"))


def with_bias(call: Call, bias: Operand | None, product: Placement) -> Placement:
    if bias is None or call.node.kwargs.get("beta", 1) == 0:
        return product
    return _sum(call, Operand(call.node, product, call.shape), bias)


def grouped_mm(call: Call) -> Outcome:
    """Each expert's rows times its matrix: [M, K] x [E, K, N], the rows divided by `offs`."""
    a, b, rows = call.first(), call.operand("mat2"), call.optional("offs")
    if rows is not None:
        for o in partials([rows]):
            raise Violation(Kind.NON_LINEAR, o.node, f"{call.name} divides rows by a {o.placement}")
        if not all_replicated([rows]):
            return ignorance([rows]) or Unknown("rows are divided among experts differently on each rank")
    if a.dim != 2 or b.dim != 3:
        return REPLICATED if all_replicated([a, b]) else Unknown("a grouped product of another form")
    if isinstance(b.placement, Shard) and b.placement.dim == 0:
        return Unknown("experts are divided over the ranks, and not their matrices")
    return with_bias(call, call.optional("bias"), contract(call, a, b, "mk,ekn->mn"))


def convolution(call: Call) -> Outcome:
    x, weight, bias = call.first(), call.operand("weight"), call.optional("bias")
    operands = [x, weight, *([bias] if bias is not None else [])]
    if all_replicated(operands):
        return REPLICATED
    unknown = ignorance(operands)
    if unknown is not None:
        return unknown
    depthwise = is_one(weight.shape[1])
    if isinstance(x.placement, Partial) and bias is None and isinstance(weight.placement, Replicated):
        return x.placement
    for o in partials(operands):
        raise Violation(Kind.NON_LINEAR, o.node, f"{call.name} multiplies or shifts a {o.placement}")
    if depthwise and x.placement == Shard(1) and all(o.placement == Shard(0) for o in operands[1:]):
        return Shard(1)
    return Unknown("a convolution of shards that is not depthwise")


RULES = {
    _linear_op.OP: linear,
    aten.mm.default: mm,
    aten.bmm.default: bmm,
    aten.mv.default: mv,
    aten.linear.default: linear,
    aten.addmm.default: addmm,
    aten.baddbmm.default: baddbmm,
    aten._grouped_mm.default: grouped_mm,
    aten.convolution.default: convolution,
}
