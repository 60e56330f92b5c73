"""Layers in FP8: what becomes of a linear or of experts whose weights a checkpoint stores so.

A model is built plain, layer by layer, and `quantise` then turns the parts that `quantization_config` names into their
FP8 form: the weight stays FP8 in memory, beside it stand `weight_scale` and, where activations are rounded with a given
scale, `input_scale`. Both are divided over the ranks with the weight.

A block of 128 x 128 weights shares a scale. Inner dimensions of MLPs and experts are divided at blocks
(`TensorParallel.inner_multiple`). Heads need not be: where a division parts a block, a rank's blocks are made smaller,
a divisor of 128 that fits, and each gets the scale of the published block it is a part of.

Several projections in one product keep their own scales: a scale for a whole weight becomes one for each output. Their
input is rounded once, with the largest of their scales; checkpoints give all of them the same.

Legend: E experts, H hidden, I intermediate (i: this rank's part).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphfuse.errors import UnsupportedModelError
from graphfuse.models.quantisation import BLOCK, INPUT_SCALES, WEIGHT_SCALES, Fp8Scheme, Quantisation
from graphfuse.models.sharding import Shard
from graphfuse.ops.fp8_linear import FP8, dequantised, fp8_linear, quantise_fp8
from graphfuse.weights.plan import Copy, TensorPlan


def quantise(layer: nn.Module, path: str, quantisation: Quantisation | None) -> nn.Module:
    """Turn what a checkpoint stores in FP8 of a layer that is called `path` there into its FP8 form, in place."""
    if quantisation is None:
        return layer
    for name, module in layer.named_modules():
        if hasattr(module, "quantise"):
            here = f"{path}.{name}"
            parts = {part: quantisation.scheme_of(part) for part in module.checkpoint_names(here)}
            if len(set(parts.values())) > 1:
                described = ", ".join(f"{part}: {scheme}" for part, scheme in parts.items())
                raise UnsupportedModelError(
                    f"{here} is one product of weights that the checkpoint quantises differently ({described}). "
                    'Quantise them alike, or load the model with implementation="transformers".'
                )
            scheme = next(iter(parts.values()))
            if scheme is not None:
                module.quantise(scheme)
    return layer


@dataclass(frozen=True)
class Fp8Weight:
    """The weight of a linear in FP8, as its module uses it: `[N, K]`, divided along one dimension or none."""

    scheme: Fp8Scheme
    outputs: tuple[Shard, ...]
    inputs: Shard
    block_shape: tuple[int, int] | None

    @classmethod
    def of(cls, scheme: Fp8Scheme, outputs: tuple[Shard, ...], inputs: Shard) -> Fp8Weight:
        if scheme.weights != "block":
            return cls(scheme, outputs, inputs, None)
        offsets = [sum(shard.local for shard in outputs[:i]) for i in range(1, len(outputs))]
        n = math.gcd(BLOCK, *offsets, *(shard.unit for shard in outputs))
        return cls(scheme, outputs, inputs, (n, math.gcd(BLOCK, inputs.unit)))

    def convert(self, module: Any) -> None:
        """Give a linear its weight in FP8 and scales, zero until they are loaded."""
        old = module.weight
        module.weight = zeros(*old.shape, dtype=FP8, device=old.device)
        shape: tuple[int, ...] = (old.shape[0],)
        if self.block_shape is not None:
            n, k = self.block_shape
            shape = (-(-old.shape[0] // n), -(-old.shape[1] // k))
        module.weight_scale = zeros(*shape, dtype=torch.float32, device=old.device)
        if self.scheme.activations == "static":
            module.input_scale = zeros(dtype=torch.float32, device=old.device)

    def linear(self, module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        scale = module.input_scale if self.scheme.activations == "static" else None
        quantised, x_scale = quantise_fp8(x, self.scheme.activations, scale)
        weight, weight_scale = module.weight, module.weight_scale
        return fp8_linear(quantised, x_scale, weight, weight_scale, bias, self.block_shape, x.dtype)

    def dequantised(self, module: Any, dtype: torch.dtype) -> Tensor:
        return dequantised(module.weight, module.weight_scale, self.block_shape, dtype)

    def scale_plans(self, module: Any, paths: list[str], names: frozenset[str]) -> Iterator[TensorPlan]:
        """Where the scales of the weights at `paths` go, one for each of `outputs`."""
        offset = 0
        for path, shard in zip(paths, self.outputs, strict=True):
            name = first_of(path, WEIGHT_SCALES, names)
            n, k = self.block_shape or (1, 1)
            into = module.weight_scale.narrow(0, offset // n, -(-shard.local // n))
            if self.block_shape is not None:
                shape = (-(-shard.full // BLOCK), -(-self.inputs.full // BLOCK))
                change = picking((0, block_sources(shard, n)), (1, block_sources(self.inputs, k)))
                yield scale_plan(name, shape, into, module.weight_scale, change)
            elif self.scheme.weights == "channel":
                change = picking((0, block_sources(shard, 1, 1)))
                yield scale_plan(name, (shard.full,), into, module.weight_scale, change)
            else:
                yield scale_plan(name, (), into, module.weight_scale, None)
            if self.scheme.activations == "static":
                name = first_of(path, INPUT_SCALES, names)
                yield input_scale_plan(name, module.input_scale, module.input_scale)
            offset += shard.local


def zeros(*shape: int, dtype: torch.dtype, device: Any) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)


def first_of(path: str, kinds: tuple[str, ...], names: frozenset[str], joint: str = ".") -> str:
    """The name of a scale that the checkpoint has, else the first it might have, for the error to name."""
    candidates = [f"{path}{joint}{kind}" for kind in kinds]
    return next((name for name in candidates if name in names), candidates[0])


def scale_plan(
    name: str,
    shape: tuple[int, ...],
    into: Tensor,
    target: nn.Parameter,
    change: Callable[[Tensor], Tensor] | None,
) -> TensorPlan:
    """A scale is small: it is read whole, changed, and spread over `into`. Dimensions of size 1 may follow its own."""
    also = tuple(shape + (1,) * n for n in (1, 2) if len(shape) < 2)
    every = (slice(None),) * len(shape)
    make = change if change is not None else _as_it_is
    return TensorPlan(name, shape, (Copy(every, into, lambda t: make(t.float().reshape(shape))),), target, also=also)


def input_scale_plan(name: str, into: Tensor, target: nn.Parameter) -> TensorPlan:
    """The largest of the scales that are given for one input; it is zero before the first."""
    return scale_plan(name, (), into, target, lambda t: torch.maximum(t, into.cpu()))


def _as_it_is(scale: Tensor) -> Tensor:
    return scale


def block_sources(shard: Shard, block: int, published: int = BLOCK) -> list[int]:
    """For each of this rank's blocks along a dimension, the published one it is a part of; -1 for padding."""
    sources = [-1] * -(-shard.local // block)
    for span in shard.spans:
        for position in range(span.target, span.target + span.length, block):
            sources[position // block] = (span.source + position - span.target) // published
    return sources


def picking(*along: tuple[int, list[int]]) -> Callable[[Tensor], Tensor]:
    """Of each (dimension, sources): the entries with these numbers, zero for -1."""

    def pick(scale: Tensor) -> Tensor:
        for dim, sources in along:
            index = torch.tensor(sources, dtype=torch.int64)
            shape = [-1 if d == dim else 1 for d in range(scale.dim())]
            scale = scale.index_select(dim, index.clamp(min=0)) * (index >= 0).view(shape)
        return scale

    return pick
