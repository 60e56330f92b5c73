"""Recognise a rotary embedding in front of attention by its structure, whoever wrote it.

    x ─┬────────────────────────────────► mul(cos) ─► + ─► the rotated heads
       └► halves ─► cat([-second, first]) ─► mul(sin) ┘

and, where only the first R dimensions of a head are rotated,

    x ─┬► [..., :R] ─► as above ─► cat ─► the rotated heads
       └► [..., R:] ───────────────┘

Operands stand in either order; parts are slices or pieces of a split. Matching walks *backward* from the result, since
that is what attention reads. A rotation of adjacent pairs is another, and so is one that changes the dtype on its way.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from graphfuse.passes.graph_reading import VIEWS, argument, aten, is_call, same_dim, same_shape, value


@dataclass(frozen=True)
class Rotation:
    """Heads x `[B, S, heads, D]`, and the cos and sin `[B, S, 1, R]` that their first R dimensions are rotated by."""

    x: Node
    cos: Node
    sin: Node


def find_rotation(output: Node) -> Rotation | None:
    """The rotation whose result `output` is, seen through views that change nothing; None if it is none."""
    output = behind_views(output)
    parts = _concatenated(output)
    if parts is None:
        return _whole(output, None)
    rotated, kept = parts
    source = _cut_from(kept)
    while source is not None:
        found = _whole(rotated, source)
        if found is not None:
            return found if _is_span(kept, source, _size(rotated), _size(source)) else None
        source = _cut_from(source)
    return None


def behind_views(node: Node) -> Node:
    """What a value is a view or a copy of, with the same shape and dtype."""
    while is_call(node, *VIEWS):
        before, after = value(node.args[0]), value(node)
        if before is None or after is None or before.dtype != after.dtype or not same_shape(before, after):
            break
        node = node.args[0]  # type: ignore[assignment]
    return node


def _whole(total: Node, source: Node | None) -> Rotation | None:
    """A rotation of x, or of the first dimensions of `source`."""
    if not _of_one_dtype(total, aten.add.Tensor):
        return None
    for straight, turned in _both_ways(total):
        if not _of_one_dtype(straight, aten.mul.Tensor) or not _of_one_dtype(turned, aten.mul.Tensor):
            continue
        for cat, sin in _both_ways(turned):
            for part, cos in _both_ways(straight):
                x = behind_views(part) if source is None else source
                if _fits(cos, part) and _fits(sin, part) and _turns(cat, part, x):
                    return Rotation(x, cos, sin)
    return None


def _turns(cat: Node, part: Node, x: Node) -> bool:
    """Whether `part` is the first dimensions of x, and cat its halves with the second, negated, in front."""
    pieces, size = _concatenated(behind_views(cat)), _size(part)
    if pieces is None or not isinstance(size, int) or size % 2 or not _is_span(part, x, 0, size):
        return False
    negated, first = pieces
    return (
        is_call(negated, aten.neg.default)
        and _is_span(first, x, 0, size // 2)
        and _is_span(negated.args[0], x, size // 2, size)  # type: ignore[arg-type]
    )


def _fits(row: Node, part: Node) -> bool:
    """Whether cos or sin is `[B, S, 1, R]` for a part `[B, S, heads, R]`, all of one dtype."""
    a, b = value(row), value(part)
    if a is None or b is None or a.dim() != 4 or b.dim() != 4 or a.dtype != b.dtype:
        return False
    shape = (*b.shape[:2], 1, b.shape[3])
    return all(same_dim(x, y) for x, y in zip(a.shape, shape, strict=True))


def _of_one_dtype(node: Node, target: object) -> bool:
    """Whether a node is a call of two tensors that have the dtype of its result, and of nothing else."""
    if not is_call(node, target) or len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1:
        return False
    found = [value(n) for n in (node, *node.args)]
    return all(v is not None and found[0] is not None and v.dtype == found[0].dtype for v in found)


def _both_ways(node: Node) -> tuple[Any, Any]:
    return node.args, node.args[::-1]


def _concatenated(node: Node) -> tuple[Node, Node] | None:
    """Two tensors that are put side by side along the last dimension."""
    val = value(node)
    if val is None or not is_call(node, aten.cat.default) or len(node.args) != 2:
        return None
    pieces, dim = node.args
    if not isinstance(pieces, (list, tuple)) or len(pieces) != 2 or dim not in (-1, val.dim() - 1):
        return None
    first, second = (behind_views(piece) for piece in pieces)  # type: ignore[arg-type]
    return first, second


# --- parts of the last dimension --------------------------------------------------------------------------------------


def _is_span(node: Node, source: Node, start: object, stop: object) -> bool:
    """Whether a value is `source[..., start:stop]`."""
    offset: object = 0
    length, node = _size(node), behind_views(node)
    while node is not source:
        before, cut = _cut_from(node), _offset(node)
        if before is None or cut is None:
            return False
        offset, node = offset + cut, before  # type: ignore[operator]
    return same_dim(offset, start) and same_dim(length, stop - start)  # type: ignore[operator]


def _cut_from(node: Node) -> Node | None:
    """What a value is a part of."""
    if _offset(node) is None:
        return None
    base = node.args[0]
    if is_call(node, operator.getitem):
        base = base.args[0]  # type: ignore[union-attr]
    return behind_views(base)  # type: ignore[arg-type]


def _offset(node: Node) -> int | None:
    """Where a part begins in what it is a part of: a slice, or a piece of a split, of the last dimension."""
    val = value(node)
    if val is None:
        return None
    last = (-1, val.dim() - 1)
    if is_call(node, aten.slice.Tensor):
        start = argument(node, "start") or 0
        is_part = argument(node, "dim") in last and argument(node, "step") == 1
        return start if is_part and isinstance(start, int) and start >= 0 else None
    if not is_call(node, operator.getitem):
        return None
    split: Any
    index: Any
    split, index = node.args
    if is_call(split, aten.split.Tensor) and argument(split, "dim") in last:
        size = argument(split, "split_size")
        return size * index if isinstance(size, int) else None
    if is_call(split, aten.split_with_sizes.default) and argument(split, "dim") in last:
        sizes = argument(split, "split_sizes")[:index]
        return sum(sizes) if all(isinstance(size, int) for size in sizes) else None
    return None


def _size(node: Node) -> int | torch.SymInt | None:
    val = value(node)
    return None if val is None or not val.dim() else val.shape[-1]
