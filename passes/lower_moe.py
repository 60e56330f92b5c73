"""Give the experts of a layer their tuned Triton kernels.

    moe_experts(tokens, ...)      becomes      moe_experts(tokens, ..., launch=launch parameters)

Which launch parameters serve a layer is decided here, once, from its shape, its number format and the GPU's name: a
file of tuned ones if there is one, else the built-in heuristic. They become an argument of the op, so that no state
outside the graph says how it runs, and compiled graphs are told apart by them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from graphfuse.passes.expert_layers import FOUND, ExpertLayer, is_expert_layer
from graphfuse.passes.graph_reading import argument
from graphfuse.passes.rule import Context, Decline, Rule, Site
from graphfuse.tuning.moe_files import device_shared_memory, find_table
from graphfuse.tuning.moe_reading import Found
from graphfuse.tuning.moe_shared_memory import Limits
from graphfuse.tuning.moe_table import MoeTable

NAME = "lower_moe"


@dataclass(frozen=True)
class _Parts:
    node: Node
    layer: ExpertLayer


def anchor(node: Node) -> bool:
    """Experts that have no launch parameters so far."""
    return is_expert_layer(node) and not argument(node, "launch")


def match(node: Node, _context: Context) -> Site | Decline:
    layer = ExpertLayer.of(node)
    return Site(node, "moe_experts", None, layer.dtype, layer.shape.hidden_size, _Parts(node, layer))


def applies(site: Site, context: Context) -> Decline | None:
    if context.facts().device_type != "cuda":
        return Decline("the group computes on the CPU, where experts run on PyTorch's kernels")
    why_not = _why_not(site.parts.layer)
    return None if why_not is None else Decline(why_not)


def rewrite(_graph: Graph, site: Site, context: Context) -> None:
    parts: _Parts = site.parts
    found = _table(parts.layer, context)
    parts.node.kwargs = {**parts.node.kwargs, "launch": found.table.to_text()}
    parts.node.meta[FOUND] = tuple(map(str, found.files)), tuple(found.notes)


def _table(layer: ExpertLayer, context: Context) -> Found:
    """Launch parameters for a layer. Raises `SchemaError` for a damaged file."""
    facts, shape = context.facts(), layer.shape
    limits = Limits.of(
        shape, facts.shared_memory or device_shared_memory(), layer.dtype.itemsize, rounds_tokens=layer.rounds_tokens
    )
    key = (shape, limits)
    if key not in context.moe_tables:
        if facts.gpu is None:
            note = "the ranks have different GPUs, or none that is known: no file was looked for"
            context.moe_tables[key] = Found(MoeTable(shape, notes=(note,), limits=limits))
        else:
            context.moe_tables[key] = find_table(
                shape, facts.gpu, folder=context.moe_config_dir, limits=limits, triton_version=facts.triton
            )
    return context.moe_tables[key]


def _why_not(layer: ExpertLayer) -> str | None:
    """Why the Triton kernels cannot run a layer, told by its shapes and dtypes."""
    try:
        from graphfuse.ops import moe_triton  # here, since Triton is published for Linux only
    except ImportError as error:
        return f"the Triton kernels cannot be imported ({error})"
    return moe_triton.can_run(layer.tokens, layer.weights, layer.dtype, layer.activation)


LOWER_MOE = Rule(name=NAME, anchor=anchor, match=match, applies=applies, rewrite=rewrite, needs_group=False)
