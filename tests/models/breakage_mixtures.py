"""Copies of gpt-oss and other mixtures with one part broken on purpose. See `breakage`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from graphfuse.models.sharding import TensorParallel


def sinks_forgotten(model: nn.Module) -> None:
    model.layers[1].self_attn.sinks = None


def sinks_of_other_heads(model: nn.Module) -> None:
    sinks = model.layers[0].self_attn.sinks
    sinks.copy_(sinks.roll(1))


def window_on_the_wrong_layers(model: nn.Module) -> None:
    first, second = model.layers[0].self_attn, model.layers[1].self_attn
    first.sliding_window, second.sliding_window = second.sliding_window, first.sliding_window


def router_bias_forgotten(model: nn.Module) -> None:
    model.layers[0].mlp.router.bias = None


def router_not_normalised(model: nn.Module) -> None:
    model.layers[1].mlp.router.normalise = False


def clamp_forgotten(model: nn.Module) -> None:
    model.layers[0].mlp.experts.limit = 1e9


def gate_bias_forgotten(model: nn.Module) -> None:
    model.layers[0].mlp.experts.gate_up_proj_bias.zero_()


def gates_and_ups_swapped(model: nn.Module) -> None:
    experts = model.layers[2].mlp.experts
    for p in (experts.gate_up_proj, experts.gate_up_proj_bias):
        p.copy_(p.unflatten(1, (-1, 2)).flip(2).flatten(1, 2))


def down_bias_forgotten(model: nn.Module) -> None:
    model.layers[1].mlp.experts.down_proj_bias.zero_()


def down_bias_added_by_every_rank(model: nn.Module) -> None:
    model.layers[1].mlp.experts.down_proj_bias.mul_(model.tp.size)


def first_weight_forgotten(model: nn.Module) -> None:
    model.layers[0].input_layernorm.weight.fill_(1.0)


def scaling_of_rotations_forgotten(model: nn.Module) -> None:
    model.rotary.scaling = 1.0


def shared_gate_forgotten(model: nn.Module) -> None:
    gate = model.layers[0].mlp.shared_expert_gate
    gate.forward = lambda x: torch.ones(x.shape[0], 1)


def shared_expert_forgotten(model: nn.Module) -> None:
    model.layers[2].mlp.shared_expert.partial = torch.zeros_like


def weights_made_to_sum_to_one(model: nn.Module) -> None:
    model.layers[2].mlp.gate.normalise = True


def weights_left_as_they_are(model: nn.Module) -> None:
    model.layers[0].feed_forward.gate.normalise = False


def gate_and_up_exchanged(model: nn.Module) -> None:
    weight = model.layers[1].feed_forward.experts.gate_up_proj
    weight.copy_(torch.cat(weight.chunk(2, 1)[::-1], 1))


def whole_heads_rotated(model: nn.Module) -> None:
    """By the frequencies of whole heads."""
    size = model.config.head_dim
    model.rotary.inv_freq = 1.0 / (model.config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2) / size))


def heads_normalised_alone(model: nn.Module) -> None:
    attention = model.layers[1].self_attn

    def normalised(q, k):
        return tuple(
            gamma.weight.view(x.shape[2:]) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + gamma.eps)
            for x, gamma in ((q, attention.q_norm), (k, attention.k_norm))
        )

    attention.normalised = normalised


def ranks_normalise_alone(model: nn.Module) -> None:
    model.layers[0].self_attn.tp = TensorParallel(None, 1, 0)


def other_gammas(model: nn.Module) -> None:
    weight = model.layers[0].self_attn.k_norm.weight
    weight.copy_(weight.roll(1))


def bias_of_experts_forgotten(model: nn.Module) -> None:
    model.layers[1].feed_forward.gate.e_score_correction_bias = None


BREAKAGES: dict[str, Callable[[nn.Module], None]] = {
    f.__name__: f
    for f in (
        sinks_forgotten, sinks_of_other_heads, window_on_the_wrong_layers, router_bias_forgotten,
        router_not_normalised, clamp_forgotten, gate_bias_forgotten, gates_and_ups_swapped, down_bias_forgotten,
        down_bias_added_by_every_rank, first_weight_forgotten, scaling_of_rotations_forgotten, shared_gate_forgotten,
        shared_expert_forgotten, weights_made_to_sum_to_one, weights_left_as_they_are, gate_and_up_exchanged,
        whole_heads_rotated, heads_normalised_alone, ranks_normalise_alone, other_gammas, bias_of_experts_forgotten,
    )
}  # fmt: skip
