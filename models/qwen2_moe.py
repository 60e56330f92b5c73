"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, routed experts, and a shared one with a gate.

Source: Qwen Team 2024 (https://qwenlm.github.io/blog/qwen-moe, arXiv 2407.10671).
"""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig

from graphfuse.models.causal_lm import CausalLM
from graphfuse.models.family import Family
from graphfuse.models.gated_shared_expert import RoutedAndGatedSharedExpert
from graphfuse.models.layers import DecoderLayer
from graphfuse.models.qwen2 import Qwen2DecoderLayer, Qwen2SlidingDecoderLayer, qwen2_attention
from graphfuse.models.sharding import TensorParallel


class Qwen2MoeSparseDecoderLayer(DecoderLayer):
    sliding = False

    def __init__(self, config: PretrainedConfig, tp: TensorParallel, dtype, device) -> None:
        attention = qwen2_attention(config, tp, self.sliding, dtype, device)
        moe = RoutedAndGatedSharedExpert(config, tp, normalise=config.norm_topk_prob, dtype=dtype, device=device)
        super().__init__(config, attention, moe, dtype, device)


class Qwen2MoeSparseSlidingDecoderLayer(Qwen2MoeSparseDecoderLayer):
    sliding = True


class Qwen2MoeForCausalLM(CausalLM):
    about = Family(
        "Qwen1.5-MoE, Qwen2-MoE",
        ("Qwen2MoeForCausalLM",),
        "GQA, q/k/v biases",
        "top-k softmax, gated shared expert",
    )

    def make_layer(self, config: PretrainedConfig, index: int, tp: TensorParallel, dtype, device) -> nn.Module:
        """Dense where `mlp_only_layers` says so, or where the step of sparse layers skips the layer."""
        skipped = config.num_experts == 0 or (index + 1) % config.decoder_sparse_step != 0
        dense = skipped or index in config.mlp_only_layers
        kinds = {
            (True, False): Qwen2DecoderLayer,
            (True, True): Qwen2SlidingDecoderLayer,
            (False, False): Qwen2MoeSparseDecoderLayer,
            (False, True): Qwen2MoeSparseSlidingDecoderLayer,
        }
        return kinds[dense, config.layer_types[index] == "sliding_attention"](config, tp, dtype, device)
