"""config.json of a checkpoint, as transformers reads it, and what is said of values that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from graphfuse.errors import CheckpointError

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
"""Fields that the families with a model definition here divide by, or count from."""


def read_config(folder: Path) -> PretrainedConfig:
    """config.json as transformers reads it.

    Raises:
        CheckpointError: there is none, it is damaged, or a value of it cannot be.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder} has no config.json. Pass the folder of a complete checkpoint.")
    try:
        _check_values(file, json.loads(file.read_text(encoding="utf-8")))
        config = AutoConfig.from_pretrained(folder)
    except CheckpointError:
        raise
    except StrictDataclassError as error:  # names the field, over several lines
        raise CheckpointError(
            f"{file} has a value that cannot be ({' '.join(str(error).split())}). Check or download it again."
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}). Check or download it again.") from error
    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
        raise CheckpointError(f"{file} has dtype={dtype}, which weights cannot have. Write a floating one.")
    return config


def _check_values(file: Path, values: Any) -> None:
    from graphfuse.models.registry import FAMILIES

    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds no JSON object. Check or download it again.")
    architectures = values.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise CheckpointError(f"{file} has architectures={architectures!r}. It must be a list of class names.")
    if values.get("model_type") not in list(FAMILIES):
        return
    for field in SIZES:
        value = values.get(field)
        if isinstance(value, int) and value < 1:
            raise CheckpointError(f"{file} has {field}={value}. It must be at least 1: check or download the file.")
