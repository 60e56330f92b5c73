"""DeepSeek-V3 and its relatives: parity with transformers, and the copies whose broken part the comparison notices."""

from __future__ import annotations

import pytest

from tests.models.parity import TOLERANCE, compare, compiled, identity

FAMILIES = ["deepseek_v3", "deepseek_plain", "mistral4", "glm4_moe_lite"]
QUICK = {("deepseek_v3", compiled), ("mistral4", identity), ("glm4_moe_lite", identity)}
CASES = [
    pytest.param(family, tp, wrap, marks=() if tp == 2 and (family, wrap) in QUICK else pytest.mark.slow)
    for family in FAMILIES
    for tp in (1, 2, 4)
    for wrap in (identity, compiled)
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


@pytest.mark.slow
@pytest.mark.parametrize(("family", "part"), BROKEN)
def test_a_broken_part_is_noticed(ranks, tiny_checkpoint, family, part):
    found = compare(ranks, tiny_checkpoint(family), 2, identity, break_it=part)
    assert found.plain > 100 * TOLERANCE
    assert found.cached > 100 * TOLERANCE
