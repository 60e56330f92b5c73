"""A tiny Kimi-K2.5 under its published names. transformers calls the language model's layers `blocks` when it writes
them, as it should the vision tower's alone."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.models import tiny


def save(family: str, folder: Path) -> tiny.Checkpoint:
    checkpoint = tiny.save(family, folder)
    file = folder / "model.safetensors"
    written, published = "language_model.model.blocks.", "language_model.model.layers."
    weights = {name.replace(written, published): tensor for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values["architectures"] = ["KimiK25ForConditionalGeneration"]
    values["text_config"]["model_type"] = "kimi_k2"
    (folder / "config.json").write_text(json.dumps(values))
    return checkpoint
