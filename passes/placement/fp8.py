"""Linears in FP8: rounding is not linear, the product is, with scales divided as what they belong to.

A rank that holds a part of each row rounds it with scales of its own. They are a shard of all ranks' scales, side by
side: what a rank's numbers stand for is its part of the row either way.
"""

from __future__ import annotations

from typing import Any

import torch

from graphfuse.ops import fp8_linear as _ops  # noqa: F401  (registers the ops)
from graphfuse.passes.placement.call import Call, Operand, all_replicated, ignorance, is_one, partials
from graphfuse.passes.placement.lattice import (
    PARTIAL,
    REPLICATED,
    Kind,
    Outcome,
    Placement,
    Replicated,
    Shard,
    Unknown,
    Violation,
)
from graphfuse.passes.placement.products import contract, with_bias


def quantise(call: Call) -> Outcome:
    x, scale = call.first(), call.optional("scale")
    for o in partials([x, *([scale] if scale is not None else [])]):
        raise Violation(Kind.NON_LINEAR, o.node, f"{call.name} rounds a {o.placement}: it must be summed before")
    unknown = ignorance([x, *([scale] if scale is not None else [])])
    if unknown is not None:
        return unknown, unknown
    if scale is not None:
        known = x.placement if all_replicated([scale]) else Unknown("ranks round with different scales")
        return known, scale.placement
    if isinstance(x.placement, Shard) and x.placement.dim == x.dim - 1:
        return x.placement, Shard(x.dim - 1)
    return x.placement, x.placement


def linear(call: Call) -> Outcome:
    x, weight, bias = call.first(), call.operand("weight"), call.optional("bias")
    x_scale, weight_scale = call.operand("x_scale"), call.operand("weight_scale")
    for o in partials([x, weight, x_scale, weight_scale]):
        raise Violation(Kind.NON_LINEAR, o.node, f"{call.name} reads a {o.placement}: FP8 cannot be summed later")
    unknown = ignorance([x, weight, x_scale, weight_scale, *([bias] if bias is not None else [])])
    if unknown is not None:
        return unknown
    batch = "abcdefgh"[: x.dim - 1]
    product = contract(call, x, weight, f"{batch}k,nk->{batch}n")
    if isinstance(product, Unknown):
        return product
    last = x.dim - 1
    one_for_all = x_scale.dim == 0 or (x_scale.dim == 1 and is_one(x_scale.shape[0]))
    if product == PARTIAL:
        given = (isinstance(x_scale.placement, Replicated) and (one_for_all or is_one(x_scale.shape[-1]))) or (
            x_scale.placement == Shard(last)
        )
        along = Shard(1) if weight_scale.dim == 2 else REPLICATED
        fits = given and _is(weight_scale, along)
    elif isinstance(product, Shard) and product.dim == last:
        fits = all_replicated([x_scale]) and _is(weight_scale, Shard(0) if weight_scale.dim else REPLICATED)
    elif isinstance(product, Shard):
        fits = (one_for_all or x_scale.placement == x.placement) and all_replicated([weight_scale])
    else:
        fits = all_replicated([x_scale, weight_scale])
    if not fits:
        found = f"{x_scale.placement}, {weight_scale.placement}"
        return Unknown(f"scales that are not divided as what they belong to ({found})")
    return with_bias(call, bias, product)


def _is(o: Operand, placement: Placement) -> bool:
    return o.placement == placement or (isinstance(placement, Replicated) and isinstance(o.placement, Replicated))


graphfuse = torch.ops.graphfuse
RULES: dict[Any, Any] = {graphfuse.quantise_fp8.default: quantise, graphfuse.fp8_linear.default: linear}
