"""graphfuse's own ops, and attention by name: heads are sharded, a fused op sums its first argument."""

from __future__ import annotations

from typing import Any

import torch

from graphfuse.ops import (  # noqa: F401  (register)
    attention,
    causal_conv,
    fused_all_reduce,
    gated_delta,
    mla,
    moe,
    norm_rotary,
    route_experts,
    select_tokens,
)
from graphfuse.passes.graph_reading import aten
from graphfuse.passes.placement.call import Call, Operand, all_replicated, ignorance, partials
from graphfuse.passes.placement.collectives import reduced
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
)
from graphfuse.passes.placement.views import value_tuple


def fused_reduction(call: Call) -> Outcome:
    """Sums its first argument; everything else it reads is added to the sum or scales it, and must be whole."""
    x, *others = call.tensors()
    x = call.first()
    name = call.argument("group_name") if call.has("group_name") else call.groups.name
    found = reduced(call, x, "sum", str(name))
    for o in others:
        if o.node is x.node:
            continue
        if isinstance(o.placement, Partial):
            text = f"{call.name} adds a {o.placement} to the sum: it must be summed before"
            raise Violation(Kind.RESIDUAL, o.node, text)
    if found == REPLICATED and not all_replicated([o for o in others if o.node is not x.node]):
        found = ignorance(others) or Unknown("a shard is added to a reduced value, or scales it")
    values = value_tuple(call.node)
    return (found,) * len(values) if values else found


def no_partial(call: Call, operands: list[Operand]) -> None:
    for o in partials(operands):
        raise Violation(Kind.NON_LINEAR, o.node, f"{call.name} is not linear, and reads a {o.placement}")


def heads(call: Call, dim: int, names: tuple[str, ...], whole: tuple[str, ...]) -> Placement:
    """Attention: queries, keys, values and caches all divided by heads, or all whole."""
    operands, rest = call.operands(names), call.operands(whole)
    no_partial(call, [*operands, *rest])
    unknown = ignorance([*operands, *rest])
    if unknown is not None:
        return unknown
    if all(o.placement == Shard(dim) for o in operands) and all_replicated(rest):
        return Shard(dim)
    if all_replicated([*operands, *rest]):
        return REPLICATED
    if operands[0].placement == Shard(dim) and all(o.placement == Shard(dim) or _one_head(o, dim) for o in operands):
        return Shard(dim) if all_replicated(rest) else Unknown("a mask or position is a shard")
    found = ", ".join(str(o.placement) for o in operands)
    return Unknown(f"attention whose operands are not all divided by heads ({found})")


def _one_head(o: Operand, dim: int) -> bool:
    """A key or value head that every query head reads."""
    return isinstance(o.placement, Replicated) and o.shape[dim] == 1


LAYOUT = ("entries", "pages", "states", "spans")
"""Arguments of a ragged call, which all ranks share."""


def own_attention(call: Call) -> Outcome:
    return _with_heads_of(call, "sinks", heads(call, 2, ("q", "k", "v", "k_cache", "v_cache"), ("positions", *LAYOUT)))


def rotation(call: Call) -> Outcome:
    """Each head by itself: divided or whole as it comes, its norm's weight and its angles the same for all."""
    heads, rest = call.operands(("q", "k")), call.operands(("cos", "sin", "q_weight", "k_weight"))
    no_partial(call, [*heads, *rest])
    unknown = ignorance(rest)
    if unknown is None and not all_replicated(rest):
        unknown = Unknown("heads are rotated by a shard of the angles, or weighed by one of the weight")
    return tuple(unknown or _kept_by_heads(head.placement) for head in heads)


def _kept_by_heads(placement: Placement) -> Placement:
    if isinstance(placement, Unknown) or placement in (Shard(2), REPLICATED):
        return placement
    return Unknown(f"heads that are {placement} are rotated")


def latent_attention(call: Call) -> Outcome:
    """Queries, and the matrix that makes keys and values, are divided by heads; every head reads all latents."""
    whole = ("latent", "k_rope", "positions", "latent_cache", "k_rope_cache", "selected", *LAYOUT)
    found = heads(call, 2, ("q_nope", "q_rope"), whole)
    return _with_heads_of(call, "kv_up", found)


def selection(call: Call) -> Outcome:
    """All ranks score all tokens with all heads of an indexer."""
    operands = call.operands(("q", "k", "weights", "positions", "k_cache", *LAYOUT))
    no_partial(call, operands)
    if all_replicated(operands):
        return REPLICATED
    return ignorance(operands) or Unknown("tokens are selected by a shard of what scores them")


def convolution(call: Call) -> Outcome:
    """Channels have filters and caches of their own: all divided by channels, or all whole."""
    return _by_unit(call, 2, {"x": 2, "weight": 0, "conv_cache": 1})


