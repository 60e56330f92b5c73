"""How gated DeltaNet is divided over the ranks, and which kinds of layers its families have."""

from __future__ import annotations

import pytest
import torch

from graphfuse.models import registry
from graphfuse.models.gated_delta_net import group_by_group, one_behind_another
from graphfuse.models.qwen3_5 import Qwen3_5DenseDeltaNetLayer, Qwen3_5SparseDeltaNetLayer
from graphfuse.models.qwen3_next import (
    DenseAttentionLayer,
    Qwen3NextDenseDeltaNetLayer,
    Qwen3NextSparseDeltaNetLayer,
    SparseAttentionLayer,
)
from graphfuse.models.sharding import Shard, TensorParallel, attention_heads
from tests.models import tiny


def taken(shard: Shard, rows: list[str]) -> list[str | None]:
    """What a rank has of a checkpoint's rows; None where it is padded."""
    assert shard.full == len(rows)
    found: list[str | None] = [None] * shard.local
    for s in shard.spans:
        found[s.target : s.target + s.length] = rows[s.source : s.source + s.length]
    return found


def heads(kind: str, numbers: list[int], rows: int) -> list[str]:
    return [f"{kind}{n}.{row}" for n in numbers for row in range(rows)]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_both_layouts_of_a_checkpoint_give_a_rank_the_same_rows(tp):
    """4 key heads of 2 rows, 8 value heads of 3: the two that belong to a key head go where it goes."""
    by_group = [
        row
        for group in range(4)
        for kind, numbers, rows in (("q", [group], 2), ("k", [group], 2), ("v", [2 * group, 2 * group + 1], 3))
        for row in heads(kind, numbers, rows)
    ]
    by_part = [*heads("q", list(range(4)), 2), *heads("k", list(range(4)), 2), *heads("v", list(range(8)), 3)]
    seen = []
    for rank in range(tp):
        values, keys = attention_heads(8, 4, TensorParallel(None, tp, rank))
        grouped = group_by_group(4, (keys, 2), (keys, 2), (values, 3))
        separate = one_behind_another(keys.times(2), keys.times(2), values.times(3))
        found = taken(grouped, by_group)
        assert found == taken(separate, by_part)
        first = rank * 4 // tp
        key_heads = list(range(first, max(first + 1, (rank + 1) * 4 // tp)))
        value_heads = list(range(rank * 8 // tp, (rank + 1) * 8 // tp))
        assert found == heads("q", key_heads, 2) + heads("k", key_heads, 2) + heads("v", value_heads, 3)
        seen += value_heads
    assert seen == list(range(8))


def test_caches_do_not_grow_with_the_length_of_the_text():
    model = registry.build(tiny.config("qwen3_next"), dtype=torch.bfloat16)
    (conv, state), _, (keys, _), _ = model.new_kv_caches(5, 40)
    assert (conv.shape, conv.dtype) == ((5, 2 * 3 * 12 + 6 * 6, 3), torch.bfloat16)
    assert (state.shape, state.dtype) == ((5, 6, 12, 6), torch.float32)
    assert keys.shape == (5, 40, 2, 16)
    assert model.placements()["kv_caches"] == [(1, 1), (1, 1), (2, 2), (1, 1)]


@pytest.mark.parametrize(
    ("family", "delta_net", "attention"),
    [
        ("qwen3_next", Qwen3NextSparseDeltaNetLayer, SparseAttentionLayer),
        ("qwen3_5", Qwen3_5DenseDeltaNetLayer, DenseAttentionLayer),
        ("qwen3_5_moe", Qwen3_5SparseDeltaNetLayer, SparseAttentionLayer),
    ],
)
def test_layers_that_differ_are_of_different_classes(family, delta_net, attention):
    config = tiny.config(family)
    kinds = [type(layer) for layer in registry.build(config, device="meta").layers]
    second = Qwen3NextDenseDeltaNetLayer if family == "qwen3_next" else delta_net  # of mlp_only_layers
    assert kinds == [delta_net, second, attention, delta_net]


def test_a_wrapper_is_looked_through_and_decides_what_it_says():
    config = tiny.config("qwen3_5")
    model = registry.build(config, device="meta")
    assert type(model) is registry.resolve(config)
    assert model.config.model_type == "qwen3_5_text"
    assert model.lm_head.tied, "the wrapper's tie_word_embeddings"
    config.architectures = ["Qwen3_5ForSequenceClassification"]
    with pytest.raises(registry.UnsupportedModelError, match="ForSequenceClassification"):
        registry.resolve(config)


def test_forgetting_is_kept_in_float32():
    model = registry.build(tiny.config("qwen3_next"), dtype=torch.bfloat16, device="meta")
    delta = model.layers[0].linear_attn
    assert {delta.A_log.dtype, delta.dt_bias.dtype} == {torch.float32}
    assert delta.norm.weight.dtype == torch.bfloat16
