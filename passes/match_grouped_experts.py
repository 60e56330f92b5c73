"""Put one op for the experts of a transformers model that runs them as grouped matrix products.

    sort ─► gather ─► grouped product ─► act(gate) * up ─► grouped product ─► * weights ─► back ─► sum
        becomes
    graphfuse::moe_experts

The ops between are those of `experts_implementation="grouped_mm"` (`passes/grouped_experts.py`). The sum over the
choices is accumulated in float32 either way, but the op does not round the weighted rows, where the chain rounds each.
Choices of experts that are not held, whose rows the chain sorts to the end and zeroes, count for nothing in the op.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from graphfuse.ops import moe as _moe  # noqa: F401  (registers the op)
from graphfuse.passes.graph_reading import value
from graphfuse.passes.grouped_experts import Experts, last_grouped_product, read_experts
from graphfuse.passes.rule import Context, Decline, Rule, Site
from graphfuse.passes.sorted_choices import NotThisChain

NAME = "match_grouped_experts"


def match(node: Node, _context: Context) -> Site | Decline:
    try:
        experts = read_experts(node)
    except NotThisChain as reason:
        return Decline(f"the grouped products are not transformers' experts: {reason}")
    result = value(experts.results[-1])
    assert result is not None
    return Site(node, "moe_experts", None, result.dtype, int(result.shape[-1]), experts)


def rewrite(graph: Graph, site: Site, _context: Context) -> None:
    experts: Experts = site.parts
    activation, weights = experts.activation, value(experts.gate_up)
    assert weights is not None
    num_experts = int(weights.shape[0])
    with graph.inserting_before(experts.results[-1]):
        op = graph.call_function(
            torch.ops.graphfuse.moe_experts.default,
            (
                experts.tokens, experts.gate_up, experts.down, experts.topk_ids, experts.topk_weights, num_experts, 0,
                experts.gate_up_bias, experts.down_bias,
                "interleaved" if activation.interleaved else "concatenated",
                experts.transposed, activation.name, activation.limit,
            ),
        )  # fmt: skip
    op.meta = dict(experts.results[-1].meta)
    for node in experts.results:
        node.replace_all_uses_with(op)
    for node in reversed(experts.results):
        graph.erase_node(node)


MATCH_GROUPED_EXPERTS = Rule(
    name=NAME,
    anchor=last_grouped_product,
    match=match,
    applies=lambda _site, _context: None,
    rewrite=rewrite,
    needs_group=False,
)
