"""DeepSeek-V3 and R1, and what is built like them: Kimi-K2, GLM-4-Lite (Flash), Mistral Large 3 and Small 4.

Latent attention, and experts behind the first layers, which are dense. They differ in what their configs say: sizes,
groups of experts, whether queries have a latent, YaRN, how scores are made, which layers are dense.

Checkpoints may hold further layers behind the last one, which predict tokens beyond the next; they are not loaded.

Source: DeepSeek-AI 2024, DeepSeek-V3 (arXiv 2412.19437); Kimi Team 2025, Kimi K2 (2507.20534).
"""

from __future__ import annotations

import re
from typing import ClassVar

from torch import nn
from transformers import PretrainedConfig

from graphfuse.models.causal_lm import CausalLM
from graphfuse.models.family import Family
from graphfuse.models.layers import DecoderLayer, GatedMLP
from graphfuse.models.mla import LatentAttention
from graphfuse.models.sharding import TensorParallel
from graphfuse.models.shared_experts import RoutedAndSharedExperts


class DeepseekDenseLayer(DecoderLayer):
    def __init__(self, config: PretrainedConfig, tp: TensorParallel, dtype, device) -> None:
        attention = LatentAttention(config, tp, dtype=dtype, device=device)
        mlp = GatedMLP(config, tp, bias=False, dtype=dtype, device=device)
        super().__init__(config, attention, mlp, dtype, device)


class DeepseekSparseLayer(DecoderLayer):
    def __init__(self, config: PretrainedConfig, scoring: str, tp: TensorParallel, dtype, device) -> None:
        attention = LatentAttention(config, tp, dtype=dtype, device=device)
        mlp = RoutedAndSharedExperts(config, tp, scoring=scoring, dtype=dtype, device=device)
        super().__init__(config, attention, mlp, dtype, device)


class DeepseekV3ForCausalLM(CausalLM):
    about = Family(
        "DeepSeek-V3, R1; Kimi-K2, K2.5; Mistral Large 3",
        ("DeepseekV3ForCausalLM", "MistralLarge3ForCausalLM", "KimiK25ForConditionalGeneration"),
        "MLA",
        "sigmoid with bias, groups, shared experts",
    )
    scoring: ClassVar[str] = "sigmoid"
    """How the router's scores are made where the config does not say."""

    def make_layer(self, config: PretrainedConfig, index: int, tp: TensorParallel, dtype, device) -> nn.Module:
        if is_dense(config, index):
            return DeepseekDenseLayer(config, tp, dtype, device)
        scoring = getattr(config, "scoring_func", None) or self.scoring
        return DeepseekSparseLayer(config, scoring, tp, dtype, device)

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or is_predictor(name, self.config)


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    about = Family("GLM-4-Lite (Flash)", ("Glm4MoeLiteForCausalLM",), "MLA", "sigmoid with bias, shared experts")


class Mistral4ForCausalLM(DeepseekV3ForCausalLM):
    about = Family(
        "Mistral Small 4",
        ("Mistral4ForCausalLM", "Mistral3ForConditionalGeneration", "PixtralForConditionalGeneration"),
        "MLA",
        "top-k softmax, shared experts",
    )
    scoring = "softmax"


def is_dense(config: PretrainedConfig, index: int) -> bool:
    """Some configs list the layers' kinds, others count the dense ones in front."""
    kinds = getattr(config, "mlp_layer_types", None)
    return index < config.first_k_dense_replace if kinds is None else kinds[index] == "dense"


def is_predictor(name: str, config: PretrainedConfig) -> bool:
    """Whether a checkpoint's tensor belongs to a layer behind the last one, which predicts tokens beyond the next."""
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    num_layers = config.num_hidden_layers
    num_more = getattr(config, "num_nextn_predict_layers", 0) or 0
    return layer is not None and num_layers <= int(layer.group(1)) < num_layers + num_more
