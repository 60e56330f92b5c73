"""Routed experts beside one expert that every token goes to, as far as a gate of its own says.

    x ─┬► router ─► routed experts ─────────────┐
       ├► shared expert, an MLP ─► · ───────────┴► + ─► all-reduce
       └► shared_expert_gate ─► sigmoid ┘

The gate is whole on every rank, so that both stay partial sums, and one reduction serves them.
Source: Qwen Team 2024, Qwen1.5-MoE (https://qwenlm.github.io/blog/qwen-moe).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from graphfuse.models.experts import RoutedExperts
from graphfuse.models.layers import GatedMLP, activation_of
from graphfuse.models.parallel import parameter, reduce_sum
from graphfuse.models.routers import TopKRouter
from graphfuse.models.sharding import TensorParallel


class SigmoidGate(nn.Module):
    """How far a token's shared expert counts, `[T, 1]`."""

    def __init__(self, hidden_size: int, *, dtype, device) -> None:
        super().__init__()
        self.weight = parameter(1, hidden_size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(F.linear(x, self.weight))


class RoutedAndGatedSharedExpert(nn.Module):
    def __init__(self, config: PretrainedConfig, tp: TensorParallel, *, normalise: bool, dtype, device) -> None:
        """`normalise`: the weights of a token's experts are made to sum to one."""
        super().__init__()
        self.tp = tp
        kwargs = {"dtype": dtype, "device": device}
        hidden, top_k = config.hidden_size, config.num_experts_per_tok
        self.gate = TopKRouter(hidden, config.num_experts, top_k, normalise=normalise, **kwargs)
        size, activation = config.moe_intermediate_size, activation_of(config)[1]
        self.experts = RoutedExperts(config.num_experts, hidden, size, activation, tp, **kwargs)
        size = config.shared_expert_intermediate_size
        self.shared_expert = GatedMLP(config, tp, bias=False, intermediate_size=size, **kwargs)
        self.shared_expert_gate = SigmoidGate(hidden, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.gate(x)
        shared = self.shared_expert_gate(x) * self.shared_expert.partial(x)
        return reduce_sum(self.experts.partial(x, ids, weights) + shared, self.tp)
