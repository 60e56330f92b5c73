"""Copies of a model with gated DeltaNet or gated attention with one part broken on purpose.

Layers 0, 1 and 3 have gated DeltaNet, layer 2 attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphfuse.models.layers import RMSNorm
from graphfuse.models.parallel import reduce_sum
from graphfuse.models.sharding import TensorParallel
from graphfuse.ops.layout import Layout


def delta_of(model: Any) -> Any:
    return model.layers[0].linear_attn


def attention_of(model: Any) -> Any:
    return model.layers[2].self_attn


def delta_reduction_dropped(model: nn.Module) -> None:
    delta_of(model).out_proj.tp = TensorParallel(None, 1, 0)


def delta_reduction_doubled(model: nn.Module) -> None:
    projection = delta_of(model).out_proj
    forward = projection.forward
    projection.forward = lambda x: reduce_sum(forward(x), projection.tp)


def gated_attention_reduction_dropped(model: nn.Module) -> None:
    attention_of(model).o_proj.tp = TensorParallel(None, 1, 0)


def forgetting_forgotten(model: nn.Module) -> None:
    delta_of(model).A_log.fill_(-torch.inf)


def time_step_bias_forgotten(model: nn.Module) -> None:
    delta_of(model).dt_bias.zero_()


def correction_rate_forgotten(model: nn.Module) -> None:
    delta = delta_of(model)
    delta.in_proj_ba.weight[: delta.num_heads].zero_()


def delta_gate_forgotten(model: nn.Module) -> None:
    norm = delta_of(model).norm
    norm.forward = lambda x, gate: RMSNorm.forward(norm, x)


def delta_gamma_ignored(model: nn.Module) -> None:
    delta_of(model).norm.weight.fill_(1.0)


def convolution_forgotten(model: nn.Module) -> None:
    delta_of(model).conv1d.weight[:, :-1].zero_()


def taps_in_the_other_order(model: nn.Module) -> None:
    weight = delta_of(model).conv1d.weight
    weight.copy_(weight.flip(1))


def queries_and_keys_exchanged(model: nn.Module) -> None:
    delta = delta_of(model)
    size = delta.num_key_heads * delta.key_dim
    for weight in (delta.in_proj_qkvz.weight, delta.conv1d.weight):
        weight[: 2 * size] = weight[: 2 * size].roll(size, 0)


def output_gate_forgotten(model: nn.Module) -> None:
    attention = attention_of(model)
    weight = attention.qkv_proj.weight[: 2 * attention.num_heads * attention.head_dim]
    weight.view(attention.num_heads, 2, attention.head_dim, -1)[:, 1].zero_()


def norm_not_centred_at_zero(model: nn.Module) -> None:
    model.layers[1].input_layernorm.weight.sub_(1.0)


def query_norm_not_centred_at_zero(model: nn.Module) -> None:
    attention_of(model).q_norm.weight.sub_(1.0)


def whole_heads_rotated(model: nn.Module) -> None:
    size = attention_of(model).head_dim
    model.rotary.inv_freq = 1.0 / (10000.0 ** (torch.arange(0, size, 2) / size))


def shared_expert_forgotten(model: nn.Module) -> None:
    model.layers[0].mlp.shared_expert.down_proj.weight.zero_()


def shared_expert_gate_forgotten(model: nn.Module) -> None:
    model.layers[0].mlp.shared_expert_gate.weight.zero_()


def routed_experts_forgotten(model: nn.Module) -> None:
    model.layers[0].mlp.experts.down_proj.zero_()


def convolution_not_remembered(model: nn.Module) -> None:
    conv = delta_of(model).conv1d
    forward = conv.forward
    conv.forward = lambda x, positions, layout, _cache: forward(x, positions, layout, None)


def state_not_remembered(model: nn.Module) -> None:
    delta = delta_of(model)
    forward = delta.forward
    delta.forward = lambda *inputs: forward(*inputs[:-1], None)


def padding_remembered(model: nn.Module) -> None:
    delta = delta_of(model)
    forward = delta.forward

    def all_tokens_real(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, layout: Layout, *caches: Any) -> Tensor:
        assert layout.lengths is not None
        layout = layout._replace(lengths=torch.full_like(layout.lengths, positions.shape[1]))
        return forward(x, cos, sin, positions, layout, *caches)

    delta.forward = all_tokens_real


BREAKAGES: dict[str, Callable[[nn.Module], None]] = {
    f.__name__: f
    for f in (
        delta_reduction_dropped, delta_reduction_doubled, gated_attention_reduction_dropped, forgetting_forgotten,
        time_step_bias_forgotten, correction_rate_forgotten, delta_gate_forgotten, delta_gamma_ignored,
        convolution_forgotten, taps_in_the_other_order, queries_and_keys_exchanged, output_gate_forgotten,
        norm_not_centred_at_zero, query_norm_not_centred_at_zero, whole_heads_rotated, shared_expert_forgotten,
        shared_expert_gate_forgotten, routed_experts_forgotten, convolution_not_remembered, state_not_remembered,
        padding_remembered,
    )
}  # fmt: skip
