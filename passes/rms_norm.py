"""Recognise an RMSNorm by its structure, whoever wrote it.

    x ─► [cast f32] ─► square ─► mean(-1, keepdim) ─► + eps ─► rsqrt ─┐
              └──────────────────────────────────────────────────────►mul ─► [cast] ─► [* weight] ─► [cast]

The left part is `reciprocal_root.py`, the weight `norm_weight.py`; operands stand in either order, views anywhere. The
ops by name (`aten.rms_norm`, `aten._fused_rms_norm`) count too. Three roundings are told apart, because fused kernels
must keep them: w * cast(x * rstd) (Llama), cast(x * rstd * w) (gpt-oss, and Gemma with 1 + w), and no cast at all.
Any other rounding on the way (a cast to a third dtype, or down and up again) makes it another function.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from graphfuse.passes.gated_norm import gate_of
from graphfuse.passes.graph_reading import (
    CASTS,
    Step,
    aten,
    is_call,
    reaches,
    readers,
    value,
    widens,
)
from graphfuse.passes.norm_weight import plain_weight, weight_operand
from graphfuse.passes.reciprocal_root import TENSOR_EPS, NearMiss, ReciprocalRoot, find_reciprocal_root


@dataclass(frozen=True)
class RMSNorm:
    """A norm found behind a value. Replacing `output` by the fused op's result removes it from the graph."""

    output: Node
    views: tuple[Node, ...]
    """Views between the value and the output, to be replayed on the fused result."""
    weight: Node | None
    weight_bias: float
    eps: float
    cast_before_weight: bool


def find_rms_norm(start: Node) -> RMSNorm | NearMiss | None:
    """The first RMSNorm that reads `start` ([..., H]); else the closest near miss; else None."""
    x = value(start)
    if x is None:
        return None
    miss: NearMiss | None = None
    for step, reader in readers(start):
        found = _by_name(step, reader, x.dtype) or _by_structure(start, step, reader, x.dtype)
        if isinstance(found, RMSNorm):
            found = _rounded_on_the_way(step, x.dtype) or found
        if isinstance(found, RMSNorm):
            return found
        miss = miss or found
    return miss


def _rounded_on_the_way(step: Step, dtype: torch.dtype) -> NearMiss | None:
    """Why a norm of this form of the value is not one of the value itself, computed in float32 (float64 if it is)."""
    form = value(step.node)
    if form is None or not all(map(widens, step.casts)):
        return NearMiss("the value is rounded to another dtype before the norm")
    if form.dtype == torch.float64 != dtype:
        return NearMiss("the norm is computed in float64, the fused op would compute it in float32")
    return None


# --- by name ----------------------------------------------------------------------------------------------------------


def _by_name(step: Step, reader: Node, dtype: torch.dtype) -> RMSNorm | NearMiss | None:
    if is_call(
        reader,
        aten.native_layer_norm.default,
        aten.layer_norm.default,
        aten.var_mean.correction,
        aten.var_mean.dim,
    ):
        return NearMiss("a LayerNorm follows, not an RMSNorm")
    if is_call(reader, aten.mean.dim) and any(is_call(user, aten.sub.Tensor) for user in reader.users):
        return NearMiss("a LayerNorm follows, not an RMSNorm")  # written out, as Cohere's
    if not is_call(reader, aten.rms_norm.default, aten._fused_rms_norm.default) or reader.args[0] is not step.node:
        return None
    x, weight, eps = value(step.node), _argument(reader, 2, "weight"), _argument(reader, 3, "eps")
    if x is None:
        return None
    normalized_shape = _argument(reader, 1, "normalized_shape")
    if not isinstance(normalized_shape, (list, tuple)) or len(normalized_shape) != 1:
        return NearMiss("the norm runs over more than the last dimension")
    if isinstance(eps, Node):
        return NearMiss(TENSOR_EPS)
    output = reader
    if is_call(reader, aten._fused_rms_norm.default):
        items = {n.args[1]: n for n in reader.users if n.op == "call_function"}
        if set(items) != {0}:
            return NearMiss("the norm's reciprocal root is read as well")
        output = items[0]
    done = _rounded(Step(output, step.views), dtype)
    node, bias = plain_weight(weight, dtype, x.shape[-1]) if isinstance(weight, Node) else (None, 0.0)
    eps = float(eps) if isinstance(eps, (int, float)) else torch.finfo(x.dtype).eps
    return RMSNorm(done.node, done.views, node, bias, eps, cast_before_weight=False)


def _argument(node: Node, index: int, name: str) -> object:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name)


# --- by structure -----------------------------------------------------------------------------------------------------


def _by_structure(start: Node, step: Step, square: Node, dtype: torch.dtype) -> RMSNorm | NearMiss | None:
    """The chain from a square of the value to the norm's output."""
    root = find_reciprocal_root(step.node, square)
    if root is None or isinstance(root, NearMiss):
        return root
    # T5 and its kin multiply the value as it came, bf16, with the float32 root: the same product
    same = [form.node for form in reaches(start) if form.views == step.views and all(map(widens, form.casts))]
    product = _normalised([step.node, *same], root)
    return None if product is None else _with_weight(Step(product, step.views), root.eps, dtype)


def _normalised(forms: Iterable[Node], root: ReciprocalRoot) -> Node | None:
    """x * rstd, or x / sqrt(...), where x is the squared value, perhaps in another dtype that holds it exactly."""
    for x in forms:
        for reader in root.node.users:
            if root.divides:
                if is_call(reader, aten.div.Tensor) and reader.args == (x, root.node) and not reader.kwargs:
                    return reader
            elif is_call(reader, aten.mul.Tensor) and set(reader.args) == {x, root.node}:
                return reader
    return None


def _with_weight(product: Step, eps: float, dtype: torch.dtype) -> RMSNorm | NearMiss:
    """From x * rstd through casts and the weight to the norm's output."""
    x = value(product.node)
    weight, bias, cast_before_weight, done = None, 0.0, False, _rounded(product, dtype)
    for form, reader in readers(product.node):
        vector = weight_operand(reader, form.node, x.shape[-1]) if x is not None else None
        if vector is not None and all(widens(cast) or _gives(cast, dtype) for cast in form.casts):
            weight, bias = plain_weight(vector, dtype, value(vector).shape[-1])  # type: ignore[union-attr]
            cast_before_weight = bool(form.casts)
            done = _rounded(Step(reader, (*product.views, *form.views)), dtype)
            break
    gate = gate_of(done.node)
    if gate is not None:
        return NearMiss(f"a gated RMSNorm follows (its output is multiplied by {gate})")
    return RMSNorm(done.node, done.views, weight, bias, eps, cast_before_weight)


def _rounded(step: Step, dtype: torch.dtype) -> Step:
    """The value after the cast back to the model's dtype, if that cast is its only reader."""
    users = list(step.node.users)
    if not _gives(step.node, dtype) and len(users) == 1 and users[0].target in CASTS and _gives(users[0], dtype):
        return step.through(users[0]) or step
    return step


def _gives(node: Node, dtype: torch.dtype) -> bool:
    val = value(node)
    return val is not None and val.dtype == dtype
