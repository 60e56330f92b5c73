"""Ops that move elements and compute nothing: linear, so partial sums pass; a shard's dimension is followed.

A shard is followed through reshapes by where it starts in memory: the number of elements in front of the sharded
dimension is the same before and after, whatever dimensions are split or merged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from graphfuse.passes.graph_reading import aten
from graphfuse.passes.placement.call import Call, Operand, all_replicated, is_one, partials
from graphfuse.passes.placement.lattice import (
    INHERITED,
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
    expression,
    quotient,
)
from graphfuse.passes.placement.pointwise import broadcast


def same(call: Call) -> Outcome:
    """The same elements in the same order."""
    return call.first().placement


def reshape(call: Call) -> Outcome:
    x = call.first()
    if isinstance(x.placement, Shard):
        return _reshaped(x.placement, x.shape, call.shape)
    return without_uniform(x.placement)


def _reshaped(shard: Shard, before: Sequence[Any], after: Sequence[Any]) -> Placement:
    unchanged = [equal_sizes(expression(a), expression(b)) for a, b in zip(before, after, strict=False)]
    if len(before) == len(after) and all(unchanged):
        return shard
    in_front = _product(before[: shard.dim]) * shard.outer
    candidates = [d for d in range(len(after)) if equal_sizes(_product(after[:d]), in_front)]
    if candidates:
        # The first, if dimensions of size 1 leave a choice: a rank's only head, in front of its elements. Tokens are of
        # unknown number: a 1 in front of them is no part of them.
        tokens = not isinstance(before[shard.dim], int) and shard.outer == 1
        dim = candidates[-1 if tokens else 0]
        merged = is_one(before[shard.dim]) and not is_one(after[dim]) and dim > 0
        return Shard(dim, beside=dim - 1 if merged else None)
    for dim in range(len(after)):
        inside, behind = quotient(in_front, _product(after[:dim])), quotient(_product(after[: dim + 1]), in_front)
        if inside is not None and behind is not None and behind != 1:
            return Shard(dim, inside)
    return Unknown("a view after which it is not clear along which dimension the value is sharded")


def _product(sizes: Sequence[Any]) -> Any:
    return math.prod(expression(size) for size in sizes)


def without_uniform(placement: Placement) -> Placement:
    return Replicated(zero=placement.zero) if isinstance(placement, Replicated) else placement


def _moved(placement: Placement, order: Sequence[int | None]) -> Placement:
    """After dimensions were moved: `order` lists for each new one the old one, None for a new one of size 1."""
    if isinstance(placement, Shard):
        if placement.dim not in order:
            return Unknown("a part of a sharded dimension is taken, which lies on some ranks only")
        beside = order.index(placement.beside) if placement.beside in order and placement.beside is not None else None
        return Shard(order.index(placement.dim), placement.outer, beside)
    if isinstance(placement, Replicated):
        uniform = frozenset(new for new, old in enumerate(order) if old is None or old in placement.uniform)
        return Replicated(uniform, placement.zero)
    return placement


def permute(call: Call) -> Outcome:
    x = call.first()
    return _moved(x.placement, [d % x.dim for d in call.argument("dims")])


def transpose(call: Call) -> Outcome:
    x = call.first()
    order = list(range(x.dim))
    a, b = (call.argument("dim0"), call.argument("dim1")) if call.has("dim0") else (0, -1)
    order[a], order[b] = order[b], order[a]
    return _moved(x.placement, order)


def unsqueeze(call: Call) -> Outcome:
    x = call.first()
    order: list[int | None] = list(range(x.dim))
    order.insert(call.argument("dim") % (x.dim + 1), None)
    return _moved(x.placement, order)


def squeeze(call: Call) -> Outcome:
    x = call.first()
    dims = call.argument("dim") if call.has("dim") else [d for d, size in enumerate(x.shape) if is_one(size)]
    gone = {d % x.dim for d in ([dims] if isinstance(dims, int) else dims)}
    return _moved(x.placement, [d for d in range(x.dim) if d not in gone or not is_one(x.shape[d])])


def expand(call: Call) -> Outcome:
    x, num_dims = call.first(), len(call.shape)
    new = num_dims - x.dim
    if isinstance(x.placement, Shard):
        dim = x.placement.dim
        if is_one(x.shape[dim]) and not is_one(call.shape[dim + new]):
            return Unknown("a shard is expanded along its sharded dimension")
        return Shard(dim + new, x.placement.outer)
    if isinstance(x.placement, Replicated):
        uniform = {d for d in range(num_dims) if d < new or is_one(x.shape[d - new]) or d - new in x.placement.uniform}
        return Replicated(frozenset(uniform), x.placement.zero)
    return x.placement


def repeat(call: Call) -> Outcome:
    x = call.first()
    new = len(call.shape) - x.dim
    if isinstance(x.placement, Shard):
        return Shard(x.placement.dim + new, x.placement.outer) if x.placement.outer == 1 else INHERITED
    return without_uniform(x.placement)


def select(call: Call) -> Outcome:
    x = call.first()
    gone = call.argument("dim") % x.dim
    return _moved(x.placement, [d for d in range(x.dim) if d != gone])


def split(call: Call) -> Outcome:
    """Several values, each sharded like the whole: the parts of merged projections, heads of either kind."""
    parts = value_tuple(call.node)
    return (call.first().placement,) * len(parts)


def unbind(call: Call) -> Outcome:
    return (select(call),) * len(value_tuple(call.node))


def value_tuple(node: Node) -> tuple[Any, ...]:
    val = node.meta.get("val")
    return tuple(val) if isinstance(val, tuple | list) else ()


def cat(call: Call) -> Outcome:
    operands = [call.as_operand(node) for node in call.node.args[0]]  # type: ignore[union-attr]
    operands = [o for o in operands if not (o.dim == 1 and o.shape[0] == 0)] or operands
    dim = call.argument("dim") % operands[0].dim
    return joined(call, operands, dim)


def stack(call: Call) -> Outcome:
    operands = [call.as_operand(node) for node in call.node.args[0]]  # type: ignore[union-attr]
    dim = call.argument("dim") % len(call.shape)
    found = joined(call, operands, None)
    order: list[int | None] = list(range(operands[0].dim))
    order.insert(dim, None)
    return _moved(without_uniform(found), order)


def joined(call: Call, operands: list[Operand], dim: int | None) -> Placement:
    """Values side by side along `dim`, or one instead of a part of the other."""
    kinds = {o.placement for o in operands if not (isinstance(o.placement, Replicated) and o.placement.zero)}
    for o in partials(operands):
        if any(isinstance(k, Unknown | Lookup) for k in kinds):
            return INHERITED
        if kinds != {o.placement}:
            raise Violation(Kind.MIXED, o.node, f"{call.name} joins a {o.placement} and a value that is none")
        return o.placement
    if kinds == {Lookup()}:
        return Lookup()
    if all_replicated(operands):
        return Replicated(zero=not kinds)
    shards = [o for o in operands if isinstance(o.placement, Shard)]
    if dim is not None and shards and shards[0].placement.dim == dim:  # type: ignore[union-attr]
        if all(o.placement == Shard(dim) for o in operands):
            return Shard(dim)
        return Unknown("shards and whole values are joined along the sharded dimension")
    whole = [Operand(o.node, o.placement, _with_one(o.shape, dim)) for o in operands]
    return broadcast(whole, operands[0].dim)


def _with_one(shape: tuple[Any, ...], dim: int | None) -> tuple[Any, ...]:
    return shape if dim is None else (*shape[:dim], 1, *shape[dim + 1 :])


def replace_part(call: Call) -> Outcome:
    """slice_scatter, select_scatter: a part of one value is replaced by another."""
    base, part = (call.as_operand(argument) for argument in call.node.args[:2])
    if all_replicated([base, part]):
        return REPLICATED
    if isinstance(base.placement, Shard) and base.placement.dim != call.argument("dim") % base.dim:
        shard = base.placement
        if part.placement == shard and part.dim == base.dim:
            return shard
    if any(isinstance(o.placement, Shard) for o in (base, part)):
        return Unknown("a part of a shard is replaced")
    return joined(call, [base, part], None)


def pad(call: Call) -> Outcome:
    x = call.first()
    filled = call.node.args[2] if len(call.node.args) > 2 else call.node.kwargs.get("value", 0)
    if isinstance(x.placement, Partial) and filled != 0:
        raise Violation(Kind.MIXED, x.node, f"{call.name} puts numbers other than 0 beside a {x.placement}")
    if isinstance(x.placement, Shard):
        pads = list(call.node.args[1])  # type: ignore[arg-type]
        dims = {x.dim - 1 - i // 2 for i, amount in enumerate(pads) if not (isinstance(amount, int) and amount == 0)}
        return Unknown("a sharded dimension is padded") if x.placement.dim in dims else x.placement
    return without_uniform(x.placement)


def triangle(call: Call) -> Outcome:
    """tril, triu: zeros elsewhere."""
    x = call.first()
    return Unknown("a triangle of a sharded matrix") if isinstance(x.placement, Shard) else without_uniform(x.placement)


def rolled(call: Call) -> Outcome:
    """flip, roll: elements in another order within dimensions."""
    x = call.first()
    dims = call.argument("dims") or range(x.dim)
    if isinstance(x.placement, Shard) and x.placement.dim in [d % x.dim for d in dims]:
        return Unknown("elements of a sharded dimension are reordered")
    return without_uniform(x.placement)


RULES = {
    **dict.fromkeys(
        (
            aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default,
            aten.lift_fresh_copy.default, aten.slice.Tensor, aten.narrow.default,
        ),
        same,
    ),
    **dict.fromkeys((aten.view.default, aten.reshape.default, aten._unsafe_view.default), reshape),
    aten.permute.default: permute,
    **dict.fromkeys((aten.transpose.int, aten.t.default), transpose),
    aten.unsqueeze.default: unsqueeze,
    **dict.fromkeys((aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), squeeze),
    aten.expand.default: expand,
    aten.repeat.default: repeat,
    aten.select.int: select,
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default), split),
    aten.unbind.int: unbind,
    aten.cat.default: cat,
    aten.stack.default: stack,
    **dict.fromkeys((aten.slice_scatter.default, aten.select_scatter.default), replace_part),
    aten.constant_pad_nd.default: pad,
    **dict.fromkeys((aten.tril.default, aten.triu.default), triangle),
    **dict.fromkeys((aten.flip.default, aten.roll.default), rolled),
}  # fmt: skip
