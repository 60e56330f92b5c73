"""Tiny checkpoints on disk, copies of them to change, and the changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphfuse.weights.load import load
from tests.models import tiny


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> dict[str, tiny.Checkpoint]:
    folder = tmp_path_factory.mktemp("saved")
    return {family: tiny.save(family, folder / family) for family in ("llama", "qwen3", "qwen3_moe")}


@pytest.fixture
def copy_of(saved, tmp_path):
    def copy(family: str) -> Path:
        return Path(shutil.copytree(saved[family].path, tmp_path / family))

    return copy


def edit(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def assert_same_logits(folder: Path, checkpoint: tiny.Checkpoint) -> None:
    with torch.no_grad():
        got = load(folder)(checkpoint.batch.input_ids)
    assert float((got - checkpoint.logits).abs().max()) < 1e-4


def shard(folder: Path) -> None:
    """Rewrite a single file as two and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
