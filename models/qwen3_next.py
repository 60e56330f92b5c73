"""Qwen3-Next: three layers of gated DeltaNet, then one of gated attention, all with routed experts and a shared one.

    linear_attention   x ─► norm ─► gated DeltaNet ──────────────► + ─► norm ─► routed + gated shared experts ─► +
    full_attention     x ─► norm ─► attention, gated output ─────► + ─► norm ─► routed + gated shared experts ─► +

Attention normalises queries and keys per head and rotates a quarter of each; norms multiply by one plus their weight.

Source: Qwen Team 2025, Qwen3-Next (https://qwen.ai/blog?id=qwen3-next), Yang et al. 2024 (arXiv 2412.06464), and Qiu et
al. 2025 (arXiv 2505.06708) for the output gate.
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from transformers import PretrainedConfig

from graphfuse.models.causal_lm import CausalLM
from graphfuse.models.family import Family
from graphfuse.models.gated_delta_net import GatedDeltaNet, group_by_group
from graphfuse.models.gated_shared_expert import RoutedAndGatedSharedExpert
from graphfuse.models.layers import Attention, DecoderLayer, GatedMLP, RMSNorm, ZeroCentredRMSNorm
from graphfuse.models.sharding import Shard, TensorParallel


class GatedAttention(Attention):
    norm_type: ClassVar[type[RMSNorm]] = ZeroCentredRMSNorm

    def __init__(self, config: PretrainedConfig, tp: TensorParallel, dtype, device) -> None:
        super().__init__(
            config,
            tp,
            bias=config.attention_bias,
            qk_norm=True,
            sliding_window=None,
            output_gate=True,
            dtype=dtype,
            device=device,
        )


class Qwen3NextDeltaNet(GatedDeltaNet):
    """The checkpoint goes from key head to key head: its q, its k, the v and the z of its value heads."""

    def projections(self, keys: Shard, values: Shard) -> tuple[dict[str, Shard], dict[str, Shard]]:
        q = k = (keys, self.key_dim)
        v = z = (values, self.value_dim)
        b = a = (values, 1)
        return {"in_proj_qkvz": group_by_group(keys.full, q, k, v, z)}, {"in_proj_ba": group_by_group(keys.full, b, a)}


class HybridDecoderLayer(DecoderLayer):
    """Of the kind that a subclass says; a class each, since layers of one class are traced once."""

    norm_type: ClassVar[type[RMSNorm]] = ZeroCentredRMSNorm
    mixer_type: ClassVar[type[GatedAttention | GatedDeltaNet]]
    is_sparse: ClassVar[bool]

    def __init__(self, config: PretrainedConfig, tp: TensorParallel, dtype, device) -> None:
        mixer = self.mixer_type(config, tp, dtype, device)
        if self.is_sparse:
            normalise = getattr(config, "norm_topk_prob", True)
            mlp: nn.Module = RoutedAndGatedSharedExpert(config, tp, normalise=normalise, dtype=dtype, device=device)
        else:
            mlp = GatedMLP(config, tp, bias=False, dtype=dtype, device=device)
        super().__init__(config, mixer, mlp, dtype, device)


class SparseAttentionLayer(HybridDecoderLayer):
    mixer_type, is_sparse = GatedAttention, True


class DenseAttentionLayer(HybridDecoderLayer):
    mixer_type, is_sparse = GatedAttention, False


class Qwen3NextSparseDeltaNetLayer(HybridDecoderLayer):
    mixer_name = "linear_attn"
    mixer_type, is_sparse = Qwen3NextDeltaNet, True


class Qwen3NextDenseDeltaNetLayer(HybridDecoderLayer):
    mixer_name = "linear_attn"
    mixer_type, is_sparse = Qwen3NextDeltaNet, False


class Qwen3NextForCausalLM(CausalLM):
    about = Family(
        "Qwen3-Next",
        ("Qwen3NextForCausalLM",),
        "gated DeltaNet and GQA with output gate, q/k norm, partial rotary",
        "top-k softmax, gated shared expert",
    )
    norm_type = ZeroCentredRMSNorm

    def make_layer(self, config: PretrainedConfig, index: int, tp: TensorParallel, dtype, device) -> nn.Module:
        """Dense where `mlp_only_layers` says so, or where the step of sparse layers skips the layer."""
        skipped = config.num_experts == 0 or (index + 1) % config.decoder_sparse_step != 0
        is_sparse = not skipped and index not in config.mlp_only_layers
        kind: type[HybridDecoderLayer]
        if config.layer_types[index] == "linear_attention":
            kind = Qwen3NextSparseDeltaNetLayer if is_sparse else Qwen3NextDenseDeltaNetLayer
        else:
            kind = SparseAttentionLayer if is_sparse else DenseAttentionLayer
        return kind(config, tp, dtype, device)
