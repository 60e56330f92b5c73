"""Read how a chain of grouped matrix products sorts the choices of experts, and finds its way back.

    ids [T, K] ─► flat [S] ─► sort ─► sorted ids, order ;   sorted ids ─► histc ─► cumsum ─► offsets
    order // K ─► whose token stands in each row ;   weights [T, K] ─► flat ─► index(order) ;   the inverse of order

Ids of E or more are of experts that are not held: their rows are behind all offsets, and may be zeroed by a mask.

Legend: T tokens, E experts held, K choices a token, S = T * K rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from graphfuse.passes.graph_reading import CASTS, argument, aten, describe, is_call, prims, value, widens

_FLAT_VIEWS = (aten.view.default, aten.reshape.default)


class NotThisChain(Exception):
    """The ops around a grouped product are others than those of the chain; the message says which."""


@dataclass(frozen=True)
class SortedChoices:
    offsets: Node
    """`[E]`: where each expert's rows end."""

    num_experts: int
    sorted_ids: Node
    order: Node
    """`[S]`: which choice stands in each row."""

    topk_ids: Node
    top_k: int

    @classmethod
    def read(cls, offsets: object, num_experts: int) -> SortedChoices:
        """From the offsets of a product over so many experts back to the ids."""
        summed = must_call(offsets, "the offsets of the grouped product", aten.cumsum.default)
        counts = must_call(summed.args[0], "the offsets", aten.histc.default)
        bins, low, high = (argument(counts, name) for name in ("bins", "min", "max"))
        if (bins, low, high) != (num_experts, 0, num_experts - 1):
            raise NotThisChain(f"rows are counted into {bins} bins from {low} to {high}, for {num_experts} experts")
        sorted_ids = uncast(counts.args[0])
        sort = must_call(_item(sorted_ids, 0), "the counted ids", aten.sort.default, aten.sort.stable)
        if argument(sort, "descending"):
            raise NotThisChain("the choices are sorted from the last expert to the first")
        order = [user for user in sort.users if _item(user, 1) is sort]
        if len(order) != 1:
            raise NotThisChain("the order of the sorted choices is not read")
        topk_ids = _unflattened(sort.args[0], "the ids")
        ids = must_be_tensor(topk_ids)
        if ids.dtype not in (torch.int32, torch.int64) or not isinstance(ids.shape[1], int):
            raise NotThisChain(f"the ids are {ids.dtype} for {ids.shape[1]} choices")
        return cls(summed, num_experts, sorted_ids, order[0], topk_ids, ids.shape[1])

    def tokens_of(self, gathered: Node) -> Node:
        """The tokens `[T, H]` of which those of each row's choice are taken."""
        must_call(gathered, "the rows of the first product", aten.index.Tensor)
        tokens, at = gathered.args[:2]
        floor = must_call(
            _only(at), "where tokens are taken from",
            aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.default,
        )  # fmt: skip
        rounds_down = floor.target is aten.floor_divide.default or floor.kwargs.get("rounding_mode") == "floor"
        if floor.args[0] is not self.order or floor.args[1] != self.top_k or not rounds_down:
            raise NotThisChain("the rows of the first product are not the tokens of the sorted choices")
        if not isinstance(tokens, Node) or must_be_tensor(tokens).dim() != 2:
            raise NotThisChain("the tokens are not [tokens, hidden]")
        return tokens

    def weights_of(self, share: object) -> Node:
        """The weights `[T, K]` of which those of each row's choice are taken, as a column."""
        column = must_call(uncast(share), "what the rows are multiplied with", aten.unsqueeze.default, *_FLAT_VIEWS)
        gathered = must_call(uncast(column.args[0]), "the weights of the rows", aten.index.Tensor)
        if _only(gathered.args[1]) is not self.order or must_be_tensor(column).shape[-1] != 1:
            raise NotThisChain("the rows are not multiplied with the weights of their choices")
        topk_weights = _unflattened(uncast(gathered.args[0]), "the weights")
        weights = must_be_tensor(topk_weights)
        if weights.shape[1] != self.top_k or not weights.is_floating_point():
            raise NotThisChain("there is not one weight for each choice")
        return topk_weights

    def bias_of(self, added: object) -> Node:
        """The biases `[E, N]` of which that of each row's expert is taken."""
        gathered = must_call(added, "what is added to a product", aten.index.Tensor)
        table, ids = gathered.args[0], _only(gathered.args[1])
        if is_call(ids, aten.clamp_max.default, aten.clamp.default) and self.num_experts - 1 in ids.args[1:]:
            ids = ids.args[0]
        if ids is not self.sorted_ids or not isinstance(table, Node) or must_be_tensor(table).dim() != 2:
            raise NotThisChain("what is added to a product is not a bias of each row's expert")
        return table

    def unmasked(self, rows: Any) -> Any:
        """Rows before those of experts that are not held were zeroed; the rows themselves if nothing was."""
        if is_call(rows, aten.where.self):
            mask, zero, inner = rows.args
        elif is_call(rows, aten.masked_fill.Scalar):
            inner, mask, zero = rows.args
        else:
            return rows
        sentinel: Any = mask.args[0] if is_call(mask, aten.unsqueeze.default) else None
        not_held = is_call(sentinel, aten.ge.Scalar) and sentinel.args == (self.sorted_ids, self.num_experts)
        if not not_held or not _is_zero(zero) or not isinstance(inner, Node):
            raise NotThisChain(f"rows are changed between the products: {describe(rows)}")
        return inner

    def is_back(self, back: Node, rows: Node) -> bool:
        """Whether an index brings rows back into the order of the choices: it reads them at the inverse of the order,
        which holds 0, 1, 2, ... at the places that the order names."""
        inverse = _only(back.args[1])
        if back.args[0] is not rows or not is_call(inverse, aten.index_put.default) or argument(inverse, "accumulate"):
            return False
        _, at, numbers = inverse.args[:3]
        return _only(at) is self.order and _counts_up(numbers)


