"""Read how a topk chooses the experts of tokens: what it looks at, and what becomes of the chosen scores.

    softmax         exp(x - amax(x)) / sum(exp(x - amax(x)))        over a row, in float32
    sigmoid         of each logit, in float32
    chosen_softmax  the softmax of the K largest logits

Each comes with what follows as far as it does: a sum that the weights are divided by, a factor, a cast.

Legend: T tokens, E experts, K choices per token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from graphfuse.ops.route_experts import DTYPES
from graphfuse.passes.expert_layers import is_expert_layer
from graphfuse.passes.graph_reading import CASTS, argument, aten, is_call, readers, same_shape, value, widens


class NotARouter(Exception):
    """What stands around a topk is none of the formulas; the message says what."""


@dataclass(frozen=True)
class Router:
    """The op's arguments, and the nodes that it takes the place of."""

    topk: Node
    ids: Node
    weights: Node
    logits: Node
    top_k: int
    scoring: str
    bias: Node | None = None
    normalise: bool = False
    eps: float = 0.0
    scale: float = 1.0


def read_router(topk: Node) -> Router | None:
    """The router around a topk; None if its ids are read by no layer of experts. Raises `NotARouter`."""
    values, ids = (_item(topk, index) for index in (0, 1))
    if ids is None or not any(is_expert_layer(user) and _is_ids(step.node, user) for step, user in readers(ids)):
        return None
    wanted, top_k = topk.args[:2]
    assert isinstance(wanted, Node)
    tensor = value(wanted)
    if tensor is None or tensor.dim() != 2 or not isinstance(tensor.shape[1], int) or not isinstance(top_k, int):
        raise NotARouter("the scores are not [tokens, experts]")
    if argument(topk, "dim") not in (1, -1) or not argument(topk, "largest"):
        raise NotARouter("not the largest scores of each token are taken")
    scoring, scores, bias, logits = _scores(wanted)
    if scoring == "chosen_softmax":
        weights = _softmax_over(values)
    else:
        weights = _weights(scores, values, ids, biased=bias is not None)
    logits = _unwidened(logits)
    for name, node in (("logits", logits), ("correction bias", bias)):
        found = None if node is None else value(node)
        if found is not None and found.dtype not in DTYPES:
            raise NotARouter(f"the {name} are {found.dtype}")
    return _with_what_follows(Router(topk, ids, weights, logits, top_k, scoring, bias))


def _is_ids(node: Node, experts: Node) -> bool:
    return argument(experts, "topk_ids") is node


def _item(node: Node, index: int) -> Node | None:
    return next((user for user in node.users if is_call(user, getitem) and user.args[1] == index), None)


def _scores(wanted: Node) -> tuple[str, Node, Node | None, Node]:
    """(scoring, scores, bias, logits) of what the topk looks at."""
    for scores, bias in ((wanted, None), *_summands(wanted)):
        for scoring, logits in (("softmax", _softmax_input(scores)), ("sigmoid", _sigmoid_input(scores))):
            if logits is None:
                continue
            tensor = value(logits)
            if tensor is None or tensor.dtype != torch.float32:
                raise NotARouter("the scores are not computed in float32")
            return scoring, scores, bias, logits
    if is_call(wanted, *CASTS) and not widens(wanted):
        raise NotARouter("the scores are rounded before the choice")
    return "chosen_softmax", wanted, None, wanted


def _summands(wanted: Node) -> list[tuple[Node, Node]]:
    """(scores, bias) if a value of each expert is added to the scores."""
    if not is_call(wanted, aten.add.Tensor) or argument(wanted, "alpha") != 1:
        return []
    total, (a, b) = value(wanted), wanted.args[:2]
    pairs = []
    for scores, bias in ((a, b), (b, a)):
        if is_call(bias, aten.unsqueeze.default) and bias.args[1] == 0:  # type: ignore[union-attr]
            bias = bias.args[0]  # type: ignore[union-attr]
        found, added = value(scores), value(bias)
        if total is None or found is None or added is None or total.dtype != torch.float32:
            continue
        if same_shape(found, total) and added.dim() == 1 and added.shape[0] == total.shape[1]:
            pairs.append((scores, bias))
    return pairs  # type: ignore[return-value]


def _sigmoid_input(node: Node) -> Node | None:
    return node.args[0] if is_call(node, aten.sigmoid.default) else None  # type: ignore[return-value]


