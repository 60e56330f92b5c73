"""Small MoE layers in every number format, and what they compute in float64 with nothing rounded on the way.

Legend: T tokens, H hidden, E experts, I intermediate, K choices per token.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from graphfuse.ops.moe_reference import ExpertWeights
from graphfuse.tuning.moe_inputs import Layer

FP8 = torch.float8_e4m3fn
TOP = 448.0

# The name says how weights are scaled, and what becomes of activations.
FORMS = (
    "unscaled",
    "expert, static",
    "expert, dynamic",
    "channel, dynamic",
    "block, static",
    "block, dynamic",
    "expert, 16 bits",
    "channel, 16 bits",
    "block, 16 bits",
)


def make_layer(
    form: str = "unscaled",
    *,
    dtype: torch.dtype = torch.bfloat16,
    num_experts: int = 5,
    hidden_size: int = 72,
    intermediate_size: int = 40,
    block_shape: tuple[int, int] = (128, 128),
    interleaved: bool = False,
    transposed: bool = False,
    biases: bool = False,
    activation: str = "silu",
    limit: float | None = None,
    scales_per_expert: bool = False,
    seed: int = 0,
) -> Layer:
    """A layer whose values stay near 1; static scales are [1], or [E] with `scales_per_expert`."""
    generator = torch.Generator().manual_seed(seed)
    kind, _, activations = form.partition(", ")
    block = block_shape if kind == "block" else None
    stored, scales = [], []
    for outputs, inputs in ((2 * intermediate_size, hidden_size), (hidden_size, intermediate_size)):
        values = torch.randn(num_experts, outputs, inputs, generator=generator) / math.sqrt(inputs)
        # Channels and blocks of very different size: to take another's scale would be seen.
        values *= torch.rand(num_experts, outputs, 1, generator=generator) + 0.2
        values *= torch.rand(num_experts, 1, inputs, generator=generator) + 0.2
        matrix, scale = (values.to(dtype), None) if kind == "unscaled" else _quantise(values, kind, block)
        stored.append(matrix.transpose(1, 2).contiguous() if transposed else matrix)
        scales.append(scale)
    gate_up_bias, down_bias = (
        0.3 * torch.randn(num_experts, n, generator=generator).to(dtype) if biases else None
        for n in (2 * intermediate_size, hidden_size)
    )
    (gate_up, down), (gate_up_scale, down_scale) = stored, scales
    weights = ExpertWeights(
        gate_up, down, gate_up_bias, down_bias, gate_up_scale, down_scale, block, interleaved, transposed
    )  # fmt: skip
    if activations != "static":
        return Layer(weights, activation, limit, dynamic=activations == "dynamic", dtype=dtype)
    steps = (torch.rand(2, num_experts if scales_per_expert else 1, generator=generator) + 1) * 8 / TOP
    return Layer(weights, activation, limit, steps[0], steps[1], dtype=dtype)


def make_inputs(
    layer: Layer, num_tokens: int, top_k: int, *, ids_dtype: torch.dtype = torch.int32, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens `[T, H]` of very different size, distinct ids where there are enough experts, and weights `[T, K]`."""
    generator = torch.Generator().manual_seed(seed)
    hidden = layer.weights.gate_up_shape[2]
    sizes = torch.rand(num_tokens, 1, generator=generator) * 2 + 0.1
    tokens = (sizes * torch.randn(num_tokens, hidden, generator=generator)).to(layer.dtype)
    scores = torch.rand(num_tokens, max(layer.weights.num_experts, top_k), generator=generator)
    ids = scores.argsort(1)[:, :top_k] % layer.weights.num_experts
    return tokens, ids.to(ids_dtype), torch.rand(num_tokens, top_k, generator=generator) + 0.1


def quantise_tokens(tokens: Tensor, group: int | None) -> tuple[Tensor, Tensor]:
    """Tokens in FP8 with a scale for each row `[T, 1]`, or for each group of inputs `[T, groups]`."""
    size = group or tokens.shape[1]
    parts = tokens.float().split(size, 1)
    scales = [part.abs().amax(1, keepdim=True).clamp(min=1e-6) / TOP for part in parts]
    stored = torch.cat([(part / scale).to(FP8) for part, scale in zip(parts, scales, strict=True)], 1)
    return stored, torch.cat(scales, 1)


def exact(
    layer: Layer, tokens: Tensor, local_ids: Tensor, topk_weights: Tensor, tokens_scale: Tensor | None = None
) -> Tensor:
    """`[T, H]` in float64. FP8 tokens are what they stand for with `tokens_scale`, `[T, 1]` or `[T, groups]`."""
    w = layer.weights
    x = tokens.double()
    if tokens_scale is not None:
        group = w.block_shape[1] if w.block_shape is not None and tokens_scale.shape[1] > 1 else x.shape[1]
        x = x * tokens_scale.double().repeat_interleave(group, 1)[:, : x.shape[1]]
    result = torch.zeros_like(x)
    for e in range(w.num_experts):
        rows, choices = torch.where(local_ids == e)
        both = x[rows] @ _whole(w, w.gate_up, w.gate_up_scale, e).t() + _bias(w.gate_up_bias, e)
        gate, up = (both[:, ::2], both[:, 1::2]) if w.interleaved else both.tensor_split(2, 1)
        if layer.activation_limit is not None:
            gate = gate.clamp(max=layer.activation_limit)
            up = up.clamp(-layer.activation_limit, layer.activation_limit)
        y = _activated(layer.activation, gate, up) @ _whole(w, w.down, w.down_scale, e).t() + _bias(w.down_bias, e)
        result.index_add_(0, rows, y * topk_weights[rows, choices, None].double())
    return result


def _activated(name: str, gate: Tensor, up: Tensor) -> Tensor:
    if name == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if name == "swiglu_oai":
        return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    return F.gelu(gate, approximate="tanh" if name == "gelu_tanh" else "none") * up


def _bias(bias: Tensor | None, e: int) -> Tensor | float:
    return 0.0 if bias is None else bias[e].double()


def _whole(w: ExpertWeights, stored: Tensor, scale: Tensor | None, e: int) -> Tensor:
    """One expert's matrix `[outputs, inputs]`."""
    matrix = stored[e].double()
    matrix = matrix.t() if w.transposed else matrix
    if scale is None:
        return matrix
    factor = scale[e].double()
    if w.block_shape is not None:
        n, k = w.block_shape
        factor = factor.repeat_interleave(n, 0).repeat_interleave(k, 1)[: matrix.shape[0], : matrix.shape[1]]
    elif factor.dim() == 1:
        factor = factor[:, None]
    return matrix * factor


def _quantise(values: Tensor, kind: str, block: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """Stored weights, and scales [E], [E, outputs] or [E, blocks of outputs, blocks of inputs]."""
    if kind == "expert":
        scale = values.abs().amax((1, 2)) / TOP
        return (values / scale[:, None, None]).to(FP8), scale
    if kind == "channel":
        scale = values.abs().amax(2) / TOP
        return (values / scale[:, :, None]).to(FP8), scale
    assert block is not None
    (n, k), (experts, outputs, inputs) = block, values.shape
    padded = F.pad(values.abs(), (0, -inputs % k, 0, -outputs % n))
    scale = padded.view(experts, padded.shape[1] // n, n, padded.shape[2] // k, k).amax((2, 4)) / TOP
    spread = scale.repeat_interleave(n, 1).repeat_interleave(k, 2)[:, :outputs, :inputs]
    return (values / spread).to(FP8), scale
