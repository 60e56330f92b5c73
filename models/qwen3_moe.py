"""Qwen3-MoE: Qwen3's attention, with routed experts in all or most layers.

Source: Yang et al. 2025 (arXiv 2505.09388).
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PretrainedConfig

from graphfuse.models.causal_lm import CausalLM
from graphfuse.models.experts import RoutedExperts
from graphfuse.models.family import Family
from graphfuse.models.layers import DecoderLayer, activation_of
from graphfuse.models.qwen3 import qwen3_attention, qwen3_mlp
from graphfuse.models.routers import TopKRouter
from graphfuse.models.sharding import TensorParallel


class Qwen3MoeBlock(nn.Module):
    def __init__(self, config: PretrainedConfig, tp: TensorParallel, dtype, device) -> None:
        super().__init__()
        self.gate = TopKRouter(
            config.hidden_size,
            config.num_experts,
            config.num_experts_per_tok,
            normalise=config.norm_topk_prob,
            dtype=dtype,
            device=device,
        )
        self.experts = RoutedExperts(
            config.num_experts,
            config.hidden_size,
            config.moe_intermediate_size,
            activation_of(config)[1],
            tp,
            dtype=dtype,
            device=device,
        )

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.gate(x)
        return self.experts(x, ids, weights)


class Qwen3MoeSparseDecoderLayer(DecoderLayer):
    def __init__(self, config: PretrainedConfig, tp: TensorParallel, dtype, device) -> None:
        attention = qwen3_attention(config, tp, config.sliding_window, dtype, device)
        super().__init__(config, attention, Qwen3MoeBlock(config, tp, dtype, device), dtype, device)


class Qwen3MoeDenseDecoderLayer(DecoderLayer):
    def __init__(self, config: PretrainedConfig, tp: TensorParallel, dtype, device) -> None:
        attention = qwen3_attention(config, tp, config.sliding_window, dtype, device)
        super().__init__(config, attention, qwen3_mlp(config, tp, dtype, device), dtype, device)


class Qwen3MoeForCausalLM(CausalLM):
    about = Family("Qwen3-MoE", ("Qwen3MoeForCausalLM",), "GQA, q/k norm", "top-k softmax")

    def make_layer(self, config: PretrainedConfig, index: int, tp: TensorParallel, dtype, device) -> nn.Module:
        """Dense where `mlp_only_layers` says so, or where the step of sparse layers skips the layer."""
        skipped = config.num_experts == 0 or (index + 1) % config.decoder_sparse_step != 0
        if skipped or index in config.mlp_only_layers:
            return Qwen3MoeDenseDecoderLayer(config, tp, dtype, device)
        return Qwen3MoeSparseDecoderLayer(config, tp, dtype, device)
