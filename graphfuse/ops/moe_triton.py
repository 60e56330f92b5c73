"""Whether the Triton kernels can run a call of `graphfuse::moe_experts`, and the way to them.

Triton is published for Linux only, so that nothing here imports it before a call is run.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from graphfuse.ops.moe_reference import ExpertWeights
from graphfuse.tuning.moe_tiles import Tiles

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def can_run(tokens: Tensor, weights: ExpertWeights, dtype: torch.dtype, activation: str) -> str | None:
    """None, or why these kernels cannot. Knows shapes and dtypes only, so fake tensors will do."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    stored = weights.gate_up.dtype
    if dtype not in FLOATS:
        return f"the result is {str(dtype).removeprefix('torch.')}; the kernels serve bfloat16, float16 and float32"
    if stored not in FLOATS and stored not in FP8:
        return f"the weights are {str(stored).removeprefix('torch.')}; the kernels serve 16- and 32-bit floats and FP8"
    if tokens.dtype not in FLOATS and tokens.dtype != stored:
        return f"the tokens are {str(tokens.dtype).removeprefix('torch.')}, not quantised as the weights are"
    for scale in (weights.gate_up_scale, weights.down_scale):
        if scale is not None and scale.dtype not in FLOATS:
            return f"the scales are {str(scale.dtype).removeprefix('torch.')}; the kernels serve 16- and 32-bit floats"
    if weights.block_shape is not None and weights.gate_up_scale is not None:
        block_k = weights.block_shape[1]
        if block_k & (block_k - 1) or not 16 <= block_k <= 256:
            return f"scales are for blocks of {block_k} inputs; the kernels serve 16, 32, 64, 128 and 256"
    return None


def run(
    tokens: Tensor,
    weights: ExpertWeights,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: str,
    activation_limit: float | None,
    tokens_scale: Tensor | None,
    intermediate_scale: Tensor | None,
    dynamic: bool,
    dtype: torch.dtype,
    tiles: Tiles,
    first_expert: int = 0,
) -> Tensor:
    """`[T, H]` in `dtype`, for arguments that the op has checked and `can_run` has no objection to."""
    from graphfuse.ops import moe_launch

    return moe_launch.run(
        tokens, weights, topk_ids, topk_weights, activation, activation_limit, tokens_scale, intermediate_scale,
        dynamic, dtype, tiles, first_expert,
    )  # fmt: skip
