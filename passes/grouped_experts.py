"""Read the chain of ops that transformers' experts become under `experts_implementation="grouped_mm"`.

    tokens [T, H] ─► rows of the sorted choices ─► grouped product ─► act(gate) * up ─► grouped product
        ─► * weights ─► back into the choices' order ─► [T, K, H] ─► sum over K

Around each product a bias may be added, and rows of experts that are not held zeroed. Casts to a wider dtype are seen
through. Anything else raises `NotThisChain`, which says what it is.

Legend: T tokens, H hidden, E experts held, I intermediate, K choices a token, S = T * K rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from graphfuse.passes.gated_activation import GatedActivation, read_gated_activation
from graphfuse.passes.graph_reading import CASTS, argument, aten, describe, is_call, same_dim
from graphfuse.passes.sorted_choices import NotThisChain, SortedChoices, must_be_tensor, must_call


def is_grouped_product(node: object) -> bool:
    """Torch's, or the op that transformers puts in its place for dtypes other than bfloat16."""
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    return node.target is aten._grouped_mm.default or str(node.target) == "transformers.grouped_mm_fallback.default"


def last_grouped_product(node: Node) -> bool:
    """Anchor: the last of the grouped products that read the same offsets, one for each layer of experts."""
    if not is_grouped_product(node):
        return False
    offsets = _offsets(node)
    others = offsets.users if isinstance(offsets, Node) else ()
    return not any(is_grouped_product(other) and node < other for other in others)


@dataclass(frozen=True)
class Experts:
    """What the chain computes, as arguments of `graphfuse::moe_experts`."""

    tokens: Node
    topk_ids: Node
    topk_weights: Node
    gate_up: Node
    down: Node
    gate_up_bias: Node | None
    down_bias: Node | None
    transposed: bool
    activation: GatedActivation
    results: tuple[Node, ...]
    """The nodes that the op replaces: the sum `[T, H]`, and the cast to the tokens' dtype if there is one."""


@dataclass
class _Chain:
    """One chain while it is read."""

    choices: SortedChoices
    rows: dict[Node, None] = field(default_factory=dict)
    """The values that hold rows, which nothing outside the chain may read."""

    def add(self, *nodes: Node) -> None:
        self.rows.update(dict.fromkeys(nodes))


def read_experts(down: Node) -> Experts:
    """The chain around its last grouped product. Raises `NotThisChain`."""
    chain = _Chain(SortedChoices.read(_offsets(down), int(must_be_tensor(down.args[1]).shape[0])))
    activated, down_matrix = _operands(down, chain)
    activation = read_gated_activation(activated, must_be_tensor(down).dtype)
    if isinstance(activation, str):
        raise NotThisChain(activation)
    chain.add(*activation.nodes)
    gate_up, gate_up_bias = _behind(activation.source, chain)
    gathered, gate_up_matrix = _operands(gate_up, chain)
    tokens = chain.choices.tokens_of(_unmasked(gathered, chain))
    (first, first_transposed), (second, second_transposed) = _stored(gate_up_matrix), _stored(down_matrix)
    if first_transposed != second_transposed:
        raise NotThisChain("gate_up and down are stored in different orders of input and output")
    results, topk_weights, down_bias = _combined(down, tokens, chain)
    dtypes = [must_be_tensor(node).dtype for node in (tokens, first, second)]
    if len(set(dtypes)) > 1:
        raise NotThisChain(f"tokens and weights have different dtypes: {', '.join(map(_short, dtypes))}")
    for node in chain.rows:
        for user in node.users:
            if user not in chain.rows and user not in results:
                raise NotThisChain(f"an intermediate value has another reader: {describe(user)}")
    return Experts(
        tokens, chain.choices.topk_ids, topk_weights, first, second, gate_up_bias, down_bias, first_transposed,
        activation, results,
    )  # fmt: skip


# --- the products -----------------------------------------------------------------------------------------------------


def _operands(product: Node, chain: _Chain) -> tuple[Node, Node]:
    """The rows and the matrices `[E, input, output]` of a product over the chain's offsets."""
    if _offsets(product) is not chain.choices.offsets:
        raise NotThisChain("its two products count their rows differently")
    more = [*product.args[3:], *(v for k, v in product.kwargs.items() if k != "offs")]
    if any(setting is not None for setting in more):
        raise NotThisChain("its product has a bias or a dtype of its own")
    rows, matrix = product.args[:2]
    if not isinstance(rows, Node) or not isinstance(matrix, Node) or must_be_tensor(matrix).dim() != 3:
        raise NotThisChain("its product is not of rows and matrices")
    chain.add(product)
    return rows, matrix


