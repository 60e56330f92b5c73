"""Routed experts in FP8: their scales, under the names of both forms of checkpoint, and the op's arguments.

    published    experts.0.gate_proj.weight_scale_inv, ...          a tensor for each expert and projection
    fused        experts.gate_up_proj_scale_inv [E, ...], ...       one for all experts

Where an expert's gates and ups have one scale each for the whole matrix, both are kept, one for each output channel.
Tokens with scales found on the fly are rounded before the experts, so that what else reads them in FP8, and the norm
before, may share that; given scales differ between experts, and each expert rounds with its own.

Legend: E experts, H hidden, I intermediate (i: this rank's part).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphfuse.errors import UnsupportedModelError
from graphfuse.models.fp8 import block_sources, first_of, input_scale_plan, picking, scale_plan, zeros
from graphfuse.models.quantisation import BLOCK, INPUT_SCALES, WEIGHT_SCALES, Fp8Scheme
from graphfuse.models.sharding import Shard, whole
from graphfuse.ops.fp8_linear import FP8, quantise_fp8
from graphfuse.ops.moe import moe_experts
from graphfuse.weights.plan import Copy, TensorPlan

FUSED_WEIGHT_SCALES = ("scale_inv", "weight_scale", "scale")
FUSED_INPUT_SCALES = ("activation_scale", "input_scale")


@dataclass(frozen=True)
class Fp8Experts:
    scheme: Fp8Scheme
    shard: Shard
    """Of the intermediate dimension."""

    def convert(self, module: Any) -> None:
        """Give experts their weights in FP8 and scales, zero until they are loaded."""
        gate_up, down = module.gate_up_proj, module.down_proj
        (experts, outputs, hidden), inner = gate_up.shape, down.shape[2]
        device = gate_up.device
        module.gate_up_proj = zeros(*gate_up.shape, dtype=FP8, device=device)
        module.down_proj = zeros(*down.shape, dtype=FP8, device=device)
        gate_up_scale: tuple[int, ...] = (experts, outputs)
        down_scale: tuple[int, ...] = (experts, hidden)
        module.shard_dims = {"gate_up_proj": 1, "down_proj": 2, "gate_up_scale": 1}
        if self.scheme.weights == "block":
            assert inner % BLOCK == 0, "divided at blocks (TensorParallel.inner_multiple)"
            gate_up_scale = (experts, outputs // BLOCK, -(-hidden // BLOCK))
            down_scale = (experts, -(-hidden // BLOCK), inner // BLOCK)
            module.shard_dims["down_scale"] = 2
        module.gate_up_scale = zeros(*gate_up_scale, dtype=torch.float32, device=device)
        module.down_scale = zeros(*down_scale, dtype=torch.float32, device=device)
        if self.scheme.activations == "static":
            module.tokens_scale = zeros(experts, dtype=torch.float32, device=device)
            module.intermediate_scale = zeros(experts, dtype=torch.float32, device=device)

    def experts(self, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        block_shape = [BLOCK, BLOCK] if self.scheme.weights == "block" else None
        tokens, tokens_scale, intermediate_scale = x, None, None
        dynamic = self.scheme.activations != "static"
        if dynamic:
            tokens, tokens_scale = quantise_fp8(x, self.scheme.activations, None)
        else:
            tokens_scale, intermediate_scale = module.tokens_scale, module.intermediate_scale
        return moe_experts(
            tokens, module.gate_up_proj, module.down_proj, ids, weights, module.num_experts,
            activation=module.activation, gate_up_scale=module.gate_up_scale, down_scale=module.down_scale,
            tokens_scale=tokens_scale, intermediate_scale=intermediate_scale, block_shape=block_shape,
            out_dtype=x.dtype, dynamic=dynamic,
        )  # fmt: skip

    def scale_plans(self, module: Any, path: str, names: frozenset[str]) -> Iterator[TensorPlan]:
        if f"{path}.gate_up_proj" in names:
            yield from self._fused(module, path, names)
            return
        half = module.gate_up_scale.shape[1] // 2
        hidden, inner = whole(module.down_proj.shape[1]), self.shard
        for e in range(module.num_experts):
            gate_up, down = module.gate_up_scale[e], module.down_scale[e]
            gate_part, up_part, down_part = module.part_names
            for part, into, target, outputs, inputs in (
                (gate_part, gate_up[:half], module.gate_up_scale, inner, hidden),
                (up_part, gate_up[half:], module.gate_up_scale, inner, hidden),
                (down_part, down, module.down_scale, hidden, inner),
            ):
                name = first_of(f"{path}.{e}.{part}", WEIGHT_SCALES, names)
                if self.scheme.weights == "block":
                    shape = (-(-outputs.full // BLOCK), -(-inputs.full // BLOCK))
                    change = picking((0, block_sources(outputs, BLOCK)), (1, block_sources(inputs, BLOCK)))
                    yield scale_plan(name, shape, into, target, change)
                elif self.scheme.weights == "channel":
                    change = picking((0, block_sources(outputs, 1, 1)))
                    yield scale_plan(name, (outputs.full,), into, target, change)
                else:
                    yield scale_plan(name, (), into, target, None)
                if self.scheme.activations == "static":
                    owner = module.intermediate_scale if part == down_part else module.tokens_scale
                    yield input_scale_plan(first_of(f"{path}.{e}.{part}", INPUT_SCALES, names), owner[e], owner)

    def _fused(self, module: Any, path: str, names: frozenset[str]) -> Iterator[TensorPlan]:
        """Scales of all experts: `[E, blocks, blocks]`; of tensors `[E, 2, 1]` (gates, ups), `[E, 1, 1]` where both are
        one; of channels `[E, 2I, 1]`."""
        experts, hidden = module.num_experts, whole(module.down_proj.shape[1])
        gate_up = first_of(f"{path}.gate_up_proj", FUSED_WEIGHT_SCALES, names, "_")
        down = first_of(f"{path}.down_proj", FUSED_WEIGHT_SCALES, names, "_")
        if self.scheme.weights == "block":
            n, half = -(-self.shard.full // BLOCK), block_sources(self.shard, BLOCK)
            every = block_sources(hidden, BLOCK)
            if self.shard.full % BLOCK:
                raise UnsupportedModelError(
                    f"Fused experts of {self.shard.full} inner entries in FP8 blocks of {BLOCK} are not implemented: "
                    'a block would hold gates and ups. Load the model with implementation="transformers".'
                )
            rows = [*half, *(s + n if s >= 0 else s for s in half)]
            change = picking((1, rows), (2, every))
            yield _fused_plan(gate_up, (experts, 2 * n, len(every)), module.gate_up_scale, change)
            yield _fused_plan(down, (experts, len(every), n), module.down_scale, picking((1, every), (2, half)))
        elif self.scheme.weights == "channel":
            half, full = block_sources(self.shard, 1, 1), self.shard.full
            rows = [*half, *(s + full if s >= 0 else s for s in half)]
            change = picking((1, rows))
            yield _fused_plan(gate_up, (experts, 2 * full), module.gate_up_scale, change, ((experts, 2 * full, 1),))
            shape = (experts, hidden.full)
            yield _fused_plan(down, shape, module.down_scale, lambda t: t, ((*shape, 1),))
        else:
            local = self.shard.local
            one = ((experts, 1), (experts,))
            also = ((experts, 1, 1), (experts, 2), *one)
            yield _fused_plan(
                gate_up, (experts, 2, 1), module.gate_up_scale,
                lambda t: t.expand(experts, 2).repeat_interleave(local, 1), also, (experts, -1),
            )  # fmt: skip
            yield _fused_plan(down, (experts, 1, 1), module.down_scale, lambda t: t, one, (experts, 1))
        if self.scheme.activations == "static":
            for part, owner in (("gate_up_proj", module.tokens_scale), ("down_proj", module.intermediate_scale)):
                name = first_of(f"{path}.{part}", FUSED_INPUT_SCALES, names, "_")
                shapes = ((experts, 1), (experts, 1, 1), (), (1,))
                yield _fused_plan(name, (experts,), owner, lambda t: t.expand(experts), shapes, (-1,))


def _fused_plan(
    name: str,
    shape: tuple[int, ...],
    target: Any,
    change: Any,
    also: tuple[tuple[int, ...], ...] = (),
    view: tuple[int, ...] | None = None,
) -> TensorPlan:
    made = shape if view is None else view
    copy = Copy((slice(None),) * len(shape), target, lambda t: change(t.float().reshape(made)))
    return TensorPlan(name, shape, (copy,), target, also=also)
