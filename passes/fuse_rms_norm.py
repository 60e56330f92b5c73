"""Fuse a tensor-parallel reduction with the RMSNorm that reads it directly, without a residual add between.

    partial ─► all_reduce ─► wait ─► rms_norm [─► add(residual)]      becomes
    partial ─► all_reduce_rms_norm(weight) ─► (normed, reduced) [─► add(residual), as it stands]

This is a sharded embedding before the first norm, and models that norm before they add (Gemma 2 and 3, OLMo 2, GLM-4
dense). Other readers of the reduced value read the op's second result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from graphfuse.ops import fused_all_reduce  # noqa: F401  (registers the op)
from graphfuse.passes.graph_reading import value
from graphfuse.passes.norm_site import emit, erase_reduction, norm_fits, require_norm
from graphfuse.passes.reductions import Reduction, all_reduce, gate_allows, sum_over_compiled_group
from graphfuse.passes.rms_norm import RMSNorm
from graphfuse.passes.rule import Context, Decline, Rule, Site

OP = "all_reduce_rms_norm"


@dataclass(frozen=True)
class Norm:
    reduction: Reduction
    norm: RMSNorm


def match_rms_norm(node: Node, context: Context) -> Site | Decline:
    reduction = sum_over_compiled_group(node, context)
    if isinstance(reduction, Decline):
        return reduction
    norm = require_norm(reduction.reduced, "the reduced value")
    if isinstance(norm, Decline):
        return norm
    return Site(node, OP, norm.output, reduction.dtype, reduction.hidden_size, Norm(reduction, norm))


def applies(site: Site, context: Context) -> Decline | None:
    parts: Norm = site.parts
    return norm_fits(parts.norm, parts.reduction) or gate_allows(parts.reduction, context)


def emit_fused(graph: Graph, site: Site, context: Context) -> None:
    parts: Norm = site.parts
    reduction, norm = parts.reduction, parts.norm
    example = value(reduction.reduced)
    assert example is not None and context.groups.name is not None
    args = (reduction.partial, norm.weight, norm.eps, norm.weight_bias, norm.cast_before_weight, context.groups.name)
    (reduced,) = emit(graph, torch.ops.graphfuse.all_reduce_rms_norm.default, args, example, reduction.node, norm)
    reduction.wait.replace_all_uses_with(reduced)
    erase_reduction(graph, reduction)


FUSE_RMS_NORM = Rule(
    name=OP,
    anchor=all_reduce,
    match=match_rms_norm,
    applies=applies,
    rewrite=emit_fused,
    reduces=frozenset({torch.ops.graphfuse.all_reduce_rms_norm.default}),
    dispatched=True,
)
