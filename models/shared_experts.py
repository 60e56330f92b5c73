"""Routed experts beside experts that every token goes to, as DeepSeek's models and their relatives have them.

    x ─┬► router ─► routed experts ─┐
       └► shared experts, one MLP ──┴► + ─► all-reduce

Both are partial sums, so that one reduction serves them.
Source: Dai et al. 2024, DeepSeekMoE (arXiv 2401.06066), section 3.2.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PretrainedConfig

from graphfuse.models.experts import RoutedExperts
from graphfuse.models.layers import GatedMLP, activation_of
from graphfuse.models.parallel import reduce_sum
from graphfuse.models.routers import GroupLimitedRouter
from graphfuse.models.sharding import TensorParallel


class RoutedAndSharedExperts(nn.Module):
    def __init__(self, config: PretrainedConfig, tp: TensorParallel, *, scoring: str, dtype, device) -> None:
        """`scoring`: "sigmoid", which comes with a correction bias, or "softmax"."""
        super().__init__()
        self.tp = tp
        self.gate = GroupLimitedRouter(
            config.hidden_size,
            config.n_routed_experts,
            config.num_experts_per_tok,
            scoring=scoring,
            correction_bias=scoring == "sigmoid",
            num_groups=config.n_group or 1,
            top_groups=config.topk_group or 1,
            normalise=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
            device=device,
        )
        self.experts = RoutedExperts(
            config.n_routed_experts,
            config.hidden_size,
            config.moe_intermediate_size,
            activation_of(config)[1],
            tp,
            dtype=dtype,
            device=device,
        )
        size = config.moe_intermediate_size * (config.n_shared_experts or 0)
        self.shared_experts = (
            GatedMLP(config, tp, bias=False, intermediate_size=size, dtype=dtype, device=device) if size else None
        )

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.gate(x)
        partial = self.experts.partial(x, ids, weights)
        if self.shared_experts is not None:
            partial = partial + self.shared_experts.partial(x)
        return reduce_sum(partial, self.tp)
