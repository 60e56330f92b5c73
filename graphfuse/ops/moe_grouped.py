"""Plain CUDA path of `graphfuse::moe_experts`: sort the choices by expert, then two grouped matrix products.

Nothing depends on the values of the ids on the host, so the path can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graphfuse.ops.moe_reference import ExpertWeights, gated_activation


def can_run(tokens: Tensor, weights: ExpertWeights, dtype: torch.dtype) -> bool:
    """bfloat16 without scales or transposition, on a GPU with grouped products and rows of whole 16 bytes."""
    return (
        tokens.is_cuda
        and tokens.dtype == dtype == weights.gate_up.dtype == torch.bfloat16
        and weights.gate_up_scale is None
        and not weights.transposed
        and weights.gate_up.is_contiguous()
        and weights.down.is_contiguous()
        and weights.gate_up_shape[2] % 8 == 0
        and weights.down_shape[2] % 8 == 0
        and tokens.numel() > 0
        and torch.cuda.get_device_capability(tokens.device) >= (9, 0)
    )


def run(
    tokens: Tensor,
    weights: ExpertWeights,
    local_ids: Tensor,
    topk_weights: Tensor,
    activation: str,
    activation_limit: float | None,
) -> Tensor:
    """`[T, H]`; choices of experts that are not held here sort behind all others and count for nothing."""
    num_tokens, top_k = local_ids.shape
    held = (local_ids >= 0) & (local_ids < weights.num_experts)
    expert = torch.where(held, local_ids, weights.num_experts).flatten()  # [T * K]
    expert, order = torch.sort(expert, stable=True)
    ends = torch.searchsorted(expert, torch.arange(weights.num_experts, device=expert.device), right=True).to(
        torch.int32
    )  # [E], where each expert's rows end
    safe = expert.clamp(max=weights.num_experts - 1)
    x = F.grouped_mm(tokens[order // top_k], weights.gate_up.transpose(1, 2), offs=ends)  # [T * K, 2I]
    if weights.gate_up_bias is not None:
        x = x + weights.gate_up_bias[safe].to(x.dtype)
    x = gated_activation(x, weights.interleaved, activation, activation_limit).contiguous()  # [T * K, I]
    x = F.grouped_mm(x, weights.down.transpose(1, 2), offs=ends)  # [T * K, H]
    if weights.down_bias is not None:
        x = x + weights.down_bias[safe].to(x.dtype)
    # Rows behind the last expert are never written by the products: choose zero, since zero times NaN is not zero.
    share = topk_weights.flatten()[order].float()
    x = torch.where((expert < weights.num_experts)[:, None], x.float() * share[:, None], 0.0)
    by_choice = torch.empty_like(x).index_copy_(0, order, x)  # back to [T, K] order: a fixed order of summation
    return by_choice.view(num_tokens, top_k, -1).sum(1).to(tokens.dtype)
