"""Which tensors of a checkpoint of several modalities are the language model's, and what they are called without the
rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphfuse.weights.files import StoredTensor
from graphfuse.weights.text_part import text_part

DECODER = ("embed_tokens.weight", "layers.0.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight", "norm.weight")
BESIDE = ("model.visual.patch_embed.proj.weight", "model.visual.layers.0.mlp.up_proj.weight", "mtp.norm.weight")


def stored(*names: str) -> dict[str, StoredTensor]:
    return {name: StoredTensor(name, Path("a.safetensors"), (2,), "F32") for name in names}


@pytest.mark.parametrize(
    ("body", "head"),
    [
        ("model.language_model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.", "lm_head.weight"),
    ],
)
def test_names_are_those_of_the_language_model_alone(body, head):
    found = text_part(stored(*(body + name for name in DECODER), head, *BESIDE[:: 2 if body == "model." else 1]))
    expected = {f"model.{name}": body + name for name in DECODER} | {"lm_head.weight": head}
    beside = {BESIDE[0]: BESIDE[0]} if body == "model." else {}  # in front of which no wrapper's name tells it apart
    assert {name: tensor.name for name, tensor in found.items()} == expected | beside


def test_a_tied_head_is_not_there():
    found = text_part(stored(*(f"model.language_model.{name}" for name in DECODER)))
    assert sorted(found) == sorted(f"model.{name}" for name in DECODER)


def test_a_predictor_with_an_embedding_of_its_own_is_not_the_language_model():
    predictor = ("model.language_model.layers.2.embed_tokens.weight", "model.language_model.layers.2.layers.0.weight")
    found = text_part(stored(*(f"model.language_model.{name}" for name in DECODER), *predictor))
    assert "model.embed_tokens.weight" in found
    assert "model.layers.2.embed_tokens.weight" in found, "it is for the model to know or to refuse"


def test_without_a_language_model_nothing_is_renamed():
    tensors = stored("model.visual.layers.0.mlp.up_proj.weight", "lm_head.weight")
    assert text_part(tensors) == tensors