def _softmax_input(node: Any) -> Node | None:
    """x, if a node is the softmax of x `[T, N]` over N: exp(x - amax(x)) divided by its sum."""
    if not is_call(node, aten.div.Tensor):
        return None
    exp, total = node.args[:2]
    if not is_call(exp, aten.exp.default) or not _is_of_rows(total, aten.sum.dim_IntList, exp):
        return None
    shifted = exp.args[0]
    if not is_call(shifted, aten.sub.Tensor) or argument(shifted, "alpha") != 1:
        return None
    x, largest = shifted.args[:2]
    return x if isinstance(x, Node) and _is_of_rows(largest, aten.amax.default, x) else None


def _is_of_rows(node: Any, target: Any, x: Node) -> bool:
    """Whether a node reduces each row of x `[T, N]` to a number, `[T, 1]`."""
    if not is_call(node, target) or node.args[0] is not x or node.kwargs.get("dtype") is not None:
        return False
    return list(argument(node, "dim") or ()) in ([1], [-1]) and bool(argument(node, "keepdim"))


def _weights(scores: Node, values: Node | None, ids: Node, *, biased: bool) -> Node:
    """The scores `[T, K]` of the chosen: those that the topk gives, or gathered ones."""
    gathered = [
        user
        for user in ids.users
        if is_call(user, aten.gather.default) and user.args[0] is scores and user.args[1] in (1, -1)
    ]
    if values is not None and values.users:
        if biased:
            raise NotARouter("the correction bias counts in the weights")
        if gathered:
            raise NotARouter("the scores of the chosen experts are read in two forms")
        return values
    if len(gathered) != 1:
        raise NotARouter(f"the scores of the chosen experts are read {len(gathered)} times")
    return gathered[0]


def _softmax_over(values: Node | None) -> Node:
    """The softmax of the chosen logits, which nothing else reads."""
    other = NotARouter("the scores are no softmax or sigmoid, nor are the weights a softmax of the chosen ones")
    if values is None:
        raise other
    x = _only_user(values)
    if x is None or not is_call(x, *CASTS) or not widens(x):
        x = values
    tensor = value(x)
    for shifted in x.users:
        exp = _only_user(shifted) if is_call(shifted, aten.sub.Tensor) else None
        for node in exp.users if exp is not None else ():
            if _softmax_input(node) is x and tensor is not None and tensor.dtype == torch.float32:
                amax, total = shifted.args[1], node.args[1]
                assert exp is not None
                if set(x.users) == {amax, shifted} and set(exp.users) == {total, node}:
                    return node
    raise other


def _unwidened(node: Node) -> Node:
    """Logits before casts that round nothing."""
    while is_call(node, *CASTS) and widens(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _with_what_follows(router: Router) -> Router:
    """With what becomes of the chosen scores: normalised, scaled, cast, each if it is all that reads the one before."""
    normalised = _normalised(router.weights)
    if normalised is not None:
        router = replace(router, weights=normalised[0], normalise=True, eps=normalised[1])
    user = _only_user(router.weights)
    if user is not None and is_call(user, aten.mul.Tensor, aten.mul.Scalar) and _is_number(user.args[1]):
        router = replace(router, weights=user, scale=float(user.args[1]))  # type: ignore[arg-type]
        user = _only_user(user)
    after = value(user)
    if user is not None and is_call(user, *CASTS) and after is not None and after.dtype in DTYPES:
        router = replace(router, weights=user)
    return router


def _normalised(weights: Node) -> tuple[Node, float] | None:
    """(weights / (their sum + eps), eps)."""
    total = next((user for user in weights.users if _is_of_rows(user, aten.sum.dim_IntList, weights)), None)
    divisor, eps = total, 0.0
    if total is not None:
        added = _only_user(total)
        if is_call(added, aten.add.Tensor, aten.add.Scalar) and _is_number(added.args[1]):  # type: ignore[union-attr]
            assert added is not None
            divisor, eps = added, float(added.args[1]) * float(argument(added, "alpha"))  # type: ignore[arg-type]
    quotient = None if divisor is None else _only_user(divisor)
    if total is None or quotient is None or not is_call(quotient, aten.div.Tensor):
        return None
    if quotient.args != (weights, divisor) or set(weights.users) != {total, quotient}:
        return None
    return quotient, eps


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)
