"""Fuse the FP8 rounding of a norm's output into the fused reduction before it.

    partial ─► all_reduce ─► wait ─► [add(residual) ─►] rms_norm ─► quantise_fp8(form) ─► (quantised, scale)   becomes
    partial ─► all_reduce_add_rms_norm_fp8([residual,] weight, form) ─► (normed, residual', quantised, scale)

Forms: a given scale, one for each token, one for each group of 128. The normed value stays a result: a router, say, may
read it unquantised. Roundings of one form (and one scale) that read the same norm are one; those of another form stay
as they are, and read the normed value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from graphfuse.kernels.norm_epilogue import FP8_GROUP
from graphfuse.ops import fp8_linear, fused_all_reduce  # noqa: F401  (register the ops)
from graphfuse.passes.fuse_add_rms_norm import FUSE_ADD_RMS_NORM, AddNorm, partial_with_bias
from graphfuse.passes.fuse_rms_norm import FUSE_RMS_NORM, Norm
from graphfuse.passes.graph_reading import (
    argument,
    describe,
    is_call,
    is_fresh_and_unshared,
    readers,
    value,
    widens,
)
from graphfuse.passes.norm_site import emit, erase_reduction
from graphfuse.passes.norm_weight import bring_before, comes_from_inputs
from graphfuse.passes.reductions import all_reduce
from graphfuse.passes.rms_norm import RMSNorm
from graphfuse.passes.rule import Context, Decline, Rule, Site

OP = "all_reduce_add_rms_norm_fp8"
QUANTISE = torch.ops.graphfuse.quantise_fp8.default


@dataclass(frozen=True)
class _Parts:
    plain: Site
    """The site without its quantisation, of either rule."""

    rule: Rule
    """The rule whose site that is."""

    form: str
    scale: Node | None
    roundings: tuple[Node, ...]
    """Alike, and so all given by the fused op."""


def match_quantised_norm(node: Node, context: Context) -> Site | Decline:
    for rule in (FUSE_ADD_RMS_NORM, FUSE_RMS_NORM):
        plain = rule.match(node, context)
        if isinstance(plain, Site):
            return _quantised(plain, rule)
    return Decline("no RMSNorm follows whose output is rounded to FP8", remote=True)


def _quantised(plain: Site, rule: Rule) -> Site | Decline:
    norm: RMSNorm = plain.parts.norm
    found = [(step, user) for step, user in readers(norm.output) if is_call(user, QUANTISE)]
    if not found:
        return Decline("the norm's output is not rounded to FP8", remote=True)
    exact = [user for step, user in found if not step.views and not norm.views and all(map(widens, step.casts))]
    if not exact:
        return Decline(f"the norm's output changes its shape or dtype before it is rounded by {describe(found[0][1])}")
    form, scale = (argument(exact[0], name) for name in ("form", "scale"))
    alike = tuple(user for user in exact if (argument(user, "form"), argument(user, "scale")) == (form, scale))
    return Site(plain.anchor, OP, plain.norm, plain.dtype, plain.hidden_size, _Parts(plain, rule, form, scale, alike))


def applies(site: Site, context: Context) -> Decline | None:
    parts: _Parts = site.parts
    if parts.form == "group" and site.hidden_size % FP8_GROUP:
        return Decline(f"the hidden size is {site.hidden_size}, not whole groups of {FP8_GROUP}")
    if parts.scale is not None:
        scale = value(parts.scale)
        if scale is None or scale.dtype != torch.float32:
            return Decline("the scale of the rounding is not known to be float32")
        if parts.scale > site.anchor and not comes_from_inputs(parts.scale):
            return Decline("the scale of the rounding is computed after the reduction")
    return parts.rule.applies(parts.plain, context)


def emit_fused(graph: Graph, site: Site, context: Context) -> None:
    parts: _Parts = site.parts
    plain: AddNorm | Norm = parts.plain.parts
    reduction, norm = plain.reduction, plain.norm
    is_dead = is_fresh_and_unshared(reduction.partial, reduction.node)
    if isinstance(plain, AddNorm):
        origin, residual, summed = plain.add, plain.residual, plain.add
        partial = partial_with_bias(graph, plain, context)
    else:
        origin, residual, summed, partial = reduction.node, None, reduction.wait, reduction.partial
    example = value(summed)
    assert example is not None and context.groups.name is not None
    if parts.scale is not None:
        bring_before(parts.scale, origin)
    args = (
        partial, residual, norm.weight, norm.eps, norm.weight_bias, norm.cast_before_weight, is_dead, parts.form,
        parts.scale, context.groups.name,
    )  # fmt: skip
    op = torch.ops.graphfuse.all_reduce_add_rms_norm_fp8.default
    total, *rounded = emit(graph, op, args, example, origin, norm, parts.roundings[0].meta["val"])
    for rounding in parts.roundings:
        for item in list(rounding.users):
            item.replace_all_uses_with(rounded[item.args[1]])  # type: ignore[index]
            graph.erase_node(item)
        graph.erase_node(rounding)
    summed.replace_all_uses_with(total)
    if isinstance(plain, AddNorm):
        graph.erase_node(plain.add)
    erase_reduction(graph, reduction)


FUSE_QUANTISED_NORM = Rule(
    name=OP,
    anchor=all_reduce,
    match=match_quantised_norm,
    applies=applies,
    rewrite=emit_fused,
    reduces=frozenset({torch.ops.graphfuse.all_reduce_add_rms_norm_fp8.default}),
    dispatched=True,
)
