"""config.json of a checkpoint, as transformers reads it, and what is said of values that cannot be."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from graphfuse.errors import CheckpointError, brief
from graphfuse.jsonfile import read_json

LIMITS = {
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "moe_intermediate_size": 1 << 24,
    "vocab_size": 1 << 24,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "q_lora_rank": 1 << 20,
    "kv_lora_rank": 1 << 20,
    "qk_nope_head_dim": 1 << 14,
    "qk_rope_head_dim": 1 << 14,
    "index_topk": 1 << 16,
    "index_n_heads": 1 << 14,
    "index_head_dim": 1 << 14,
    "v_head_dim": 1 << 14,
    "num_experts": 1 << 18,
    "n_routed_experts": 1 << 18,
    "n_group": 1 << 14,
    "topk_group": 1 << 14,
    "num_experts_per_tok": 1 << 14,
    "max_position_embeddings": 1 << 32,
}
"""Fields that a model divides by, counts to or allocates, and a value ten times any model's."""

LIMITS_BY_LAST_WORD = {"layers": 1 << 12, "layer": 1 << 12, "experts": 1 << 18, "labels": 1 << 20}
"""The same for what each family names in its own way (n_layer, num_local_experts): a list of every layer's type, say,
is made before anything else could notice that there are 10^9 layers."""

MAY_BE_ZERO = ("num_experts",)

ALIASES = {"kimi_k2": "deepseek_v3"}
"""A `model_type` of a published checkpoint, and the one under which transformers has the same config."""


def read_config(folder: Path) -> PretrainedConfig:
    """config.json as transformers reads it. No code of the checkpoint's own is run: `auto_map` is not followed.

    Raises:
        CheckpointError: there is none, it is damaged, it needs code of its own, or a value of it cannot be.
    """
    from graphfuse.models.registry import FAMILIES

    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder} has no config.json. Pass the folder of a complete checkpoint.")
    try:
        values = read_json(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({brief(error)}). Check or download it again.") from error
    _check_values(file, values)
    try:
        config = _from_values(folder, values)
        if text_config(config).model_type in FAMILIES:
            _check_relations(file, text_config(config))
    except CheckpointError:
        raise
    except Exception as error:  # its classes check what they hold, each in its own way
        if isinstance(values.get("auto_map"), dict) and "AutoConfig" in values["auto_map"]:
            raise CheckpointError(
                f"{file} is of a kind that transformers does not have, and brings code of its own, which graphfuse "
                "never runs. Load the model with transformers and trust_remote_code=True, if you trust it, and pass it "
                "to graphfuse.compile."
            ) from error
        raise CheckpointError(
            f"{file} has a value that cannot be ({brief(error, 400)}). Check or download it again."
        ) from error
    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
        raise CheckpointError(f"{file} has dtype={dtype}, which weights cannot have. Write a floating one.")
    return config


def _from_values(folder: Path, values: dict[str, Any]) -> PretrainedConfig:
    known = ALIASES.get(str(values.get("model_type")))
    if known is None:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return CONFIG_MAPPING[known].from_dict({**values, "model_type": known})


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """What a wrapper of several modalities says of its language model; another config itself. The wrapper decides how
    the checkpoint is quantised and whether the head is tied."""
    inner = getattr(config, "text_config", None)
    if not isinstance(inner, PretrainedConfig):
        return config
    inner = copy.copy(inner)
    inner.tie_word_embeddings = config.tie_word_embeddings
    for field in ("quantization_config", "dtype"):
        if getattr(config, field, None) is not None:
            setattr(inner, field, getattr(config, field))
    return inner


def _check_values(file: Path, values: Any) -> None:
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds no JSON object. Check or download it again.")
    architectures = values.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise CheckpointError(f"{file} has architectures={brief(architectures)}. It must be a list of class names.")
    _check_least(file, values)
    waiting = [values]  # configs of several modalities hold one for each
    while waiting:
        section = waiting.pop()
        waiting += [inner for inner in section.values() if isinstance(inner, dict)]
        for field, value in section.items():
            if field.lstrip("_") in ("attn_implementation", "experts_implementation") and "/" in str(value):
                raise CheckpointError(
                    f"{file} has {field}={brief(value)}, a kernel that transformers would download and run. Remove it, "
                    "and set it yourself if you want it."
                )
            limit = LIMITS.get(field, LIMITS_BY_LAST_WORD.get(field.rpartition("_")[2], math.inf))
            if isinstance(value, int | float) and not value <= limit:  # also NaN
                raise CheckpointError(
                    f"{file} has {brief(field)[1:-1]}={brief(value)}, more than any model's. Check or download the "
                    "file again."
                )


def _check_least(file: Path, values: dict[str, Any]) -> None:
    from graphfuse.models.registry import FAMILIES

    inner = values.get("text_config")
    if isinstance(inner, dict):
        _check_least(file, inner)
    if values.get("model_type") not in [*FAMILIES, *ALIASES]:
        return
    for field in LIMITS:
        value, least = values.get(field), 0 if field in MAY_BE_ZERO else 1
        if isinstance(value, int) and value < least:
            raise CheckpointError(
                f"{file} has {field}={brief(value)}. It must be at least {least}: check or download the file."
            )


def _check_relations(file: Path, config: PretrainedConfig) -> None:
    """Of our families, what transformers' configs let pass and a model would take silently, or fail at when it runs."""
    if config.num_attention_heads % config.num_key_value_heads:
        raise CheckpointError(
            f"{file} has {config.num_attention_heads} attention heads for {config.num_key_value_heads} key-value "
            "heads. The first must be a multiple of the second: check or download the file."
        )
    experts = getattr(config, "num_experts", 0) or getattr(config, "n_routed_experts", 0)
    if experts and not 1 <= config.num_experts_per_tok <= experts:
        raise CheckpointError(
            f"{file} chooses {config.num_experts_per_tok} of {experts} experts for each token. Check or download it."
        )
    groups, chosen = getattr(config, "n_group", None) or 1, getattr(config, "topk_group", None) or 1
    if chosen < groups and (experts % groups or experts < 2 * groups):
        raise CheckpointError(
            f"{file} divides {experts} experts into {groups} groups. Each must have as many, and two at least: check "
            "or download the file."
        )
    index_size, rotated = getattr(config, "index_head_dim", math.inf), getattr(config, "qk_rope_head_dim", 0)
    if index_size < rotated:
        raise CheckpointError(
            f"{file} has index_head_dim={index_size}, of which {rotated} dimensions are to be rotated "
            "(qk_rope_head_dim). Check or download it again."
        )
    window = config.sliding_window if getattr(config, "use_sliding_window", hasattr(config, "sliding_window")) else None
    if window is not None and (type(window) is not int or not 1 <= window < 2**62):
        raise CheckpointError(
            f"{file} has sliding_window={brief(window)}. It must be a number of tokens, or null: check the file."
        )
    if not 0 <= config.rms_norm_eps < math.inf:
        raise CheckpointError(f"{file} has rms_norm_eps={config.rms_norm_eps!r}. It must be a small positive number.")
