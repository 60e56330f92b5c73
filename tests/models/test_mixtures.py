"""GLM-4.5, gpt-oss, MiniMax-M2, Mixtral, Qwen2 and Qwen2-MoE: parity with transformers, and what breaks it."""

from __future__ import annotations

import pytest

from tests.models.parity import TOLERANCE, compare, compiled, identity

FAMILIES = [
    "glm4_moe", "glm4_moe_plain", "gpt_oss", "gpt_oss_packed", "minimax_m2", "mixtral", "qwen2", "qwen2_moe",
]  # fmt: skip
QUICK = {(family, identity) for family in FAMILIES} | {("gpt_oss", compiled)}
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
]
BROKEN = [
    (family, part) for family in FAMILIES if family not in ("gpt_oss_packed", "glm4_moe_plain") for part in EVERYWHERE
] + [
    ("gpt_oss", "qkv_bias_forgotten"),
    ("gpt_oss", "output_bias_added_by_every_rank"),
    ("gpt_oss", "sinks_forgotten"),
    ("gpt_oss", "sinks_of_other_heads"),
    ("gpt_oss", "window_on_the_wrong_layers"),
    ("gpt_oss", "window_ignored"),
    ("gpt_oss", "router_bias_forgotten"),
    ("gpt_oss", "router_not_normalised"),
    ("gpt_oss", "clamp_forgotten"),
    ("gpt_oss", "gate_bias_forgotten"),
    ("gpt_oss", "gates_and_ups_swapped"),
    ("gpt_oss", "down_bias_forgotten"),
    ("gpt_oss", "down_bias_added_by_every_rank"),
    ("gpt_oss", "first_weight_forgotten"),
    ("gpt_oss", "rope_scaling_forgotten"),
    ("gpt_oss", "scaling_of_rotations_forgotten"),
    ("gpt_oss_packed", "gates_and_ups_swapped"),
    ("glm4_moe", "qkv_bias_forgotten"),
    ("glm4_moe", "qk_norm_forgotten"),
    ("glm4_moe", "whole_heads_rotated"),
    ("glm4_moe", "correction_bias_forgotten"),
    ("glm4_moe", "correction_bias_weighs"),
    ("glm4_moe", "groups_ignored"),
    ("glm4_moe", "routing_scale_forgotten"),
    ("glm4_moe", "shared_experts_forgotten"),
    ("glm4_moe_plain", "weights_made_to_sum_to_one"),
    ("minimax_m2", "heads_normalised_alone"),
    ("minimax_m2", "ranks_normalise_alone"),
    ("minimax_m2", "other_gammas"),
    ("minimax_m2", "whole_heads_rotated"),
    ("minimax_m2", "bias_of_experts_forgotten"),
    ("mixtral", "window_off_by_one"),
    ("mixtral", "weights_left_as_they_are"),
    ("mixtral", "gate_and_up_exchanged"),
    ("qwen2", "qkv_bias_forgotten"),
    ("qwen2", "window_ignored"),
    ("qwen2", "gate_forgotten"),
    ("qwen2_moe", "qkv_bias_forgotten"),
    ("qwen2_moe", "shared_gate_forgotten"),
    ("qwen2_moe", "shared_expert_forgotten"),
    ("qwen2_moe", "weights_made_to_sum_to_one"),
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
