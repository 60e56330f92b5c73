"""Copies of a model with latent attention or DeepSeek's router with one part broken on purpose."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from graphfuse.models.layers import rotate


def latent_norm_takes_the_configs_epsilon(model: nn.Module) -> None:
    model.layers[1].self_attn.kv_a_layernorm.eps = model.config.rms_norm_eps


def latent_gamma_ignored(model: nn.Module) -> None:
    model.layers[1].self_attn.kv_a_layernorm.weight.fill_(1.0)


def query_gamma_ignored(model: nn.Module) -> None:
    model.layers[1].self_attn.q_a_layernorm.weight.fill_(1.0)


def latent_bias_forgotten(model: nn.Module) -> None:
    model.layers[0].self_attn.qkv_a_proj.bias = None


def output_bias_added_by_every_rank(model: nn.Module) -> None:
    model.layers[1].self_attn.o_proj.bias.mul_(model.tp.size)


def temperature_forgotten(model: nn.Module) -> None:
    mixer = model.layers[1].self_attn
    mixer.scale = sum(mixer.q_sizes) ** -0.5


def pairs_not_interleaved(model: nn.Module) -> None:
    model.layers[1].self_attn.rotate = rotate


def rotation_forgotten(model: nn.Module) -> None:
    model.layers[1].self_attn.rotate = lambda x, _cos, _sin: x


def position_scaling_forgotten(model: nn.Module) -> None:
    model.layers[0].self_attn.position_scaling = None


def correction_bias_forgotten(model: nn.Module) -> None:
    model.layers[-1].mlp.gate.e_score_correction_bias = None


def correction_bias_weighs(model: nn.Module) -> None:
    gate = model.layers[-1].mlp.gate
    scores, bias = gate.scores, gate.e_score_correction_bias.clone()
    gate.scores = lambda logits: scores(logits) + bias
    gate.e_score_correction_bias = None


def groups_ignored(model: nn.Module) -> None:
    model.layers[-1].mlp.gate.top_groups = model.layers[-1].mlp.gate.num_groups


def one_group_too_many(model: nn.Module) -> None:
    model.layers[-1].mlp.gate.top_groups += 1


def other_scores(model: nn.Module) -> None:
    gate = model.layers[-1].mlp.gate
    gate.scores = torch.sigmoid if gate.scores is not torch.sigmoid else (lambda x: x.softmax(-1))


def weights_not_normalised(model: nn.Module) -> None:
    model.layers[-1].mlp.gate.normalise = False


def weights_normalised(model: nn.Module) -> None:
    model.layers[-1].mlp.gate.normalise = True


def routing_scale_forgotten(model: nn.Module) -> None:
    model.layers[-1].mlp.gate.scale = 1.0


def shared_experts_forgotten(model: nn.Module) -> None:
    model.layers[-1].mlp.shared_experts = None


BREAKAGES: dict[str, Callable[[nn.Module], None]] = {
    f.__name__: f
    for f in (
        latent_norm_takes_the_configs_epsilon, latent_gamma_ignored, query_gamma_ignored, latent_bias_forgotten,
        output_bias_added_by_every_rank, temperature_forgotten, pairs_not_interleaved, rotation_forgotten,
        position_scaling_forgotten, correction_bias_forgotten, correction_bias_weighs, groups_ignored,
        one_group_too_many, other_scores, weights_not_normalised, weights_normalised, routing_scale_forgotten,
        shared_experts_forgotten,
    )
}  # fmt: skip
