"""Copies of a model in FP8 with one scale broken on purpose."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def scale_of_a_block_wrong(model: nn.Module) -> None:
    model.layers[0].self_attn.qkv_proj.weight_scale[0, 1] *= 1.5


def scales_of_the_inputs_ignored(model: nn.Module) -> None:
    """Each row of blocks gets the scale of its first one."""
    scale = model.layers[0].self_attn.o_proj.weight_scale
    scale.copy_(scale[:, :1].expand_as(scale))


def scales_of_one_expert_for_all(model: nn.Module) -> None:
    scale = model.layers[0].mlp.experts.down_scale
    scale.copy_(scale[:1].expand_as(scale))


def gates_have_the_scales_of_ups(model: nn.Module) -> None:
    scale = model.layers[1].mlp.experts.gate_up_scale
    half = scale.shape[1] // 2
    scale[:, :half] = scale[:, half:]


def one_scale_for_queries_and_keys(model: nn.Module) -> None:
    scale = model.layers[0].self_attn.qkv_proj.weight_scale
    scale.fill_(scale[0])


def input_scale_wrong(model: nn.Module) -> None:
    """Activations are rounded to other numbers; their size is right."""
    model.layers[0].self_attn.qkv_proj.input_scale *= 1.3


def expert_input_scales_of_one_for_all(model: nn.Module) -> None:
    scale = model.layers[0].mlp.experts.tokens_scale
    scale.fill_(scale[0])


def intermediate_scales_of_one_for_all(model: nn.Module) -> None:
    scale = model.layers[0].mlp.experts.intermediate_scale
    scale.fill_(scale[0])


def activations_by_the_token(model: nn.Module) -> None:
    """One scale for each token instead of one for each group: finer or coarser, but not what was published."""
    fp8 = model.layers[0].self_attn.qkv_proj.fp8
    object.__setattr__(fp8, "scheme", type(fp8.scheme)(fp8.scheme.weights, "token"))


def activations_not_rounded(model: nn.Module) -> None:
    down = model.layers[0].mlp.down_proj
    down.partial = lambda x: torch.nn.functional.linear(x, down.fp8.dequantised(down, x.dtype))


BREAKAGES: dict[str, Callable[[nn.Module], None]] = {
    f.__name__: f
    for f in (
        scale_of_a_block_wrong, scales_of_the_inputs_ignored, scales_of_one_expert_for_all,
        gates_have_the_scales_of_ups, one_scale_for_queries_and_keys, input_scale_wrong,
        expert_input_scales_of_one_for_all, intermediate_scales_of_one_for_all, activations_by_the_token,
        activations_not_rounded,
    )
}  # fmt: skip
