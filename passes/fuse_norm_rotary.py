"""Make one op of the norm of queries and keys per head and of their rotary embedding, in front of attention.

    q ─► [rms_norm] ─► rotate(cos, sin) ─┐
    k ─► [rms_norm] ─► rotate(cos, sin) ─┴► attention     becomes     (q, k) ─► norm_rotary(cos, sin) ─► attention

Inductor makes up to six kernels of it, since each concatenation and each reduction ends one: µs a layer in decoding,
where `kernels/norm_rotary.py` is one launch. What a rotation looks like is in `rotation.py`, what a norm looks like in
`rms_norm.py`. The rule starts at `graphfuse::attention`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from graphfuse.ops import attention as _attention  # noqa: F401  (registers the op)
from graphfuse.ops.norm_rotary import DTYPES
from graphfuse.passes.graph_reading import argument, describe, is_call, same_dim, same_shape, value
from graphfuse.passes.norm_site import PLACE
from graphfuse.passes.rms_norm import RMSNorm, find_rms_norm
from graphfuse.passes.rotation import behind_views, find_rotation
from graphfuse.passes.rule import Context, Decline, Rule, Site

NAME = "norm_rotary"
_LONGEST_NORM = 8
"""Steps from a norm's output back to what it normalises, the most that is looked at."""


@dataclass(frozen=True)
class _Normalised:
    x: Node
    norm: RMSNorm


@dataclass(frozen=True)
class _Parts:
    """What the op is given, in its order, and whose places its two results take."""

    arguments: tuple
    outputs: tuple[Node, Node]


def anchor(node: Node) -> bool:
    return is_call(node, torch.ops.graphfuse.attention.default)


def match(node: Node, _context: Context) -> Site | Decline:
    outputs = argument(node, "q"), argument(node, "k")
    q, k = (find_rotation(output) for output in outputs)
    if q is None or k is None:
        names = {(True, True): "queries and keys", (True, False): "queries", (False, True): "keys"}
        return Decline(f"no rotation of two halves gives the {names[q is None, k is None]} of {describe(node)}")
    if q.cos is not k.cos or q.sin is not k.sin:
        return Decline("queries and keys are rotated by different angles")
    q_norm, k_norm = find_norm(q.x), find_norm(k.x)
    if (q_norm is None) != (k_norm is None):
        return Decline(f"only the {'keys' if q_norm is None else 'queries'} are normalised")
    arguments: tuple = (q.x, k.x, q.cos, q.sin)
    if q_norm is not None and k_norm is not None:
        forms = [(n.norm.eps, n.norm.weight_bias, n.norm.cast_before_weight) for n in (q_norm, k_norm)]
        if forms[0] != forms[1]:
            return Decline("queries and keys are normalised by different formulas")
        weights = (q_norm.norm.weight, k_norm.norm.weight)
        refusal = _weights_fit(weights, q_norm.x)
        if refusal is not None:
            return refusal
        arguments = (q_norm.x, k_norm.x, q.cos, q.sin, *weights, *forms[0])
    other = _other_reader(node, outputs, frozenset(a for a in arguments if isinstance(a, Node)))
    if other is not None:
        return Decline(f"{describe(other)} reads a part of it, so that it would be computed anyway")
    x = value(arguments[0])
    assert x is not None  # find_rotation knows its shape
    return Site(node, NAME, None, x.dtype, int(x.shape[-1]), _Parts(arguments, outputs))


def find_norm(output: Node) -> _Normalised | None:
    """The RMSNorm over the last dimension whose result `output` is, and what it normalises."""
    out = value(output)
    for x in _behind(output):
        val = value(x)
        if val is None or out is None or val.dtype != out.dtype or not same_shape(val, out):
            continue
        norm = find_rms_norm(x)
        if isinstance(norm, RMSNorm) and behind_views(norm.output) is output:
            return _Normalised(x, norm)
    return None


def _behind(output: Node) -> Iterator[Node]:
    """What a value is computed from, nearest first, a few steps back."""
    level, seen = [output], {output}
    for _ in range(_LONGEST_NORM):
        level = [source for node in level for source in node.all_input_nodes if source not in seen]
        seen.update(level)
        yield from dict.fromkeys(level)


def _weights_fit(weights: tuple[Node | None, ...], x: Node) -> Decline | None:
    heads = value(x)
    for weight in weights:
        w = value(weight)
        if w is None or heads is None:
            return Decline("the norm of queries and keys has no weight")
        if w.dim() != 1 or w.dtype != heads.dtype:
            return Decline(f"the norm's weight is no vector of the activations' dtype, but {w.dtype} of {w.dim()} dims")
    return None


def _other_reader(attention: Node, outputs: tuple[Node, Node], given: frozenset[Node]) -> Node | None:
    """Who reads something on the way from what the op is given to its results, besides what is on that way itself."""
    chain, pending = {attention}, list(outputs)
    while pending:
        node = pending.pop()
        if node in given or node in chain or not _is_computed(node):
            continue
        chain.add(node)
        pending.extend(node.all_input_nodes)
    return next((user for node in chain - {attention} for user in node.users if user not in chain), None)


def _is_computed(node: Node) -> bool:
    """Whether a node is a tensor, or several, that the graph computes, and no size."""
    val = node.meta.get("val")
    return node.op == "call_function" and isinstance(val, (Tensor, tuple, list))


def applies(site: Site, context: Context) -> Decline | None:
    if context.facts().device_type != "cuda":
        return Decline("the group computes on the CPU, where the formula runs as it stands")
    if site.dtype not in DTYPES:
        return Decline(f"there is no kernel for {site.dtype}")
    try:
        from graphfuse.kernels import norm_rotary  # noqa: F401  (Triton is published for Linux only)
    except ImportError as error:
        return Decline(f"the Triton kernel cannot be imported ({error})")
    return None


def rewrite(graph: Graph, site: Site, _context: Context) -> None:
    parts: _Parts = site.parts
    origin = parts.outputs[0]
    place = {key: origin.meta[key] for key in PLACE if key in origin.meta}
    fakes = tuple(_contiguous(output) for output in parts.outputs)
    with graph.inserting_before(site.anchor):
        call = graph.call_function(torch.ops.graphfuse.norm_rotary.default, parts.arguments)
        call.meta = {**place, "val": fakes}
        for index, (output, fake) in enumerate(zip(parts.outputs, fakes, strict=True)):
            item = graph.call_function(operator.getitem, (call, index))
            item.meta = {**place, "val": fake}
            site.anchor.replace_input_with(output, item)


def _contiguous(output: Node) -> Tensor:
    """What stands for the op's result in place of another one: its own value if that will do, since to make one takes
    milliseconds."""
    val = value(output)
    assert val is not None
    _, length, heads, size = val.shape
    steps = (length * heads * size, heads * size, size, 1)
    if all(same_dim(x, y) for x, y in zip(val.stride(), steps, strict=True)):
        return val
    return torch.empty_like(val, memory_format=torch.contiguous_format)


FUSE_NORM_ROTARY = Rule(name=NAME, anchor=anchor, match=match, applies=applies, rewrite=rewrite, needs_group=False)
