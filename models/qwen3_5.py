"""Qwen3.5, the text part: Qwen3-Next's layers, dense or with experts, of checkpoints that also hold a vision tower.

Its gated DeltaNet is stored projection by projection. Positions of text are equal in all three sections of the rotary
embedding (time, height, width), for which their interleaving means nothing.

Source: Qwen Team 2026, Qwen3.5 (https://qwen.ai/blog?id=qwen3.5), and Qwen3-Next's.
"""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig

from graphfuse.models.causal_lm import CausalLM
from graphfuse.models.family import Family
from graphfuse.models.gated_delta_net import GatedDeltaNet, one_behind_another
from graphfuse.models.layers import ZeroCentredRMSNorm
from graphfuse.models.qwen3_next import DenseAttentionLayer, HybridDecoderLayer, SparseAttentionLayer
from graphfuse.models.sharding import Shard, TensorParallel


class Qwen3_5DeltaNet(GatedDeltaNet):
    """The checkpoint has q, k and v one behind another, and z, b and a on their own."""

    def projections(self, keys: Shard, values: Shard) -> tuple[dict[str, Shard], dict[str, Shard]]:
        key_rows, value_rows = keys.times(self.key_dim), values.times(self.value_dim)
        qkv = one_behind_another(key_rows, key_rows, value_rows)
        return {"in_proj_qkv": qkv, "in_proj_z": value_rows}, {"in_proj_b": values, "in_proj_a": values}


class Qwen3_5DenseDeltaNetLayer(HybridDecoderLayer):
    mixer_name = "linear_attn"
    mixer_type, is_sparse = Qwen3_5DeltaNet, False


class Qwen3_5SparseDeltaNetLayer(HybridDecoderLayer):
    mixer_name = "linear_attn"
    mixer_type, is_sparse = Qwen3_5DeltaNet, True


class Qwen3_5ForCausalLM(CausalLM):
    about = Family(
        "Qwen3.5",
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
        "gated DeltaNet and GQA with output gate, q/k norm, partial rotary",
        "dense",
    )
    norm_type = ZeroCentredRMSNorm

    def make_layer(self, config: PretrainedConfig, index: int, tp: TensorParallel, dtype, device) -> nn.Module:
        is_linear = config.layer_types[index] == "linear_attention"
        return (Qwen3_5DenseDeltaNetLayer if is_linear else DenseAttentionLayer)(config, tp, dtype, device)


class Qwen3_5MoeForCausalLM(CausalLM):
    about = Family(
        "Qwen3.5-MoE",
        ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
        "gated DeltaNet and GQA with output gate, q/k norm, partial rotary",
        "top-k softmax, gated shared expert",
    )
    norm_type = ZeroCentredRMSNorm

    def make_layer(self, config: PretrainedConfig, index: int, tp: TensorParallel, dtype, device) -> nn.Module:
        is_linear = config.layer_types[index] == "linear_attention"
        return (Qwen3_5SparseDeltaNetLayer if is_linear else SparseAttentionLayer)(config, tp, dtype, device)
