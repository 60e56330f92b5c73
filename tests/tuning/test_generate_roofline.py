"""The floor of a step of decoding, by hand: bytes that must be read, and reductions by the table."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import AutoConfig

from graphfuse.comm.table import Measurement, SizeRange, SizeTable
from graphfuse.models import registry
from graphfuse.tuning.generate_roofline import Footprint, Mixer, Roofline, expected_experts, reduction_us
from graphfuse.weights.random_weights import FOLDER, published

DENSE = {
    "model_type": "mistral",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 10,
    "sliding_window": 6,
    "tie_word_embeddings": False,
}
# q, k, v, o, gate and up, down, two norms, of each layer; the last norm.
LAYER = 8 * 8 + 4 * 8 + 4 * 8 + 8 * 8 + 24 * 8 + 8 * 12 + 2 * 8
REST = 8


def footprint(values: dict, dtype: torch.dtype = torch.bfloat16) -> Footprint:
    config = AutoConfig.for_model(**values)
    return Footprint.of(registry.build(config, None, dtype, "meta"))


@pytest.mark.parametrize("tied", [False, True])
def test_of_a_dense_model_all_weights_are_read_but_of_the_embedding_the_tokens_rows(tied):
    found = footprint(DENSE | {"tie_word_embeddings": tied})
    head = 10 * 8
    assert found.dense_bytes == 2 * (2 * LAYER + REST + head)
    assert (found.expert_bytes, found.embedding_row_bytes) == (0, 2 * 8)
    assert found.weight_bytes(3) == found.dense_bytes + 3 * 16
    assert found.mixers == (Mixer(2 * 2 * 4, 0, window=6),) * 2


def test_tokens_beyond_the_window_are_not_read():
    found = footprint(DENSE)
    assert found.cache_bytes(5, 4.0) == 5 * 4 * 16 * 2
    assert found.cache_bytes(5, 100.0) == 5 * 6 * 16 * 2
    whole = replace(found, mixers=(Mixer(16, 0),))
    assert whole.cache_bytes(5, 100.0) == 5 * 100 * 16


def test_states_are_read_and_written_however_long_the_texts_are():
    found = replace(footprint(DENSE), mixers=(Mixer(0, 1000), Mixer(10, 0)))
    assert found.cache_bytes(3, 7.0) == 3 * (2 * 1000 + 7 * 10)


def test_of_experts_those_are_read_that_somebody_chooses():
    values = DENSE | {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
        "decoder_sparse_step": 1,
        "sliding_window": None,
    }
    found = footprint(values)
    assert (found.num_experts, found.top_k) == (4, 2)
    assert found.expert_bytes == 2 * 2 * 4 * (12 * 8 + 8 * 6)
    mixer_and_norms = LAYER - 24 * 8 - 8 * 12
    assert found.dense_bytes == 2 * (2 * (mixer_and_norms + 2 * 4 + 4 * 8) + REST + 80)  # two head norms, the router
    assert found.weight_bytes(1) == found.dense_bytes + 16 + found.expert_bytes / 2
    assert found.weight_bytes(2) == found.dense_bytes + 32 + found.expert_bytes * 0.75


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(4, 2, 1), (4, 2, 2), (5, 1, 3), (3, 3, 7), (4, 3, 2)])
def test_expected_experts_are_the_mean_over_all_choices(experts, top_k, tokens):
    def subsets(k: int, of: tuple[int, ...]) -> list[frozenset[int]]:
        return [frozenset(c) for c in product(of, repeat=k) if len(set(c)) == k]

    choices = subsets(top_k, tuple(range(experts)))
    if len(choices) ** tokens > 20000:
        choices = list(set(choices))
    found = [len(frozenset().union(*each)) for each in product(choices, repeat=tokens)]
    assert expected_experts(experts, top_k, tokens) == pytest.approx(sum(found) / len(found))


def test_no_experts_are_none():
    assert expected_experts(0, 0, 5) == 0.0


def test_a_hybrid_keeps_states_in_some_layers():
    config = json.loads((FOLDER / "qwen3-next-80b-a3b" / "config.json").read_text()) | {"num_hidden_layers": 4}
    found = footprint(config)
    states = [mixer.state_bytes for mixer in found.mixers]
    # 32 value heads of 128 x 128 in float32, and the last 3 inputs of the convolution's 8,192 channels in bfloat16
    assert states == [32 * 128 * 128 * 4 + 8192 * 3 * 2] * 3 + [0]
    assert [mixer.token_bytes for mixer in found.mixers] == [0, 0, 0, 2 * 2 * 256 * 2]


@pytest.mark.parametrize(("name", "gigabytes"), [("qwen3-30b-a3b", 3.4 * 2), ("qwen3-8b", 7.6 * 2)])
def test_a_token_of_a_published_model_reads_its_active_parameters(name, gigabytes):
    assert name in published()
    config = json.loads((FOLDER / name / "config.json").read_text())
    # All active parameters but the embedding: 3.3 of 30.5 billion, 8.2 billion, less 0.3 and 0.6 of embedding.
    assert footprint(config).weight_bytes(1) / 1e9 == pytest.approx(gigabytes, rel=0.12)


def test_memory_and_reductions_add_up():
    line = Roofline(4.0e9, 0.3e9, bandwidth=4.3, reductions=97, reduction_us=4.0)
    assert line.ms == pytest.approx(1.0 + 0.388)
    assert replace(line, reduction_us=None).ms == pytest.approx(1.0)


ROWS = [
    {"hidden": 2048, "tokens": 1, "us": {"unfused": 9.0, "reference": 9.5, "symm_mem/one_shot": 2.5}},
    {"hidden": 2048, "tokens": 64, "us": {"unfused": 12.0, "reference": 12.5, "symm_mem/one_shot": 4.0}},
    {"hidden": 4096, "tokens": 64, "us": {"unfused": 15.0, "reference": 15.5, "symm_mem/one_shot": 5.0}},
]


def table(limit: int | None) -> SizeTable:
    ranges: tuple[SizeRange, ...] = (SizeRange(limit, "symm_mem", "one_shot"),)
    ranges += () if limit is None else (SizeRange(None, "reference"),)
    return SizeTable("GPU", 2, ("bfloat16",), ((None, ranges),), {"measured": ROWS})


@pytest.mark.parametrize(
    ("limit", "hidden", "tokens", "us"),
    [
        (None, 2048, 1, 2.5),
        (None, 2048, 40, 4.0),
        (None, 4096, 1, 5.0),
        (None, 2000, 2, 2.5),
        (4096, 2048, 1, 2.5),  # 2048 elements of 2 bytes
        (4096, 2048, 2, 9.5),
        (None, 2048, 10**6, 4.0),
    ],
)
def test_a_reduction_takes_what_the_backend_that_serves_its_size_was_measured_at(limit, hidden, tokens, us):
    assert isinstance(table(limit).measured[0], Measurement)
    assert reduction_us(table(limit), hidden, tokens) == us


def test_without_a_table_or_a_measurement_it_is_not_known():
    assert reduction_us(None, 2048, 1) is None
    unmeasured = SizeTable("GPU", 2, ("bfloat16",), ((None, (SizeRange(None, "reference"),)),), {"measured": []})
    assert reduction_us(unmeasured, 2048, 1) is None
