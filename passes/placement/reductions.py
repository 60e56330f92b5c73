"""Reductions within a tensor, and functions of whole rows. Over a sharded dimension they give a partial result: a
partial sum, average, maximum or minimum, or one that no collective could complete."""

from __future__ import annotations

from collections.abc import Callable

from graphfuse.passes.graph_reading import aten
from graphfuse.passes.placement.call import Call, Operand, all_replicated, ignorance, partials
from graphfuse.passes.placement.lattice import (
    REPLICATED,
    Kind,
    Outcome,
    Partial,
    Placement,
    Replicated,
    Shard,
    Unknown,
    Violation,
)
from graphfuse.passes.placement.views import value_tuple


def reducer(op: str | None) -> Callable[[Call], Outcome]:
    """The rule of a reduction that becomes a Partial(op) over a sharded dimension; None: it becomes nothing known."""

    def rule(call: Call) -> Outcome:
        x, dims = call.first(), _dims(call)
        if isinstance(x.placement, Partial):
            if op == x.placement.op or (op in ("sum", "avg") and x.placement.op in ("sum", "avg")):
                return x.placement
            raise Violation(Kind.NON_LINEAR, x.node, f"{call.name} is not linear, and reads a {x.placement}")
        if isinstance(x.placement, Shard):
            if x.placement.dim in dims:
                return Partial(op) if op else Unknown("a reduction of a sharded dimension that cannot be completed")
            if call.has("keepdim") and call.argument("keepdim"):
                return x.placement
            return Shard(x.placement.dim - sum(d < x.placement.dim for d in dims), x.placement.outer)
        return REPLICATED if isinstance(x.placement, Replicated) else ignorance([x]) or REPLICATED

    return rule


def _dims(call: Call) -> set[int]:
    x = call.first()
    dims = call.argument("dim") if call.has("dim") else None
    if dims is None or dims == []:
        return set(range(x.dim))
    return {d % x.dim for d in ([dims] if isinstance(dims, int) else dims)}


def of_rows(call: Call) -> Outcome:
    """softmax, sort, top-k, arg-max, cumulative maxima: along one dimension, not linear."""
    x = call.first()
    dims = _dims(call)
    for o in partials([x]):
        raise Violation(Kind.NON_LINEAR, o.node, f"{call.name} is not linear, and reads a {o.placement}")
    return _all(call, _along(call, x, dims))


def arg_of_rows(call: Call) -> Outcome:
    x = call.first()
    for o in partials([x]):
        raise Violation(Kind.NON_LINEAR, o.node, f"{call.name} is not linear, and reads a {o.placement}")
    found = reducer(None)(call)
    return _all(call, found) if not isinstance(found, tuple) else found


def _along(call: Call, x: Operand, dims: set[int]) -> Placement:
    if isinstance(x.placement, Shard) and x.placement.dim in dims:
        return Unknown(f"{call.name} along a sharded dimension sees one rank's part of it")
    return x.placement if isinstance(x.placement, Shard) else ignorance([x]) or REPLICATED


def _all(call: Call, placement: Placement) -> Outcome:
    values = value_tuple(call.node)
    return (placement,) * len(values) if values else placement


def cumulative_sum(call: Call) -> Outcome:
    x = call.first()
    return x.placement if isinstance(x.placement, Partial) else _along(call, x, _dims(call))


def norm(call: Call) -> Outcome:
    """layer_norm, rms_norm: over the last dimensions, with weights of their shape."""
    x, *weights = operands = call.tensors()
    for o in partials(operands):
        raise Violation(Kind.NON_LINEAR, o.node, f"{call.name} is not linear, and reads a {o.placement}")
    unknown = ignorance(operands)
    if unknown is not None or not all_replicated(weights):
        return _all(call, unknown or Unknown("the weight of a norm is a shard"))
    num_dims = len(call.argument("normalized_shape"))
    return _all(call, _along(call, x, set(range(x.dim - num_dims, x.dim))))


def var_mean(call: Call) -> Outcome:
    x = call.first()
    for o in partials([x]):
        raise Violation(Kind.NON_LINEAR, o.node, f"{call.name} is not linear, and reads a {o.placement}")
    found = reducer(None)(call)
    return (found, found) if not isinstance(found, tuple) else found


RULES = {
    **dict.fromkeys((aten.sum.dim_IntList, aten.sum.default), reducer("sum")),
    **dict.fromkeys((aten.mean.dim, aten.mean.default), reducer("avg")),
    **dict.fromkeys((aten.amax.default, aten.max.default), reducer("max")),
    **dict.fromkeys((aten.amin.default, aten.min.default), reducer("min")),
    **dict.fromkeys(
        (aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.prod.dim_int),
        reducer(None),
    ),
    **dict.fromkeys((aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim), arg_of_rows),
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default, aten.softmax.int), of_rows),
    **dict.fromkeys((aten.topk.default, aten.sort.default, aten.sort.stable), of_rows),
    aten.cumsum.default: cumulative_sum,
    **dict.fromkeys(
        (
            aten.native_layer_norm.default, aten.rms_norm.default, aten._fused_rms_norm.default,
            aten.layer_norm.default,
        ),
        norm,
    ),
    aten.var_mean.correction: var_mean,
}  # fmt: skip
