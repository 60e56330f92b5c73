"""Tiny configs of the models with sparse attention.

Three of nine tokens are selected. The indexer has heads enough that scores are seldom zero, which would leave open what
is selected; its rotary part is half of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import DeepseekV32Config, GlmMoeDsaConfig, PretrainedConfig

from tests.models.tiny_latent import SIZES, YARN

INDEX: dict[str, Any] = {"index_topk": 3, "index_n_heads": 16, "index_head_dim": 8}


def deepseek_v32() -> PretrainedConfig:
    """Groups of experts, biases, YaRN; the first layer is dense."""
    return DeepseekV32Config(
        **SIZES, **INDEX, n_routed_experts=8, n_group=4, topk_group=2, first_k_dense_replace=1, attention_bias=True,
        rope_parameters=YARN,
    )  # fmt: skip


def glm_moe_dsa() -> PretrainedConfig:
    """Every layer selects, and pairs of the indexer are interleaved."""
    return GlmMoeDsaConfig(**SIZES, **INDEX, n_routed_experts=6, n_group=1, topk_group=1, first_k_dense_replace=1)


def glm_moe_dsa_shared() -> PretrainedConfig:
    """Layers that attend to what an earlier one has selected."""
    sizes = {**SIZES, "num_hidden_layers": 5}
    return GlmMoeDsaConfig(
        **sizes, **INDEX, n_routed_experts=6, n_group=1, topk_group=1, first_k_dense_replace=2,
        indexer_types=["full", "shared", "full", "shared", "shared"],
    )  # fmt: skip


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    f.__name__: f for f in (deepseek_v32, glm_moe_dsa, glm_moe_dsa_shared)
}
