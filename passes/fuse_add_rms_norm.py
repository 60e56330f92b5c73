"""Fuse a tensor-parallel reduction with the residual add and RMSNorm that follow it.

    partial ─► all_reduce ─► wait ─► add(residual) ─► rms_norm      becomes
    partial ─► all_reduce_add_rms_norm(residual, weight) ─► (normed, residual')

The add and the norm may belong to the next layer, or the norm be the model's last: the graph does not know layers. The
bias of a row-parallel linear, added between the reduction and the residual, is added to the first rank's partial sum
instead: adding it to the residual, which is larger, would round more than the model does. So is a whole term that is
proved to be equal on every rank, such as a shared expert that the plan left unsharded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from graphfuse.ops import fused_all_reduce  # noqa: F401  (registers the op)
from graphfuse.passes.graph_reading import (
    VIEWS,
    aten,
    describe,
    is_call,
    is_fresh_and_unshared,
    is_parameter,
    readers,
    replay,
    same_shape,
    value,
)
from graphfuse.passes.merge_reductions import is_replicated
from graphfuse.passes.norm_site import emit, erase_reduction, norm_fits, require_norm
from graphfuse.passes.placement.pointwise import ONE_RANK_ADDS
from graphfuse.passes.reductions import Reduction, all_reduce, c10d, gate_allows, sum_over_compiled_group
from graphfuse.passes.rms_norm import RMSNorm
from graphfuse.passes.rule import Context, Decline, Rule, Site

OP = "all_reduce_add_rms_norm"


@dataclass(frozen=True)
class AddNorm:
    reduction: Reduction
    views: tuple[Node, ...]
    """Views between the reduction and the add; an elementwise sum over ranks commutes with them."""
    add: Node
    residual: Node
    bias: Node | None
    """A vector or a whole term that one rank adds to its partial sum, behind the first `bias_views` of the views."""
    bias_views: int
    norm: RMSNorm


def match_add_rms_norm(node: Node, context: Context) -> Site | Decline:
    reduction = sum_over_compiled_group(node, context)
    if isinstance(reduction, Decline):
        return reduction
    users = readers(reduction.reduced)
    if not users:
        return Decline("nothing reads the reduced value")
    adds = [(step, user) for step, user in users if is_call(user, aten.add.Tensor)]
    if not adds:
        names = ", ".join(dict.fromkeys(describe(user) for _, user in users))
        return Decline(f"no residual add follows; the reduced value feeds {names}")
    step, add = adds[0]
    others = [user for _, user in users if user is not add]
    if others:
        return Decline(f"the reduced value has another user: {describe(others[0])}", residual=True)
    views, casts, bias = step.views, step.casts, _bias(add, step.node, context)
    bias_views = len(views)
    if bias is not None:
        beyond = readers(add)
        if len(beyond) == 1 and is_call(beyond[0][1], aten.add.Tensor):
            step, add = beyond[0]
            views, casts = (*views, *step.views), (*casts, *step.casts)
    if casts:
        return Decline("the reduced value changes its dtype before the add", residual=True)
    residual = add.args[1] if add.args[0] is step.node else add.args[0]
    if not isinstance(residual, Node):
        return Decline("a constant is added, not a residual")
    if residual is step.node:
        return Decline("the reduced value is added to itself", residual=True)
    if add.kwargs.get("alpha", 1) != 1:
        return Decline("the add scales one of its operands", residual=True)
    norm = require_norm(add, "the sum")
    if isinstance(norm, Decline):
        return Decline(norm.reason, residual=True)
    parts = AddNorm(reduction, views, add, residual, bias, bias_views, norm)
    return Site(node, OP, norm.output, reduction.dtype, reduction.hidden_size, parts)


def _bias(add: Node, reduced: Node, context: Context) -> Node | None:
    """What is added before the residual: a vector, if it is a parameter, or a whole term. Only one rank will add it, so
    it must be equal on each."""
    other = add.args[1] if add.args[0] is reduced else add.args[0]
    added, total = value(other), value(add)
    if not isinstance(other, Node) or added is None or total is None or add.kwargs.get("alpha", 1) != 1:
        return None
    if added.dim() == 1:
        return other if is_parameter(other) else None
    if added.dtype != total.dtype or not same_shape(added, total) or not _a_residual_follows(add):
        return None
    return other if is_replicated(other, context) else None


def _a_residual_follows(add: Node) -> bool:
    """Whether one more add, of something that is no reduced value itself, is all that reads this one."""
    beyond = readers(add)
    if len(beyond) != 1 or not is_call(beyond[0][1], aten.add.Tensor):
        return False
    step, second = beyond[0]
    residual = second.args[1] if second.args[0] is step.node else second.args[0]
    while is_call(residual, *VIEWS):
        residual = residual.args[0]  # type: ignore[union-attr]
    return isinstance(residual, Node) and not is_call(residual, c10d.wait_tensor.default)


def applies(site: Site, context: Context) -> Decline | None:
    parts: AddNorm = site.parts
    reduced = value(parts.views[-1] if parts.views else parts.reduction.reduced)
    residual, total = value(parts.residual), value(parts.add)
    if reduced is None or residual is None or total is None:
        return Decline("the shape of the residual is not known", residual=True)
    if residual.dtype != site.dtype or total.dtype != site.dtype:
        return Decline(f"the residual is {residual.dtype}, the reduced value {site.dtype}", residual=True)
    if not same_shape(residual, reduced):
        return Decline("the residual is broadcast to the shape of the reduced value", residual=True)
    if total.shape[-1] != site.hidden_size:
        return Decline("views between the reduction and the add change the last dimension", residual=True)
    return norm_fits(parts.norm, parts.reduction) or gate_allows(parts.reduction, context)


def emit_fused(graph: Graph, site: Site, context: Context) -> None:
    parts: AddNorm = site.parts
    reduction, norm, add = parts.reduction, parts.norm, parts.add
    example = value(add)
    assert example is not None and context.groups.name is not None
    is_dead = is_fresh_and_unshared(reduction.partial, reduction.node)
    partial = partial_with_bias(graph, parts, context)
    options = (norm.weight, norm.eps, norm.weight_bias, norm.cast_before_weight, is_dead, context.groups.name)
    op = torch.ops.graphfuse.all_reduce_add_rms_norm.default
    (total,) = emit(graph, op, (partial, parts.residual, *options), example, add, norm)
    add.replace_all_uses_with(total)
    graph.erase_node(add)
    erase_reduction(graph, reduction)


def partial_with_bias(graph: Graph, parts: AddNorm, context: Context) -> Node:
    """The partial sum, shaped like the add, with the bias on one rank."""
    partial = parts.reduction.partial
    with graph.inserting_before(parts.add):
        if parts.bias is not None:
            # one graph on every rank, so that nothing can order their collectives differently; times 0 adds nothing
            share = 1.0 if context.groups.rank == 0 else 0.0
            shaped = replay(parts.views[: parts.bias_views], partial)
            partial = graph.call_function(aten.add.Tensor, (shaped, parts.bias), {"alpha": share})
            partial.meta = {**parts.reduction.node.meta, "val": value(shaped), ONE_RANK_ADDS: True}
            return replay(parts.views[parts.bias_views :], partial)
        return replay(parts.views, partial)


FUSE_ADD_RMS_NORM = Rule(
    name=OP,
    anchor=all_reduce,
    match=match_add_rms_norm,
    applies=applies,
    rewrite=emit_fused,
    reduces=frozenset({torch.ops.graphfuse.all_reduce_add_rms_norm.default}),
    dispatched=True,
)
