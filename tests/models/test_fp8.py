"""Checkpoints in FP8, in each published form: our logits are those of a model that rounds weights and activations by
formulas of the tests, and near those of the dequantised model. A broken scale is noticed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import graphfuse
from graphfuse.weights.load import load
from tests.models import tiny_fp8
from tests.models.parity import TOLERANCE, compare, compiled_as_it_is, identity
from tests.models.tiny_fp8 import FORMS

SLOW = pytest.mark.slow
FP8_TOLERANCE = 0.2
"""Of a token's difference to the dequantised model over all logits, root mean squares: 3 mantissa bits, two layers. The
median counts: tokens whose choice of experts is close may choose another."""

FAST = {("llama", "block", 2), ("qwen3_moe", "block", 2), ("qwen3_moe", "static", 1)}
PAIRS = [(family, form) for family in ("llama", "qwen3_moe") for form in FORMS]
PAIRS = [(family, form) for family, form in PAIRS if family == "qwen3_moe" or not FORMS[form].fused]
# By the token, a rank rounds its part of a row with a scale of its own: equal to the whole's on one rank only.
EXACT = [
    pytest.param(family, form, tp, marks=() if (family, form, tp) in FAST else SLOW)
    for family, form in PAIRS
    for tp in (1, 2, 4)
    if form != "channel" or tp == 1
]
EXACT += [
    pytest.param(family, form, tp, marks=SLOW)
    for family, form in (
        ("deepseek_v3", "block"),
        ("deepseek_v3", "static"),
        ("deepseek_v32", "block"),
        ("qwen3_next", "block"),
    )
    for tp in (1, 2, 4)
]
BROKEN = [
    ("llama", "block", "scale_of_a_block_wrong"),
    ("llama", "block", "scales_of_the_inputs_ignored"),
    ("llama", "block", "activations_by_the_token"),
    ("llama", "block", "activations_not_rounded"),
    ("llama", "static", "one_scale_for_queries_and_keys"),
    ("llama", "static", "input_scale_wrong"),
    ("qwen3_moe", "block", "scales_of_one_expert_for_all"),
    ("qwen3_moe", "block", "gates_have_the_scales_of_ups"),
    ("qwen3_moe", "static", "gates_have_the_scales_of_ups"),
    ("qwen3_moe", "static", "expert_input_scales_of_one_for_all"),
    ("qwen3_moe", "static", "intermediate_scales_of_one_for_all"),
]


@pytest.fixture(scope="module")
def fp8_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tiny_fp8.Fp8Checkpoint]:
    folder = tmp_path_factory.mktemp("fp8")
    return cache(lambda family, form: tiny_fp8.save(family, form, folder / f"{family}_{form}"))


@pytest.mark.parametrize(("family", "form", "tp"), EXACT)
def test_logits_are_those_of_the_rounded_model(ranks, fp8_checkpoint, family, form, tp):
    found = compare(ranks, fp8_checkpoint(family, form), tp, identity, dtype=torch.float64)
    assert found.plain < TOLERANCE
    assert found.cached < TOLERANCE
    assert found.ranks_agree


@SLOW
@pytest.mark.parametrize(("family", "form"), [("llama", "block"), ("qwen3_moe", "static")])
def test_compiled_logits_are_those_of_the_rounded_model(ranks, fp8_checkpoint, family, form):
    found = compare(ranks, fp8_checkpoint(family, form), 2, compiled_as_it_is, dtype=torch.float64)
    assert found.plain < TOLERANCE
    assert found.cached < TOLERANCE


@SLOW
@pytest.mark.parametrize(("family", "form", "part"), BROKEN)
def test_a_broken_scale_is_noticed(ranks, fp8_checkpoint, family, form, part):
    found = compare(ranks, fp8_checkpoint(family, form), 2, identity, break_it=part, dtype=torch.float64)
    assert found.plain > 100 * TOLERANCE
    assert found.cached > 100 * TOLERANCE


def rank_run(group: Any, path: Path, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, list[str], str]:
    """Logits of the compiled model, the ops of its reductions, and the names of what lies in memory as FP8."""
    model = load(path, group, dtype=dtype)
    kinds = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.dtype == torch.float8_e4m3fn}
    compiled = graphfuse.compile(model.requires_grad_(False), group)
    with torch.no_grad():
        logits = compiled(ids)
    return (
        logits.double().clone(),
        [site.op or site.outcome() for site in compiled.report.sites],
        " ".join(sorted(kinds)),
    )


@pytest.mark.parametrize("tp", [pytest.param(1, marks=SLOW), 2, pytest.param(4, marks=SLOW)])
@pytest.mark.parametrize(
    ("family", "form"),
    [pytest.param(*pair, marks=() if pair == ("qwen3_moe", "block") else SLOW) for pair in PAIRS],
)
def test_compiled_in_bfloat16_it_is_near_the_dequantised_model_and_fully_fused(ranks, fp8_checkpoint, family, form, tp):
    checkpoint = fp8_checkpoint(family, form)
    results = ranks.run(tp, rank_run, checkpoint.path, checkpoint.batch.input_ids, torch.bfloat16, timeout=120.0)
    for logits, ops, kinds in results:
        assert torch.equal(logits, results[0][0])
        errors = (logits - checkpoint.dequantised).pow(2).mean(-1).sqrt() / checkpoint.dequantised.std()
        assert errors.median() < FP8_TOLERANCE
        assert "weight" in kinds and ("gate_up_proj" in kinds) == (family == "qwen3_moe")
        if tp > 1:
            assert len(ops) == 5 and all(op.startswith("all_reduce") for op in ops), ops


def dense_weights(group: Any, path: Path) -> dict[str, Tensor]:
    model = load(path, group, dtype=torch.float64)
    attention = model.layers[0].self_attn
    return {"qkv": attention.qkv_proj.dense_weight(torch.float64), "o": attention.o_proj.dense_weight(torch.float64)}


@pytest.mark.parametrize("tp", [4])
def test_heads_that_part_a_block_keep_its_scale(ranks, tmp_path, tp):
    """Heads of 64 at four ranks: each has half a block of the output projection's inputs."""
    checkpoint = tiny_fp8.save("llama", "block", tmp_path, head_dim=64, num_key_value_heads=4)
    path, want = "model.layers.0.self_attn", checkpoint.weights
    for rank, found in enumerate(ranks.run(tp, dense_weights, checkpoint.path)):
        mine = slice(64 * rank, 64 * (rank + 1))
        parts = [want[f"{path}.{part}"][mine] for part in ("q_proj", "k_proj", "v_proj")]
        torch.testing.assert_close(found["qkv"], torch.cat(parts), rtol=0, atol=0)
        torch.testing.assert_close(found["o"], want[f"{path}.o_proj"][:, mine], rtol=0, atol=0)
