"""DeepSeek-V3.2 and GLM-5: parity with transformers, and the copies whose broken part the comparison notices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import graphfuse
from graphfuse.errors import CheckpointError, UnsupportedModelError
from graphfuse.models import registry
from graphfuse.models.deepseek_v32 import (
    FollowingSparseLayer,
    SelectingDenseLayer,
    SelectingLayer,
    SelectingSparseLayer,
)
from graphfuse.region_marks import repeated_layer_classes
from graphfuse.weights.config import read_config
from graphfuse.weights.load import load
from tests.models import tiny
from tests.models.breakage_sparse import BREAKAGES
from tests.models.parity import TOLERANCE, compare, compiled, identity

SLOW = pytest.mark.slow
FAMILIES = ["deepseek_v32", "glm_moe_dsa", "glm_moe_dsa_shared"]
CASES = [
    pytest.param(family, tp, wrap, marks=() if tp == 2 and wrap is identity else SLOW)
    for family in FAMILIES
    for tp in (1, 2, 4)
    for wrap in (identity, compiled)
]
BROKEN = [("deepseek_v32", part) for part in BREAKAGES] + [
    ("deepseek_v32", "latent_bias_forgotten"),
    ("deepseek_v32", "temperature_forgotten"),
    ("deepseek_v32", "rotation_forgotten"),
    ("deepseek_v32", "groups_ignored"),
    ("glm_moe_dsa", "every_token_selected"),
    ("glm_moe_dsa", "index_rotation_of_the_other_layout"),
    ("glm_moe_dsa", "correction_bias_forgotten"),
    ("glm_moe_dsa_shared", "selection_of_the_first_layer_for_all"),
    ("glm_moe_dsa_shared", "every_token_selected"),
]
QUICK = {("deepseek_v32", "every_token_selected"), ("glm_moe_dsa", "index_rotation_of_the_other_layout")}


@pytest.mark.parametrize(("family", "tp", "wrap"), CASES)
def test_logits_equal_transformers(ranks, tiny_checkpoint, family, tp, wrap):
    found = compare(ranks, tiny_checkpoint(family), tp, wrap)
    assert found.plain < TOLERANCE
    assert found.cached < TOLERANCE
    assert found.ranks_agree


@pytest.mark.parametrize(
    ("family", "part"), [pytest.param(*pair, marks=() if pair in QUICK else SLOW) for pair in BROKEN]
)
def test_a_broken_part_is_noticed(ranks, tiny_checkpoint, family, part):
    found = compare(ranks, tiny_checkpoint(family), 2, identity, break_it=part)
    assert found.plain > 100 * TOLERANCE
    assert found.cached > 100 * TOLERANCE


def reductions(group: Any, path: Any, ids: torch.Tensor) -> tuple[list[str], dict[str, Any]]:
    """The op of each reduction, or what became of it, and what the proof of placements says."""
    config = graphfuse.FuseConfig(verify_placements=True)
    model = graphfuse.compile(load(path, group).requires_grad_(False), group, config=config)
    with torch.no_grad():
        model(ids)
    return [site.op or site.outcome() for site in model.report.sites], model.report.placements


def test_a_layer_has_two_reductions_and_the_indexer_none(ranks, tiny_checkpoint):
    checkpoint = tiny_checkpoint("deepseek_v32")
    for ops, placements in ranks.run(2, reductions, checkpoint.path, checkpoint.batch.input_ids, timeout=120.0):
        assert len(ops) == 2 * 3 + 1 and all(op.startswith("all_reduce") for op in ops), ops
        assert placements["faults"] == placements["reasons"] == []


def test_layers_of_a_kind_are_traced_once():
    config = tiny.config("glm_moe_dsa_shared")
    config.num_hidden_layers = 7
    config.mlp_layer_types = ["dense"] * 2 + ["sparse"] * 5
    config.indexer_types = ["full", "full", "full", "shared", "full", "shared", "shared"]
    model = registry.build(config, device="meta")
    assert repeated_layer_classes(model) == [SelectingDenseLayer, SelectingSparseLayer, FollowingSparseLayer]


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_with_an_indexer_have_its_keys_as_a_third_cache(family):
    config = tiny.config(family)
    with FakeTensorMode():
        model = registry.build(config, dtype=torch.bfloat16)
        caches = model.new_kv_caches(2, 5)
        for layer, cache in zip(model.layers, caches, strict=True):
            third = [(2, 5, config.index_head_dim)] if isinstance(layer, SelectingLayer) else []
            assert [tuple(t.shape) for t in cache] == [(2, 5, 12), (2, 5, 4), *third]
        last = torch.zeros(2, dtype=torch.int64)
        logits = model(torch.zeros(2, 5, dtype=torch.int64), None, caches, last)
        assert (logits.shape, logits.dtype) == ((2, config.vocab_size), torch.bfloat16)


@pytest.mark.parametrize("kinds", [["shared"] * 3, ["full", "none", "full"]])
def test_layers_must_have_a_selection_to_follow(kinds):
    config = tiny.config("glm_moe_dsa")
    config.indexer_types = kinds
    with pytest.raises(UnsupportedModelError, match='"full" or "shared", and the first one "full"'):
        registry.build(config, device="meta")


def test_an_indexer_whose_heads_are_smaller_than_what_is_rotated_is_refused(tmp_path):
    config = tiny.config("deepseek_v32")
    config.index_head_dim = 2
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"has index_head_dim=2, of which 4 dimensions are to be rotated"):
        read_config(tmp_path)
