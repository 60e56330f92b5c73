"""Mixtral: Mistral's attention, routed experts in every layer. Source: Jiang et al. 2024 (arXiv 2401.04088)."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PretrainedConfig

from graphfuse.models.causal_lm import CausalLM
from graphfuse.models.experts import RoutedExperts
from graphfuse.models.family import Family
from graphfuse.models.layers import Attention, DecoderLayer, activation_of
from graphfuse.models.routers import TopKRouter
from graphfuse.models.sharding import TensorParallel


class MixtralExperts(RoutedExperts):
    part_names = ("w1", "w3", "w2")


class MixtralBlock(nn.Module):
    def __init__(self, config: PretrainedConfig, tp: TensorParallel, dtype, device) -> None:
        super().__init__()
        self.gate = self.make_router(config, dtype, device)
        self.experts = MixtralExperts(
            config.num_local_experts,
            config.hidden_size,
            config.intermediate_size,
            activation_of(config)[1],
            tp,
            dtype=dtype,
            device=device,
        )

    def make_router(self, config: PretrainedConfig, dtype, device) -> nn.Module:
        size, top_k = config.num_local_experts, config.num_experts_per_tok
        return TopKRouter(config.hidden_size, size, top_k, normalise=True, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.gate(x)
        return self.experts(x, ids, weights)


class MixtralDecoderLayer(DecoderLayer):
    mlp_name = "block_sparse_moe"

    def __init__(self, config: PretrainedConfig, tp: TensorParallel, dtype, device) -> None:
        attention = Attention(
            config,
            tp,
            bias=False,
            qk_norm=False,
            sliding_window=config.sliding_window,
            dtype=dtype,
            device=device,
        )
        super().__init__(config, attention, MixtralBlock(config, tp, dtype, device), dtype, device)


class MixtralForCausalLM(CausalLM):
    about = Family("Mixtral", ("MixtralForCausalLM",), "GQA, sliding window", "top-k softmax")

    def make_layer(self, config: PretrainedConfig, index: int, tp: TensorParallel, dtype, device) -> nn.Module:
        return MixtralDecoderLayer(config, tp, dtype, device)
