"""Choose the experts of each token in one kernel.

    logits ─► softmax or sigmoid ─► (+ bias) ─► topk ─► ids
                        └──► the chosen ones' ─► / (sum + eps) ─► * scale ─► cast ─► weights         becomes
    logits ─► route_experts(bias, normalise, eps, scale) ─► weights, ids

Scores are computed in float32. What follows the chosen scores may be left out from any point on, and stays as it is
from where a value has another reader; scores that are read elsewhere are computed there still. gpt-oss takes the
softmax of the chosen logits instead. Only ids that a layer of experts reads are looked at: kernels for other choices,
such as a sampler's, have other sizes to be made for.

Where scores are equal, topk may take any; the kernel takes the lowest id.
"""

from __future__ import annotations

from operator import getitem

import torch
from torch.fx import Graph, Node

from graphfuse.ops.route_experts import why_not
from graphfuse.passes.expert_layers import ROUTE
from graphfuse.passes.graph_reading import aten, is_call, value
from graphfuse.passes.routers import NotARouter, Router, read_router
from graphfuse.passes.rule import Context, Decline, Rule, Site


def anchor(node: Node) -> bool:
    return is_call(node, aten.topk.default)


def match(node: Node, _context: Context) -> Site | Decline:
    try:
        router = read_router(node)
    except NotARouter as reason:
        return Decline(f"experts are not chosen by a formula that is known: {reason}")
    if router is None:
        return Decline("no layer of experts reads what is chosen")
    weights, logits = value(router.weights), value(router.logits)
    assert weights is not None and logits is not None
    return Site(node, "route_experts", None, weights.dtype, int(logits.shape[1]), router)


def applies(site: Site, context: Context) -> Decline | None:
    if context.facts().device_type != "cuda":
        return Decline("the group computes on the CPU, where experts are chosen by PyTorch's kernels")
    reason = why_not(site.hidden_size, site.parts.top_k)
    return None if reason is None else Decline(reason)


def rewrite(graph: Graph, site: Site, _context: Context) -> None:
    router: Router = site.parts
    outputs = (router.weights, router.ids)
    with graph.inserting_before(router.topk):
        op = graph.call_function(
            torch.ops.graphfuse.route_experts.default,
            (
                router.logits, router.top_k, router.scoring, router.bias, router.normalise, router.eps, router.scale,
                site.dtype,
            ),
        )  # fmt: skip
        op.meta = {**router.topk.meta, "val": tuple(map(value, outputs))}
        for index, old in enumerate(outputs):
            new = graph.call_function(getitem, (op, index))
            new.meta = dict(old.meta)
            old.replace_all_uses_with(new)


ROUTE_EXPERTS = Rule(name=ROUTE, anchor=anchor, match=match, applies=applies, rewrite=rewrite, needs_group=False)
