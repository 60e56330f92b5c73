"""Qwen2 and 2.5: Llama with biases on queries, keys and values. Source: Qwen Team 2024 (arXiv 2407.10671)."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig

from graphfuse.models.causal_lm import CausalLM
from graphfuse.models.family import Family
from graphfuse.models.layers import Attention, DecoderLayer, GatedMLP
from graphfuse.models.sharding import TensorParallel


class Qwen2DecoderLayer(DecoderLayer):
    sliding = False

    def __init__(self, config: PretrainedConfig, tp: TensorParallel, dtype, device) -> None:
        attention = qwen2_attention(config, tp, self.sliding, dtype, device)
        mlp = GatedMLP(config, tp, bias=False, dtype=dtype, device=device)
        super().__init__(config, attention, mlp, dtype, device)


class Qwen2SlidingDecoderLayer(Qwen2DecoderLayer):
    """A class of its own, since layers of one class are traced once and must not differ in a constant."""

    sliding = True


class Qwen2ForCausalLM(CausalLM):
    about = Family("Qwen2, 2.5", ("Qwen2ForCausalLM",), "GQA, q/k/v biases", "dense")

    def make_layer(self, config: PretrainedConfig, index: int, tp: TensorParallel, dtype, device) -> nn.Module:
        sliding = config.layer_types[index] == "sliding_attention"
        return (Qwen2SlidingDecoderLayer if sliding else Qwen2DecoderLayer)(config, tp, dtype, device)


def qwen2_attention(config: PretrainedConfig, tp: TensorParallel, sliding: bool, dtype, device) -> Attention:
    return Attention(
        config,
        tp,
        bias=getattr(config, "qkv_bias", True),
        output_bias=False,
        qk_norm=False,
        sliding_window=config.sliding_window if sliding else None,
        dtype=dtype,
        device=device,
    )
