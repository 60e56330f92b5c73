"""Copies of a model with sparse attention with one part of it broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphfuse.models.layers import rotate
from graphfuse.models.mla import rotate_interleaved


def indexer(model: nn.Module) -> Any:
    """The last one: more than one layer depends on it in models that share."""
    return [mixer.indexer for mixer in model.mixers if hasattr(mixer, "indexer")][-1]


def every_token_selected(model: nn.Module) -> None:
    indexer(model).top_k = model.config.max_position_embeddings


def one_token_less_selected(model: nn.Module) -> None:
    indexer(model).top_k -= 1


def one_token_more_selected(model: nn.Module) -> None:
    indexer(model).top_k += 1


def index_gamma_ignored(model: nn.Module) -> None:
    indexer(model).k_norm.weight.fill_(1.0)


def index_bias_forgotten(model: nn.Module) -> None:
    indexer(model).k_norm.bias.fill_(0.0)


def index_mean_not_taken_off(model: nn.Module) -> None:
    norm = indexer(model).k_norm
    norm.forward = lambda x: norm.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) + norm.bias


def index_rotation_forgotten(model: nn.Module) -> None:
    indexer(model).rotate = lambda x, _cos, _sin: x


def index_rotation_of_the_other_layout(model: nn.Module) -> None:
    part = indexer(model)
    part.rotate = rotate_interleaved if part.rotate is rotate else rotate


def index_rotation_of_the_last_dimensions(model: nn.Module) -> None:
    part = indexer(model)
    turn = part.rotate
    part.rotate = lambda x, cos, sin: turn(x.roll(cos.shape[-1], -1), cos, sin)


def index_heads_weigh_alike(model: nn.Module) -> None:
    part = indexer(model).weights_proj
    part.forward = lambda x: x.new_ones(x.shape[0], part.weight.shape[0])


def index_heads_have_the_weights_of_others(model: nn.Module) -> None:
    part = indexer(model).weights_proj
    part.weight.copy_(part.weight.roll(1, 0))


def index_keys_not_rotated(model: nn.Module) -> None:
    part = indexer(model)
    turn = part.rotate
    part.rotate = lambda x, cos, sin: x if x.shape[2] == 1 else turn(x, cos, sin)


def index_queries_of_the_latent_before_its_norm(model: nn.Module) -> None:
    """Its norm's weight is what then is missing: the length of a query changes no choice."""
    mixer = next(m for m in model.mixers if hasattr(m, "indexer"))
    part, gamma = mixer.indexer, mixer.q_a_layernorm.weight
    forward = part.forward
    part.forward = lambda x, q, *where: forward(x, q / gamma, *where)


def selection_of_the_first_layer_for_all(model: nn.Module) -> None:
    first, last = model.layers[0].self_attn.indexer, model.layers[2].self_attn.indexer
    forward = first.forward

    def select(*args: Any) -> Any:
        first.kept = forward(*args)
        return first.kept

    first.forward = select
    last.forward = lambda *_args: first.kept


BREAKAGES: dict[str, Callable[[nn.Module], None]] = {
    f.__name__: f
    for f in (
        every_token_selected, one_token_less_selected, one_token_more_selected, index_gamma_ignored,
        index_bias_forgotten, index_mean_not_taken_off, index_rotation_forgotten, index_rotation_of_the_other_layout,
        index_rotation_of_the_last_dimensions, index_heads_weigh_alike, index_heads_have_the_weights_of_others,
        index_keys_not_rotated, index_queries_of_the_latent_before_its_norm,
        selection_of_the_first_layer_for_all,
    )
}  # fmt: skip
