"""How dimensions and heads are divided, checked against what every rank together must hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from graphfuse.errors import GroupError
from graphfuse.models.sharding import Shard, Span, TensorParallel, attention_heads, even


def ranks_of(size: int) -> list[TensorParallel]:
    return [TensorParallel(None, size, rank) for rank in range(size)]


def sources(shard: Shard) -> list[int]:
    return [s.source + i for s in shard.spans for i in range(s.length)]


def by_target(shard: Shard) -> dict[int, int]:
    return {s.target + i: s.source + i for s in shard.spans for i in range(s.length)}


@given(size=st.integers(1, 60), tp=st.integers(1, 8))
def test_an_even_division_takes_every_entry_once_and_gives_ranks_equal_sizes(size, tp):
    shards = [even(size, rank) for rank in ranks_of(tp)]
    assert [entry for shard in shards for entry in sources(shard)] == list(range(size))
    assert {shard.local for shard in shards} == {-(-size // tp)}


@given(kv_heads=st.integers(1, 9), group=st.integers(1, 9), tp=st.integers(1, 9))
def test_every_query_head_lies_on_one_rank_with_the_key_value_head_it_reads(kv_heads, group, tp):
    seen = []
    sizes = set()
    for rank in ranks_of(tp):
        queries, keys = attention_heads(kv_heads * group, kv_heads, rank)
        sizes.add((queries.local, keys.local))
        per_slot = queries.local // keys.local
        assert queries.local % keys.local == 0
        held = by_target(keys)
        for local, head in by_target(queries).items():
            assert held[local // per_slot] == head // group
            seen.append(head)
    assert sorted(seen) == list(range(kv_heads * group))
    assert len(sizes) == 1, "one graph for all ranks"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "per_rank"),
    [
        (32, 8, 4, (8, 2)),  # divides
        (9, 3, 2, (6, 2)),  # SmolLM2: three groups padded to four
        (9, 3, 3, (3, 1)),
        (16, 2, 8, (2, 1)),  # Qwen3-Next at TP 8: each key-value head on four ranks
        (32, 4, 8, (4, 1)),  # Qwen3-30B-A3B at TP 8
    ],
)
def test_head_counts_of_known_models(heads, kv_heads, tp, per_rank):
    for rank in ranks_of(tp):
        queries, keys = attention_heads(heads, kv_heads, rank)
        assert (queries.local, keys.local) == per_rank


def test_times_scales_heads_to_rows():
    shard = Shard(3, 2, (Span(2, 0, 1),)).times(64)
    assert shard == Shard(192, 128, (Span(128, 0, 64),), unit=64)


def place(group):
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    square = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    found = [TensorParallel.of(g) for g in (group, mesh, square["tp"])]
    try:
        TensorParallel.of(square)
    except GroupError as error:
        message = str(error)
    return [(tp.size, tp.rank) for tp in found], message


def test_a_group_or_a_mesh_of_one_dimension_gives_size_and_rank(ranks):
    assert TensorParallel.of(None) == TensorParallel(None, 1, 0)
    for rank, (found, message) in enumerate(ranks.run(4, place)):
        assert found == [(4, rank), (4, rank), (2, rank % 2)]
        assert message == "The device mesh has 2 dimensions. Pass its tensor-parallel dimension, mesh['tp']."


def outside(group):
    import torch.distributed as dist

    others = dist.new_group([0, 1])
    try:
        TensorParallel.of(others)
    except (GroupError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def test_a_rank_outside_the_group_is_told(ranks):
    for message in ranks.run(4, outside)[2:]:
        assert message.startswith("GroupError: Rank") and "is not in the tensor-parallel group" in message
