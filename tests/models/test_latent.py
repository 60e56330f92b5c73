"""DeepSeek-V3 and its relatives: parity with transformers, and the copies whose broken part the comparison notices."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses import FakeTensorMode

from graphfuse.errors import CheckpointError
from graphfuse.models import registry
from graphfuse.models.deepseek import DeepseekDenseLayer, DeepseekSparseLayer
from graphfuse.region_marks import repeated_layer_classes
from graphfuse.weights.load import load
from tests.models import tiny
from tests.models.parity import TOLERANCE, compare, compiled, identity
from tests.models.tiny import Checkpoint

FAMILIES = ["deepseek_v3", "deepseek_plain", "mistral4", "glm4_moe_lite"]
QUICK = {("deepseek_v3", compiled), ("mistral4", identity), ("glm4_moe_lite", identity)}
CASES = [
    pytest.param(family, tp, wrap, marks=() if tp == 2 and (family, wrap) in QUICK else pytest.mark.slow)
    for family in FAMILIES
    for tp in (1, 2, 4)
    for wrap in (identity, compiled)
] + [
    pytest.param(wrapper, 2, identity, marks=() if wrapper == "kimi_k25" else pytest.mark.slow)
    for wrapper in ("kimi_k25", "mistral3")
]

EVERYWHERE = [
    "gamma_ignored",
    "final_gamma_ignored",
    "attention_reduction_dropped",
    "last_reduction_dropped",
    "attention_reduction_doubled",
    "last_reduction_doubled",
    "latent_norm_takes_the_configs_epsilon",
    "latent_gamma_ignored",
    "rotation_forgotten",
    "correction_bias_forgotten",
    "correction_bias_weighs",
    "other_scores",
    "routing_scale_forgotten",
    "shared_experts_forgotten",
]
BROKEN = [("deepseek_v3", part) for part in EVERYWHERE] + [
    ("deepseek_v3", "query_gamma_ignored"),
    ("deepseek_v3", "latent_bias_forgotten"),
    ("deepseek_v3", "output_bias_added_by_every_rank"),
    ("deepseek_v3", "temperature_forgotten"),
    ("deepseek_v3", "pairs_not_interleaved"),
    ("deepseek_v3", "groups_ignored"),
    ("deepseek_v3", "one_group_too_many"),
    ("deepseek_v3", "weights_not_normalised"),
    ("deepseek_plain", "weights_normalised"),
    ("mistral4", "position_scaling_forgotten"),
    ("mistral4", "other_scores"),
    ("mistral4", "weights_not_normalised"),
    ("glm4_moe_lite", "correction_bias_forgotten"),
]


@pytest.mark.parametrize(("family", "tp", "wrap"), CASES)
def test_logits_equal_transformers(ranks, tiny_checkpoint, family, tp, wrap):
    found = compare(ranks, tiny_checkpoint(family), tp, wrap)
    assert found.plain < TOLERANCE
    assert found.cached < TOLERANCE
    assert found.ranks_agree


@pytest.mark.parametrize("family", ["deepseek_v3", "mistral4", "glm4_moe_lite"])
def test_dense_and_sparse_layers_are_each_traced_once(family):
    config = tiny.config(family)
    config.num_hidden_layers, config.first_k_dense_replace = 5, 2
    config.mlp_layer_types = ["dense"] * 2 + ["sparse"] * 3
    model = registry.build(config, device="meta")
    assert repeated_layer_classes(model) == [DeepseekDenseLayer, DeepseekSparseLayer]
    with FakeTensorMode():
        model = registry.build(config, dtype=torch.bfloat16)
        last = torch.zeros(2, dtype=torch.int64)
        logits = model(torch.zeros(2, 5, dtype=torch.int64), None, model.new_kv_caches(2, 5), last)
        assert (logits.shape, logits.dtype) == ((2, config.vocab_size), torch.bfloat16)


def with_a_predictor(checkpoint: Checkpoint, folder: Path, *, announced: bool) -> Path:
    """A copy of a checkpoint with another layer behind its last, as those that predict several tokens have it."""
    shutil.copytree(checkpoint.path, folder)
    weights = load_file(folder / "model.safetensors")
    weights |= {name.replace(".2.", ".3.", 1): t.clone() for name, t in weights.items() if ".layers.2." in name}
    weights["model.layers.3.eh_proj.weight"] = torch.zeros(40, 80)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values["num_nextn_predict_layers"] = int(announced)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_a_predictor_behind_the_last_layer_is_left_out(tiny_checkpoint, tmp_path):
    checkpoint = tiny_checkpoint("deepseek_v3")
    model = load(with_a_predictor(checkpoint, tmp_path / "announced", announced=True))
    torch.testing.assert_close(model(checkpoint.batch.input_ids), checkpoint.logits, atol=TOLERANCE, rtol=0)
    with pytest.raises(CheckpointError, match=r"'model\.layers\.3\..* which the model does not know"):
        load(with_a_predictor(checkpoint, tmp_path / "unannounced", announced=False))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "part"), BROKEN)
def test_a_broken_part_is_noticed(ranks, tiny_checkpoint, family, part):
    found = compare(ranks, tiny_checkpoint(family), 2, identity, break_it=part)
    assert found.plain > 100 * TOLERANCE
    assert found.cached > 100 * TOLERANCE
