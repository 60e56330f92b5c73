"""Copies of a model with one part broken on purpose: the comparison must notice each of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from graphfuse.models.parallel import reduce_sum
from graphfuse.models.sharding import TensorParallel
from tests.models import breakage_delta, breakage_fp8, breakage_latent, breakage_mixtures, breakage_sparse


def gamma_ignored(model: nn.Module) -> None:
    model.layers[1].post_attention_layernorm.weight.fill_(1.0)


def final_gamma_ignored(model: nn.Module) -> None:
    model.norm.weight.fill_(1.0)


def attention_reduction_dropped(model: nn.Module) -> None:
    model.layers[0].self_attn.o_proj.tp = TensorParallel(None, 1, 0)


def last_reduction_dropped(model: nn.Module) -> None:
    next(m for m in model.layers[-1].feed_forward.modules() if hasattr(m, "tp")).tp = TensorParallel(None, 1, 0)


def embedding_reduction_dropped(model: nn.Module) -> None:
    forward, tp = model.embed_tokens.forward, model.tp
    # The sum of what is here already, divided again, is no embedding: keep only this rank's rows.
    model.embed_tokens.forward = lambda ids: torch.where(
        (ids // model.embed_tokens.shard.local == tp.rank)[:, None], forward(ids), 0.0
    )


def attention_reduction_doubled(model: nn.Module) -> None:
    double_reduction(model.layers[1].self_attn.o_proj)


def last_reduction_doubled(model: nn.Module) -> None:
    double_reduction(model.layers[-1].feed_forward)


def double_reduction(module: nn.Module) -> None:
    forward = module.forward
    tp = next(m.tp for m in module.modules() if hasattr(m, "tp"))
    module.forward = lambda x: reduce_sum(forward(x), tp)


def qk_norm_forgotten(model: nn.Module) -> None:
    model.layers[0].self_attn.q_norm = model.layers[0].self_attn.k_norm = None


def k_gamma_ignored(model: nn.Module) -> None:
    model.layers[2].self_attn.k_norm.weight.fill_(1.0)


def qkv_bias_forgotten(model: nn.Module) -> None:
    model.layers[1].self_attn.qkv_proj.bias = None


def row_bias_added_by_every_rank(model: nn.Module) -> None:
    model.layers[1].mlp.down_proj.bias.mul_(model.tp.size)


def window_ignored(model: nn.Module) -> None:
    model.layers[-1].self_attn.sliding_window = None


def window_off_by_one(model: nn.Module) -> None:
    model.layers[-1].self_attn.sliding_window += 1


def gate_forgotten(model: nn.Module) -> None:
    model.layers[1].mlp.activation = torch.ones_like


def expert_gate_forgotten(model: nn.Module) -> None:
    """Another function in the gate's place: the op knows none that leaves it out."""
    model.layers[0].mlp.experts.activation = "gelu_tanh"


def routing_weights_ignored(model: nn.Module) -> None:
    gate = model.layers[0].mlp.gate
    forward = gate.forward
    gate.forward = lambda x: (lambda ids, weights: (ids, torch.full_like(weights, 1 / weights.shape[1])))(*forward(x))


def routing_weights_not_normalised(model: nn.Module) -> None:
    model.layers[0].mlp.gate.normalise = False


def rope_scaling_forgotten(model: nn.Module) -> None:
    size = 2 * len(model.rotary.inv_freq)
    model.rotary.inv_freq = 1.0 / (10000.0 ** (torch.arange(0, size, 2) / size))


BREAKAGES: dict[str, Callable[[nn.Module], None]] = {
    f.__name__: f
    for f in (
        gamma_ignored, final_gamma_ignored, attention_reduction_dropped, last_reduction_dropped,
        embedding_reduction_dropped, attention_reduction_doubled, last_reduction_doubled, qk_norm_forgotten,
        k_gamma_ignored, qkv_bias_forgotten, row_bias_added_by_every_rank, window_ignored, window_off_by_one,
        gate_forgotten, expert_gate_forgotten, routing_weights_ignored, routing_weights_not_normalised,
        rope_scaling_forgotten,
    )
}  # fmt: skip
for part in (breakage_delta, breakage_fp8, breakage_latent, breakage_mixtures, breakage_sparse):
    BREAKAGES |= part.BREAKAGES
