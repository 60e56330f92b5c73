"""Our models' logits are transformers' logits, at every tensor-parallel size, with and without a KV cache.

Each part has a copy in which it is broken, for which the same comparison must fail: so it does compare that part.
"""

from __future__ import annotations

import pytest

from tests.models.parity import TOLERANCE, compare, compiled, compiled_as_it_is, identity

FAMILIES = ["llama", "mistral", "qwen3", "qwen3_moe"]
SLOW = pytest.mark.slow
# Compiling takes seconds a case: by default each family at two ranks, the rest with -m slow.
CASES = [(family, tp, identity) for family in FAMILIES for tp in (1, 2, 3, 4)] + [
    pytest.param(family, tp, compiled, marks=() if tp == 2 else SLOW) for family in FAMILIES for tp in (1, 2, 3, 4)
]
WRAPS = [identity, pytest.param(compiled_as_it_is, marks=SLOW)]

EVERYWHERE = [
    "gamma_ignored",
    "final_gamma_ignored",
    "attention_reduction_dropped",
    "last_reduction_dropped",
    "attention_reduction_doubled",
    "last_reduction_doubled",
    "gate_forgotten",
]
BROKEN = [(family, part) for part in EVERYWHERE for family in ("llama", "qwen3_moe")] + [
    ("mistral", "window_ignored"),
    ("mistral", "window_off_by_one"),
    ("llama", "qkv_bias_forgotten"),
    ("llama", "row_bias_added_by_every_rank"),
    ("llama", "rope_scaling_forgotten"),
    ("llama", "embedding_reduction_dropped"),
    ("qwen3", "qk_norm_forgotten"),
    ("qwen3", "k_gamma_ignored"),
    ("qwen3", "window_ignored"),
    ("qwen3_moe", "routing_weights_ignored"),
    ("qwen3_moe", "routing_weights_not_normalised"),
    ("qwen3_moe", "expert_gate_forgotten"),
]


@pytest.mark.parametrize(("family", "tp", "wrap"), CASES)
def test_logits_equal_transformers(ranks, tiny_checkpoint, family, tp, wrap):
    found = compare(ranks, tiny_checkpoint(family), tp, wrap)
    assert found.plain < TOLERANCE
    assert found.cached < TOLERANCE
    assert found.ranks_agree


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize(("family", "part"), BROKEN)
def test_a_broken_part_is_noticed(ranks, tiny_checkpoint, family, part, wrap):
    found = compare(ranks, tiny_checkpoint(family), 2, wrap, break_it=part)
    assert found.plain > 100 * TOLERANCE
    assert found.cached > 100 * TOLERANCE
