"""Qwen3, dense: Llama with queries and keys normalised per head. Source: Yang et al. 2025 (arXiv 2505.09388)."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig

from graphfuse.models.causal_lm import CausalLM
from graphfuse.models.family import Family
from graphfuse.models.layers import Attention, DecoderLayer, GatedMLP
from graphfuse.models.sharding import TensorParallel


class Qwen3DecoderLayer(DecoderLayer):
    def __init__(self, config: PretrainedConfig, tp: TensorParallel, dtype, device) -> None:
        attention = qwen3_attention(config, tp, None, dtype, device)
        super().__init__(config, attention, qwen3_mlp(config, tp, dtype, device), dtype, device)


class Qwen3SlidingDecoderLayer(DecoderLayer):
    """A class of its own, since layers of one class are traced once and must not differ in a constant."""

    def __init__(self, config: PretrainedConfig, tp: TensorParallel, dtype, device) -> None:
        attention = qwen3_attention(config, tp, config.sliding_window, dtype, device)
        super().__init__(config, attention, qwen3_mlp(config, tp, dtype, device), dtype, device)


class Qwen3ForCausalLM(CausalLM):
    about = Family("Qwen3", ("Qwen3ForCausalLM",), "GQA, q/k norm", "dense")

    def make_layer(self, config: PretrainedConfig, index: int, tp: TensorParallel, dtype, device) -> nn.Module:
        if config.layer_types[index] == "sliding_attention":
            return Qwen3SlidingDecoderLayer(config, tp, dtype, device)
        return Qwen3DecoderLayer(config, tp, dtype, device)


def qwen3_attention(
    config: PretrainedConfig, tp: TensorParallel, sliding_window: int | None, dtype, device
) -> Attention:
    return Attention(
        config,
        tp,
        bias=config.attention_bias,
        qk_norm=True,
        sliding_window=sliding_window,
        dtype=dtype,
        device=device,
    )


def qwen3_mlp(config: PretrainedConfig, tp: TensorParallel, dtype, device) -> GatedMLP:
    return GatedMLP(config, tp, bias=False, dtype=dtype, device=device)
