"""What MoE layers are compared with: torch's grouped products, and FlashInfer's CUTLASS kernels.

    grouped_mm   sort ids ─► gather rows ─► grouped product ─► activation ─► grouped product ─► weighted sum
    flashinfer   cutlass_fused_moe, its tactics tuned by its own autotuner; only where its kernels are compiled already

The grouped form is what a careful user of torch would write, leaner than `moe_grouped`, which also serves slices of
experts: each step is one kernel or two, and the weighted sum is a single one.

Legend: T tokens, H hidden, E experts, I intermediate, K choices per token, R = T K rows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from graphfuse.ops.moe_reference import gated_activation
from graphfuse.tuning.moe_inputs import FP8, Layer

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(tokens `[T, H]`, ids `[T, K]`, weights `[T, K]`) → `[T, H]`."""

Stored = tuple[Tensor, Tensor | None]
"""Rows as a product takes them, and the scale of each row where they are FP8."""


@dataclass(frozen=True)
class Projection:
    """One of the layer's two products."""

    store: Callable[[Tensor], Stored]
    product: Callable[[Stored, Tensor], Tensor]
    """(rows sorted by expert, where those of each expert end) → products with the experts' matrices."""

    bias: Tensor | None

    def __call__(self, rows: Stored, ends: Tensor, expert: Tensor) -> Tensor:
        out = self.product(rows, ends)
        return out if self.bias is None else out + self.bias[expert]


def grouped_mm(layer: Layer) -> Forward | str:
    """The layer by torch's grouped products, or why that cannot be."""
    weights = layer.weights
    if weights.block_shape is not None:
        return "torch has no grouped product with a scale for each block."
    gate_up = _projection(weights.gate_up, weights.gate_up_scale, weights.gate_up_bias, layer, layer.tokens_scale)
    down = _projection(weights.down, weights.down_scale, weights.down_bias, layer, layer.intermediate_scale)
    experts = torch.arange(weights.num_experts, device=weights.gate_up.device, dtype=torch.int32)

    def forward(tokens: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        expert, order = ids.flatten().sort()  # [R]
        ends = torch.searchsorted(expert, experts, right=True, out_int32=True)  # [E]
        (stored, step), token = gate_up.store(tokens), order // ids.shape[1]
        x = gate_up((stored[token], None if step is None else step[token]), ends, expert)  # [R, 2I]
        x = gated_activation(x, weights.interleaved, layer.activation, layer.activation_limit)  # [R, I]
        x = down(down.store(x.contiguous()), ends, expert)  # [R, H]
        place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        return F.embedding_bag(place.view_as(ids), x, per_sample_weights=shares.to(x.dtype), mode="sum")

    return forward


def flashinfer(layer: Layer, max_tokens: int) -> Forward | str:
    """The layer by FlashInfer's `cutlass_fused_moe`, or why that cannot be."""
    weights = layer.weights
    if weights.gate_up_scale is not None or weights.gate_up_bias is not None:
        return "It is measured in bf16 without biases only."
    reason = _flashinfer_refusal()
    if reason is not None:
        return reason
    from flashinfer.autotuner import autotune
    from flashinfer.fused_moe import cutlass_fused_moe

    gate, up = weights.gate_up.chunk(2, dim=1)
    up_first = torch.cat((up, gate), dim=1)
    tuned: set[int] = set()

    def call(tokens: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        out = cutlass_fused_moe(
            tokens, ids, shares, up_first, weights.down, layer.dtype, quant_scales=[], tune_max_num_tokens=max_tokens
        )
        return out[0] if isinstance(out, list | tuple) else out

    def forward(tokens: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        if tokens.shape[0] not in tuned:
            tuned.add(tokens.shape[0])
            with autotune(True):
                call(tokens, ids, shares)
        return call(tokens, ids, shares)

    return forward


def _projection(
    matrix: Tensor, scale: Tensor | None, bias: Tensor | None, layer: Layer, static: Tensor | None
) -> Projection:
    matrix = matrix if layer.weights.transposed else matrix.transpose(1, 2)  # [E, inputs, outputs]
    if scale is None:
        return Projection(lambda x: (x, None), lambda rows, ends: F.grouped_mm(rows[0], matrix, offs=ends), bias)
    by_output = scale if scale.dim() == 2 else scale[:, None].expand(-1, matrix.shape[2]).contiguous()  # [E, outputs]
    top = torch.finfo(FP8).max
    fixed = None if static is None else static.item()

    def store(x: Tensor) -> Stored:
        if fixed is not None:
            return x.mul(1 / fixed).clamp_(-top, top).to(FP8), x.new_full((x.shape[0],), fixed, dtype=torch.float32)
        step = x.abs().amax(1).float().clamp_(min=1e-12) / top
        return (x / step[:, None]).to(FP8), step

    def product(rows: Stored, ends: Tensor) -> Tensor:
        stored, step = rows
        assert step is not None  # `store` makes it
        return torch._scaled_grouped_mm(
            stored, matrix, step, by_output, offs=ends, out_dtype=layer.dtype, use_fast_accum=True
        )

    return Projection(store, product, bias)


def _flashinfer_refusal() -> str | None:
    """Compiling takes many minutes, which a measurement must not start by itself."""
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed."
    if not torch.cuda.is_available():
        return "There is no CUDA GPU."
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"It is measured on SM90 only; this GPU is SM{capability[0]}{capability[1]}."
    try:
        from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm90_module

        compiled = gen_cutlass_fused_moe_sm90_module().is_compiled
    except Exception as error:  # versions differ in what they lack
        return f"FlashInfer's fused MoE cannot be loaded: {type(error).__name__}: {error}"
    return None if compiled else "FlashInfer's fused MoE kernels are not compiled here, which takes many minutes."
