"""Llama 2 and 3 and their many relatives, and Mistral, which adds a sliding window.

Source: Touvron et al. 2023 (arXiv 2302.13971), Grattafiori et al. 2024 (2407.21783), Jiang et al. 2023 (2310.06825).
"""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig

from graphfuse.models.causal_lm import CausalLM
from graphfuse.models.family import Family
from graphfuse.models.layers import Attention, DecoderLayer, GatedMLP
from graphfuse.models.sharding import TensorParallel


class LlamaDecoderLayer(DecoderLayer):
    def __init__(self, config: PretrainedConfig, tp: TensorParallel, dtype, device) -> None:
        attention = Attention(
            config,
            tp,
            bias=getattr(config, "attention_bias", False),
            qk_norm=False,
            sliding_window=getattr(config, "sliding_window", None),
            dtype=dtype,
            device=device,
        )
        mlp = GatedMLP(config, tp, bias=getattr(config, "mlp_bias", False), dtype=dtype, device=device)
        super().__init__(config, attention, mlp, dtype, device)


class LlamaForCausalLM(CausalLM):
    about = Family("Llama 2, 3", ("LlamaForCausalLM",), "GQA", "dense")

    def make_layer(self, config: PretrainedConfig, index: int, tp: TensorParallel, dtype, device) -> nn.Module:
        return LlamaDecoderLayer(config, tp, dtype, device)


class MistralForCausalLM(LlamaForCausalLM):
    """The same layers; its config has a `sliding_window`."""

    about = Family("Mistral", ("MistralForCausalLM",), "GQA, sliding window", "dense")
