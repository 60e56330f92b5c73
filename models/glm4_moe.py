"""GLM-4.5, 4.6 and 4.5-Air: grouped-query attention that rotates half of each head, and DeepSeek-V3's experts behind
the first layers, which are dense.

Source: GLM-4.5 Team 2025 (arXiv 2508.06471).
"""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig

from graphfuse.models.causal_lm import CausalLM
from graphfuse.models.deepseek import is_dense, is_predictor
from graphfuse.models.family import Family
from graphfuse.models.layers import Attention, DecoderLayer, GatedMLP
from graphfuse.models.sharding import TensorParallel
from graphfuse.models.shared_experts import RoutedAndSharedExperts


class Glm4MoeDenseLayer(DecoderLayer):
    def __init__(self, config: PretrainedConfig, tp: TensorParallel, dtype, device) -> None:
        mlp = GatedMLP(config, tp, bias=False, dtype=dtype, device=device)
        super().__init__(config, glm4_attention(config, tp, dtype, device), mlp, dtype, device)


class Glm4MoeSparseLayer(DecoderLayer):
    def __init__(self, config: PretrainedConfig, tp: TensorParallel, dtype, device) -> None:
        moe = RoutedAndSharedExperts(config, tp, scoring="sigmoid", dtype=dtype, device=device)
        super().__init__(config, glm4_attention(config, tp, dtype, device), moe, dtype, device)


class Glm4MoeForCausalLM(CausalLM):
    about = Family(
        "GLM-4.5, 4.6",
        ("Glm4MoeForCausalLM",),
        "GQA, q/k norm, partial rotary",
        "sigmoid with bias, groups, shared experts",
    )

    def make_layer(self, config: PretrainedConfig, index: int, tp: TensorParallel, dtype, device) -> nn.Module:
        return (Glm4MoeDenseLayer if is_dense(config, index) else Glm4MoeSparseLayer)(config, tp, dtype, device)

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or is_predictor(name, self.config)


def glm4_attention(config: PretrainedConfig, tp: TensorParallel, dtype, device) -> Attention:
    return Attention(
        config,
        tp,
        bias=config.attention_bias,
        output_bias=False,
        qk_norm=config.use_qk_norm,
        sliding_window=None,
        dtype=dtype,
        device=device,
    )
