"""Qwen3-Next and Qwen3.5: parity with transformers, and the copies whose broken part the comparison notices."""

from __future__ import annotations

import pytest

from tests.models.parity import TOLERANCE, compare, compiled, identity

FAMILIES = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
QUICK = {("qwen3_next", compiled), ("qwen3_5", identity), ("qwen3_5_moe", identity)}
CASES = [
    pytest.param(family, tp, wrap, marks=() if tp == 2 and (family, wrap) in QUICK else pytest.mark.slow)
    for family in FAMILIES
    for tp in (1, 2, 4)
    for wrap in (identity, compiled)
]

EVERYWHERE = [
    "gamma_ignored",
    "final_gamma_ignored",
    "norm_not_centred_at_zero",
    "delta_reduction_dropped",
    "delta_reduction_doubled",
    "gated_attention_reduction_dropped",
    "last_reduction_dropped",
    "last_reduction_doubled",
    "forgetting_forgotten",
    "time_step_bias_forgotten",
    "correction_rate_forgotten",
    "delta_gate_forgotten",
    "delta_gamma_ignored",
    "convolution_forgotten",
    "taps_in_the_other_order",
    "queries_and_keys_exchanged",
    "output_gate_forgotten",
    "query_norm_not_centred_at_zero",
    "whole_heads_rotated",
]
OF_EXPERTS = [
    "shared_expert_forgotten",
    "shared_expert_gate_forgotten",
    "routed_experts_forgotten",
    "routing_weights_ignored",
    "routing_weights_not_normalised",
]
OF_MEMORY = ["convolution_not_remembered", "state_not_remembered", "padding_remembered"]
BROKEN = [(family, part) for part in EVERYWHERE for family in ("qwen3_next", "qwen3_5")] + [
    (family, part) for part in OF_EXPERTS for family in ("qwen3_next", "qwen3_5_moe")
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


@pytest.mark.slow
@pytest.mark.parametrize("part", OF_MEMORY)
def test_what_a_row_remembers_wrongly_shows_when_it_goes_on(ranks, tiny_checkpoint, part):
    found = compare(ranks, tiny_checkpoint("qwen3_next"), 2, identity, break_it=part)
    assert found.plain < TOLERANCE
    assert found.cached > 100 * TOLERANCE
