"""Tiny random checkpoints of every family, made by transformers, with its logits as the yardstick.

Every parameter is random, norm weights and biases included, and large enough that logits spread by more than one: a
part that is left out then shows. The sizes divide nothing: heads, intermediate sizes and vocabularies need padding at
most tensor-parallel sizes, and there are fewer key-value heads than ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.models import tiny_delta, tiny_latent, tiny_mixtures, tiny_sparse

COMMON = {"num_hidden_layers": 3, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def config(family: str) -> PretrainedConfig:
    if family == "llama":  # 3 groups of 2 heads, as in SmolLM2: padded at TP 2 and 4
        return LlamaConfig(
            hidden_size=48, intermediate_size=50, num_attention_heads=6, num_key_value_heads=3, vocab_size=61,
            attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE, **COMMON,
        )  # fmt: skip
    if family == "mistral":
        return MistralConfig(
            hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=64,
            sliding_window=3, **COMMON,
        )  # fmt: skip
    if family == "qwen3":  # groups of 3 heads, split unevenly where a key-value head is copied; one sliding layer
        return Qwen3Config(
            hidden_size=40, intermediate_size=44, num_attention_heads=6, num_key_value_heads=2, head_dim=8,
            vocab_size=62, attention_bias=True, tie_word_embeddings=True, use_sliding_window=True, sliding_window=3,
            max_window_layers=2, **COMMON,
        )  # fmt: skip
    if family == "qwen3_moe":  # layer 1 is dense
        return Qwen3MoeConfig(  # type: ignore[call-arg]  # head_dim
            hidden_size=32, intermediate_size=44, num_attention_heads=4, num_key_value_heads=1, head_dim=8,
            vocab_size=63, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=10, norm_topk_prob=True,
            mlp_only_layers=[1], **COMMON,
        )  # fmt: skip
    more = tiny_latent.CONFIGS | tiny_sparse.CONFIGS | tiny_mixtures.CONFIGS | tiny_delta.CONFIGS
    return more[family]()


@dataclass(frozen=True)
class Batch:
    """Rows of unequal length, padded on the right, and how many tokens each row decodes after its prompt."""

    input_ids: Tensor  # [B, S]
    prompt_lengths: tuple[int, ...]
    num_decoded: int


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    batch: Batch
    logits: Tensor  # [B, S, V], transformers' own


def save(family: str, folder: Path) -> Checkpoint:
    """Write the checkpoint and compute transformers' logits in float32."""
    generator = torch.Generator().manual_seed(len(family))
    model = model_of(config(family)).eval()
    randomise(model, generator)
    model.save_pretrained(folder)
    return yardstick(model, folder, generator)


def yardstick(model: PreTrainedModel, folder: Path, generator: torch.Generator) -> Checkpoint:
    """A checkpoint in `folder` that is to give the logits of `model`."""
    vocab_size = model.config.get_text_config().vocab_size
    batch = Batch(torch.randint(0, vocab_size, (3, 9), generator=generator), (6, 3, 1), 3)
    with torch.no_grad():
        logits = model(batch.input_ids).logits
    assert logits.std() >= 1, "logits must spread, or a missing part may not show"
    return Checkpoint(folder, batch, logits)


def model_of(config: PretrainedConfig) -> PreTrainedModel:
    """transformers' model: of the class that the config names, if it does."""
    options = {"dtype": torch.float32, "experts_implementation": "eager"}  # grouped products ask for whole 16 bytes
    if config.architectures:
        return getattr(transformers, config.architectures[0])._from_config(config, **options)
    return AutoModelForCausalLM.from_config(config, **options)


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Matrices that keep the scale of what they multiply, norm weights around one, biases of every size, also those
    that are buffers."""
    for name, p in model.state_dict(keep_vars=True).items():
        noise = torch.randn(p.shape, generator=generator)
        if name.endswith("sinks"):
            p.data = noise
        elif name.endswith("A_log"):  # from nearly all to nearly nothing is kept
            p.data = noise - 1.0
        elif p.dim() == 1:
            gamma = p.detach() - 0.5 + torch.rand(p.shape, generator=generator)  # around zero, if one is added to it
            p.data = 0.3 * noise if name.endswith("bias") else gamma
        else:
            p.data = noise * (2.0 / p.shape[-1] ** 0.5)
