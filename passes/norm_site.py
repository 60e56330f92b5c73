"""What the rules that fuse an RMSNorm into a reduction have in common: the checks on the norm, and the replacement."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from graphfuse.passes.graph_reading import describe, readers, replay, same_dim, value
from graphfuse.passes.norm_weight import bring_before, comes_from_inputs
from graphfuse.passes.reciprocal_root import NearMiss
from graphfuse.passes.reductions import Reduction
from graphfuse.passes.rms_norm import RMSNorm, find_rms_norm
from graphfuse.passes.rule import Decline

PLACE = ("nn_module_stack", "stack_trace", "graphfuse_path")
"""What a new node takes over from the one it replaces: where it stands, and nothing about its arguments."""


def require_norm(start: Node, what: str) -> RMSNorm | Decline:
    """The RMSNorm that reads `start`, or why there is none. `what` names the value in the reason: "the sum"."""
    found = find_rms_norm(start)
    if isinstance(found, RMSNorm):
        return found
    if isinstance(found, NearMiss):
        return Decline(found.reason, residual=True)
    names = dict.fromkeys(describe(reader) for _, reader in readers(start))
    return Decline(f"no RMSNorm reads {what}; it feeds {', '.join(names) or 'nothing'}")


def norm_fits(norm: RMSNorm, reduction: Reduction) -> Decline | None:
    """Whether a fused op may compute this norm: same dtype out as in, a weight of that dtype, one vector long."""
    dtype, out = reduction.dtype, value(norm.output)
    if out is None or out.dtype != dtype:
        given = "unknown" if out is None else _short(out.dtype)
        return Decline(f"the norm gives {given}, the reduced value is {_short(dtype)}", residual=True)
    if norm.weight is None:
        return None
    weight = value(norm.weight)
    if weight is None or weight.dim() != 1 or not same_dim(weight.shape[0], reduction.hidden_size):
        return Decline("the norm's weight is not a vector as long as the last dimension", residual=True)
    if weight.dtype != dtype:
        return Decline(f"{_short(weight.dtype)} weight with {_short(dtype)} activations", residual=True)
    if norm.weight > reduction.node and not comes_from_inputs(norm.weight):
        return Decline("the norm's weight is computed after the reduction", residual=True)
    return None


def emit(
    graph: Graph,
    op: object,
    args: tuple,
    example: torch.Tensor,
    origin: Node,
    norm: RMSNorm,
    more: tuple[torch.Tensor, ...] = (),
) -> list[Node]:
    """Insert a fused op before `origin`. Its first two results are shaped like `example`, others like `more`. The first
    takes the place of the norm's output, the others are returned."""
    place = {key: origin.meta[key] for key in PLACE if key in origin.meta}
    contiguous = torch.empty_like(example, memory_format=torch.contiguous_format)
    fakes = (contiguous, torch.empty_like(contiguous), *more)
    if norm.weight is not None:
        bring_before(norm.weight, origin)
    results = []
    with graph.inserting_before(origin):
        call = graph.call_function(op, args)  # type: ignore[arg-type]
        call.meta = {**place, "val": fakes}
        for index, fake in enumerate(fakes):
            item = graph.call_function(operator.getitem, (call, index))
            item.meta = {**place, "val": fake}
            results.append(item)
    with graph.inserting_before(norm.output):  # sizes that views ask for may be computed behind `origin`
        output = replay(norm.views, results[0])
    norm.output.replace_all_uses_with(output)
    return results[1:]


def erase_reduction(graph: Graph, reduction: Reduction) -> None:
    """Remove the all_reduce and its wait. Dead code elimination keeps them: they count as side effects."""
    _erase_dead_copies(graph, reduction.wait)
    graph.erase_node(reduction.wait)
    graph.erase_node(reduction.node)


def _erase_dead_copies(graph: Graph, node: Node) -> None:
    """Views, casts and copies behind a value nobody reads any more."""
    for user in list(node.users):
        _erase_dead_copies(graph, user)
        if not user.users:
            graph.erase_node(user)


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}.get(
        dtype, str(dtype).removeprefix("torch.")
    )
