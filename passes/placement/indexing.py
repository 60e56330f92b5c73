"""Reading and writing at indices: linear in the values, any function of the indices.

Rows of a table that is sharded by rows are a `Lookup`: each rank finds some of them, and something else for the others,
until a mask puts zeros there. Then they are a partial sum.
"""

from __future__ import annotations

from graphfuse.passes.graph_reading import aten, value
from graphfuse.passes.placement.call import Call, Operand, all_replicated, partials
from graphfuse.passes.placement.lattice import (
    INHERITED,
    REPLICATED,
    Kind,
    Lookup,
    Outcome,
    Replicated,
    Shard,
    Unknown,
    Violation,
)
from graphfuse.passes.placement.pointwise import broadcast, choose
from graphfuse.passes.placement.views import joined, without_uniform


def index(call: Call) -> Outcome:
    """x[i, j, ...]: linear in x, any function of the indices."""
    x = call.first()
    indices = list(call.node.args[1])  # type: ignore[arg-type]
    given = [(d, call.as_operand(i)) for d, i in enumerate(indices) if i is not None]
    placements = [o for _, o in given]
    for o in partials(placements):
        raise Violation(Kind.NON_LINEAR, o.node, f"{call.name} uses a {o.placement} as an index")
    if any(isinstance(o.placement, Unknown | Lookup) for o in [x, *placements]):
        return INHERITED
    dims = [d for d, _ in given]
    at = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    found = broadcast(placements, max(o.dim for o in placements))
    if isinstance(found, Shard):
        if isinstance(x.placement, Replicated) and not _has_booleans(placements):
            return Shard(at + found.dim, found.outer)
        return Unknown("a value is indexed by a shard")
    if isinstance(x.placement, Shard):
        if x.placement.dim in dims or _has_booleans(placements):
            return Unknown("a sharded dimension is indexed")
        kept = [d for d in range(x.dim) if d not in dims]
        where = kept.index(x.placement.dim)
        num_new = max(o.dim for o in placements)
        return Shard(where if where < at else where + num_new, x.placement.outer)
    return without_uniform(x.placement)


def _has_booleans(operands: list[Operand]) -> bool:
    return any(
        (t := value(o.node)) is not None and not t.dtype.is_floating_point and t.dtype.itemsize == 1 for o in operands
    )


def index_put(call: Call) -> Outcome:
    x, written = call.first(), call.operand("values")
    indices = [call.as_operand(i) for i in call.node.args[1] if i is not None]  # type: ignore[union-attr]
    for o in partials(indices):
        raise Violation(Kind.NON_LINEAR, o.node, f"{call.name} uses a {o.placement} as an index")
    if all_replicated([x, written, *indices]):
        return REPLICATED
    if not all_replicated(indices):
        return Unknown("a value is written where a shard says") if not _any_unknown(indices) else INHERITED
    if isinstance(x.placement, Lookup):
        return choose(call, indices[0], [x, written]) if _has_booleans(indices[:1]) else INHERITED
    if isinstance(x.placement, Shard) or isinstance(written.placement, Shard):
        first = len(call.node.args[1])  # type: ignore[arg-type]
        whole = isinstance(written.placement, Replicated) and written.dim == 0
        if isinstance(x.placement, Shard) and whole and x.placement.dim >= first:
            return x.placement
        return Unknown("a part of a shard is written to")
    return joined(call, [x, written], None)


def _any_unknown(operands: list[Operand]) -> bool:
    return any(isinstance(o.placement, Unknown) for o in operands)


def take(call: Call) -> Outcome:
    """gather, index_select: as `index`, along one dimension."""
    x, at = call.first(), call.operand("index")
    for o in partials([at]):
        raise Violation(Kind.NON_LINEAR, o.node, f"{call.name} uses a {o.placement} as an index")
    if not isinstance(at.placement, Replicated):
        return INHERITED if isinstance(at.placement, Unknown) else Unknown("a value is indexed by a shard")
    if isinstance(x.placement, Shard) and x.placement.dim == call.argument("dim") % x.dim:
        return Unknown("a sharded dimension is indexed")
    return without_uniform(x.placement)


def embedding(call: Call) -> Outcome:
    table, ids = (call.as_operand(argument) for argument in call.node.args[:2])
    for o in partials([ids]):
        raise Violation(Kind.NON_LINEAR, o.node, f"{call.name} uses a {o.placement} as an index")
    if not isinstance(ids.placement, Replicated):
        return INHERITED if isinstance(ids.placement, Unknown) else Unknown("a table is read at a shard of ids")
    if isinstance(table.placement, Shard):
        return Lookup() if table.placement.dim == 0 else Shard(ids.dim)
    return without_uniform(table.placement)


RULES = {
    aten.index.Tensor: index,
    **dict.fromkeys((aten.index_put.default, aten._unsafe_index_put.default), index_put),
    **dict.fromkeys((aten.gather.default, aten.index_select.default), take),
    aten.embedding.default: embedding,
}