def delta_rule(call: Call) -> Outcome:
    """Heads have states of their own: all divided by heads, or all whole."""
    return _by_unit(call, 2, {"q": 2, "k": 2, "v": 2, "g": 2, "beta": 2, "state_cache": 1})


def _by_unit(call: Call, dim: int, dims: dict[str, int]) -> Placement:
    """An op that does the same to each unit of a dimension, with rows' positions and lengths that all units share."""
    rest = call.operands(("positions", "lengths", *LAYOUT))
    units = [(name, o, d) for name, d in dims.items() for o in call.operands((name,))]
    operands = [o for _, o, _ in units]
    no_partial(call, [*operands, *rest])
    unknown = ignorance([*operands, *rest])
    if unknown is not None:
        return unknown
    if all_replicated([*operands, *rest]):
        return REPLICATED
    if all_replicated(rest) and all(o.placement == Shard(d) for _, o, d in units):
        return Shard(dim)
    found = ", ".join(f"{name} {o.placement}" for name, o, _ in units)
    return Unknown(f"{call.name} whose operands are not all divided alike ({found})")


def _with_heads_of(call: Call, name: str, found: Placement) -> Placement:
    """`found`, if an operand's first dimension is divided by heads just as the result is."""
    operands = call.operands((name,))
    no_partial(call, operands)
    wanted = Shard(0) if isinstance(found, Shard) else REPLICATED
    if isinstance(found, Unknown) or all(o.placement == wanted for o in operands):
        return found
    return ignorance(operands) or Unknown(f"heads are {found}, but {name} {operands[0].placement}")


def named_attention(call: Call) -> Outcome:
    """aten's attention kernels: [B, heads, S, D]; further results are per head or not read."""
    found = heads(call, 1, ("query", "key", "value"), ("attn_mask", "attn_bias"))
    values = value_tuple(call.node)
    if not values:
        return found
    return tuple(found if i < 2 else REPLICATED for i in range(len(values)))


def experts(call: Call) -> Outcome:
    """The experts' inner dimension, or the experts, divided over the ranks: a partial sum."""
    whole = call.operands(("tokens", "topk_ids", "topk_weights", "tokens_scale", "intermediate_scale"))
    no_partial(call, whole)
    gate_up, down = call.operand("gate_up"), call.operand("down")
    inner = call.operands(("gate_up_bias", "gate_up_scale"))
    added = call.operands(("down_bias",))
    unknown = ignorance([*whole, gate_up, down, *inner, *added, *call.operands(("down_scale",))])
    if unknown is not None:
        return unknown
    if not all_replicated(whole):
        return Unknown("experts are given shards of tokens")
    if all_replicated([gate_up, down, *inner, *added]):
        return REPLICATED
    transposed = bool(call.argument("transposed"))
    dims = (gate_up.placement, down.placement)
    by_expert = dims == (Shard(0), Shard(0))
    by_inner = dims == ((Shard(2), Shard(1)) if transposed else (Shard(1), Shard(2)))
    if not (by_expert or by_inner):
        return Unknown(f"experts whose two matrices are divided unlike each other ({dims[0]}, {dims[1]})")
    for bias in added:
        if isinstance(bias.placement, Replicated) and not bias.placement.zero:
            raise Violation(Kind.BIAS, bias.node, f"{call.name} adds down_bias to a partial sum on every rank")
    return PARTIAL


def choice_of_experts(call: Call) -> Outcome:
    """Each row chooses for itself among all experts: whole, or divided by tokens."""
    logits, bias = call.operand("logits"), call.operands(("bias",))
    no_partial(call, [logits, *bias])
    unknown = ignorance([logits, *bias])
    if unknown is not None:
        return unknown
    if not all_replicated(bias) or logits.placement not in (REPLICATED, Shard(0)):
        return Unknown("experts are chosen by a shard of what scores them")
    return (logits.placement,) * 2


graphfuse = torch.ops.graphfuse
REDUCING = frozenset(
    {
        graphfuse.all_reduce_add_rms_norm.default,
        graphfuse.all_reduce_rms_norm.default,
        graphfuse.all_reduce_add_rms_norm_fp8.default,
    }
)
RULES: dict[Any, Any] = {
    **dict.fromkeys(REDUCING, fused_reduction),
    graphfuse.attention.default: own_attention,
    graphfuse.norm_rotary.default: rotation,
    graphfuse.mla_attention.default: latent_attention,
    graphfuse.select_tokens.default: selection,
    graphfuse.causal_conv.default: convolution,
    graphfuse.gated_delta.default: delta_rule,
    graphfuse.moe_experts.default: experts,
    graphfuse.route_experts.default: choice_of_experts,
    **dict.fromkeys(
        (
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten.scaled_dot_product_attention.default,
        ),
        named_attention,
    ),
}