def _stored(matrix: Any) -> tuple[Node, bool]:
    """A matrix as it is stored, and whether that is transposed: input first."""
    if is_call(matrix, aten.permute.default) and [dim % 3 for dim in matrix.args[1]] == [0, 2, 1]:
        return matrix.args[0], False
    if is_call(matrix, aten.transpose.int) and {dim % 3 for dim in matrix.args[1:]} == {1, 2}:
        return matrix.args[0], False
    return matrix, True


def _behind(rows: Node, chain: _Chain) -> tuple[Node, Node | None]:
    """The product that gives rows, and the bias added to it."""
    rows = _unmasked(rows, chain)
    if is_grouped_product(rows):
        return rows, None
    addition = must_call(rows, "the input of the activation", aten.add.Tensor)
    product = next((operand for operand in addition.args if is_grouped_product(operand)), None)
    if product is None or addition.kwargs:
        raise NotThisChain("the input of the activation is the sum of other things than a product and a bias")
    chain.add(addition)
    return product, chain.choices.bias_of(_other(addition, product))


def _unmasked(rows: Node, chain: _Chain) -> Node:
    chain.add(rows)
    inner = chain.choices.unmasked(rows)
    chain.add(inner)
    return inner


# --- behind the products ----------------------------------------------------------------------------------------------


def _combined(down: Node, tokens: Node, chain: _Chain) -> tuple[tuple[Node, ...], Node, Node | None]:
    """The sum over the choices with its cast, their weights `[T, K]`, and the bias of the second product."""
    bias, rows, node = None, down, _reader(down)
    if is_call(node, aten.add.Tensor) and not node.kwargs:
        bias = chain.choices.bias_of(_other(node, rows))
        rows, node = node, _reader(node)
        chain.add(rows)
    if chain.choices.unmasked(node) is rows and node is not rows:
        rows, node = node, _reader(node)
        chain.add(rows)
    product = must_call(node, "the reader of the second product", aten.mul.Tensor)
    weights = chain.choices.weights_of(_other(product, rows))
    back = must_call(_reader(product), "the reader of the weighted rows", aten.index.Tensor)
    if not chain.choices.is_back(back, product):
        raise NotThisChain("the weighted rows are not brought back into the order of the choices")
    view = must_call(_reader(back), "the reader of the weighted rows", aten.view.default, aten.reshape.default)
    total = must_call(_reader(view), "the reader of the weighted rows", aten.sum.dim_IntList)
    by_choice, hidden = must_be_tensor(view), must_be_tensor(tokens).shape[1]
    divided = by_choice.dim() == 3 and by_choice.shape[1] == chain.choices.top_k
    if not divided or not same_dim(by_choice.shape[2], hidden):
        raise NotThisChain("the weighted rows are not divided into [tokens, choices, hidden]")
    if [dim % 3 for dim in argument(total, "dim") or ()] != [1] or argument(total, "keepdim"):
        raise NotThisChain("the weighted rows are not summed over the choices")
    chain.add(product, back, view)
    wanted, given = must_be_tensor(tokens).dtype, must_be_tensor(total).dtype
    if given == wanted:
        return (total,), weights, bias
    cast = next(iter(total.users)) if len(total.users) == 1 else None
    if cast is None or not is_call(cast, *CASTS) or must_be_tensor(cast).dtype != wanted:
        raise NotThisChain(f"the sum is {_short(given)}, the tokens are {_short(wanted)}")
    return (total, cast), weights, bias


# --- small questions --------------------------------------------------------------------------------------------------


def _reader(node: Node) -> Node:
    """The one reader of a value."""
    if len(node.users) != 1:
        others = ", ".join(describe(user) for user in list(node.users)[1:]) or "nobody"
        raise NotThisChain(f"an intermediate value has another reader: {others}")
    return next(iter(node.users))


def _other(node: Node, operand: Node) -> object:
    """The other operand of a sum or product."""
    return node.args[1] if node.args[0] is operand else node.args[0]


def _offsets(product: Node) -> object:
    return product.args[2] if len(product.args) > 2 else product.kwargs.get("offs")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