def _counts_up(numbers: Any) -> bool:
    if is_call(numbers, prims.iota.default):
        return numbers.kwargs["start"] == 0 and numbers.kwargs["step"] == 1
    if is_call(numbers, aten.arange.start_step):
        return argument(numbers, "start") == 0 and argument(numbers, "step") == 1
    return is_call(numbers, aten.arange.default)


def _unflattened(flat: object, what: str) -> Node:
    """The `[T, K]` value of which all elements stand in a row."""
    view = must_call(flat, what, *_FLAT_VIEWS)
    source = view.args[0]
    if must_be_tensor(source).dim() != 2 or must_be_tensor(view).dim() != 1:
        raise NotThisChain(f"{what} are not flattened from [tokens, choices]")
    return source


def _only(indices: Any) -> Any:
    """The one tensor of an index of rows."""
    return indices[0] if isinstance(indices, list | tuple) and len(indices) == 1 else None


def _item(node: Any, index: int) -> Node | None:
    return node.args[0] if is_call(node, getitem) and node.args[1] == index else None


def _is_zero(node: Any) -> bool:
    if is_call(node, aten.scalar_tensor.default):
        node = node.args[0]
    elif is_call(node, aten.full.default):
        node = node.args[1]
    return not isinstance(node, Node) and node == 0


def uncast(node: Any) -> Any:
    """A value before casts that round nothing, and ids before they were made floats to be counted."""
    while is_call(node, *CASTS) and (widens(node) or not must_be_tensor(node.args[0]).is_floating_point()):
        node = node.args[0]
    return node


def must_call(node: object, what: str, *targets: object) -> Any:
    """The node, which must be a call of one of the targets."""
    if not is_call(node, *targets):
        raise NotThisChain(f"{what}: {describe(node) if isinstance(node, Node) else node} stands there")
    return node


def must_be_tensor(node: object) -> Tensor:
    """The fake tensor of a node."""
    tensor = value(node)
    if tensor is None:
        raise NotThisChain("a value of the chain has no known shape")
    return tensor
