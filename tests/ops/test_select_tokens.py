"""`graphfuse::select_tokens`, and latent attention over a selection, against loops over rows, tokens and heads."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from graphfuse.errors import ArgumentError
from graphfuse.ops import select_tokens as module
from graphfuse.ops.mla import mla_attention
from graphfuse.ops.select_tokens import select_tokens

HEADS, SIZE, TOP_K = 6, 4, 3


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_inputs(batch, length):
    return normal(batch, length, HEADS, SIZE), normal(batch, length, SIZE, seed=1), normal(batch, length, HEADS, seed=2)


def wanted(q, keys, weights, position, top_k=TOP_K):
    """The set that a query [H, D] with weights [H] selects of keys [L, D]."""
    scores = []
    for key in keys[: position + 1].double():
        score = 0.0
        for h in range(len(q)):
            score += float(weights[h]) * max(0.0, float(q[h].double() @ key))
        scores.append(score)
    return set(sorted(range(len(scores)), key=lambda s: -scores[s])[:top_k])


def check(found, q, keys, weights, positions):
    """found [S, K]: each query's selection, and -1 for what it lacks."""
    for s, position in enumerate(positions):
        chosen = [index for index in found[s].tolist() if index >= 0]
        assert set(chosen) == wanted(q[s], keys, weights[s], position)
        assert len(chosen) == len(set(chosen)) == min(TOP_K, position + 1)


def test_each_query_gets_the_highest_of_the_tokens_up_to_itself():
    q, k, weights = random_inputs(2, 9)
    found = select_tokens(q, k, weights, torch.arange(9).expand(2, 9), None, TOP_K)
    assert (found.shape, found.dtype) == ((2, 9, TOP_K), torch.int32)
    for b in range(2):
        check(found[b], q[b], k[b], weights[b], range(9))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_text_of_no_more_tokens_has_all_of_them_once(length):
    q, k, weights = random_inputs(1, length)
    found = select_tokens(q, k, weights, torch.arange(length)[None], None, TOP_K)
    check(found[0], q[0], k[0], weights[0], range(length))


def test_many_queries_are_scored_in_several_products(monkeypatch):
    q, k, weights = random_inputs(2, 9)
    positions = torch.arange(9).expand(2, 9)
    whole = select_tokens(q, k, weights, positions, None, TOP_K)
    monkeypatch.setattr(module, "MOST_PRODUCTS", 2 * 2 * 9 * HEADS)
    assert torch.equal(select_tokens(q, k, weights, positions, None, TOP_K).sort().values, whole.sort().values)


def test_prompts_then_tokens_of_rows_of_unequal_length():
    q, k, weights = random_inputs(2, 9)
    cache = torch.full((4, 12, SIZE), 1e4)  # what lies in unused slots must not be selected
    first = select_tokens(q[:, :6], k[:, :6], weights[:, :6], torch.arange(6).expand(2, 6), cache, TOP_K)
    for b, length in enumerate((3, 6)):
        check(first[b, :length], q[b], k[b], weights[b], range(length))
    for step in range(3):
        rows, positions = torch.arange(2), torch.tensor([3 + step, 6 + step])
        inputs = [t[rows, positions][:, None] for t in (q, k, weights)]
        found = select_tokens(*inputs, positions[:, None], cache, TOP_K)
        for b, p in enumerate(positions.tolist()):
            check(found[b], q[b, p:], k[b], weights[b, p:], [p])
    assert (cache[2:] == 1e4).all(), "rows outside the batch are not touched"


def test_a_second_chunk_selects_of_the_first():
    q, k, weights = random_inputs(1, 9)
    cache = torch.zeros(1, 9, SIZE)
    for a, b in [(0, 5), (5, 9)]:
        positions = torch.arange(a, b)[None]
        found = select_tokens(q[:, a:b], k[:, a:b], weights[:, a:b], positions, cache, TOP_K)
        check(found[0], q[0, a:], k[0], weights[0, a:], range(a, b))


def test_attention_weighs_what_is_selected_and_nothing_else():
    heads, nope, rope, rank, value = 3, 6, 4, 8, 5
    tokens = [normal(2, 7, *shape, seed=i) for i, shape in enumerate([(heads, nope), (heads, rope), (rank,), (rope,)])]
    q_nope, q_rope, latent, k_rope = tokens
    up = normal(heads * (nope + value), rank, seed=5)
    positions = torch.arange(7).expand(2, 7)
    selected = select_tokens(*random_inputs(2, 7), positions, None, TOP_K)
    got = mla_attention(*tokens, up, positions, None, None, 0.3, selected=selected)
    for b in range(2):
        for s in range(7):
            at = [index for index in selected[b, s].tolist() if index >= 0]
            kept = [latent[b : b + 1, at], k_rope[b : b + 1, at]]  # and those alone, the query behind them
            query = [t[b : b + 1, s : s + 1].expand(-1, len(at), -1, -1) for t in (q_nope, q_rope)]
            want = mla_attention(*query, *kept, up, torch.arange(len(at))[None], None, None, 0.3)[0, -1]
            torch.testing.assert_close(got[b, s], want, atol=1e-5, rtol=1e-5)


def test_a_selection_of_all_is_plain_attention():
    heads, nope, rope, rank = 3, 6, 4, 8
    tokens = [normal(2, 5, *shape, seed=i) for i, shape in enumerate([(heads, nope), (heads, rope), (rank,), (rope,)])]
    up, positions = normal(heads * 11, rank, seed=5), torch.arange(5).expand(2, 5)
    plain = mla_attention(*tokens, up, positions, None, None, 0.3)
    for top_k in (5, 9):
        selected = select_tokens(*random_inputs(2, 5), positions, None, top_k)
        assert torch.equal(mla_attention(*tokens, up, positions, None, None, 0.3, selected=selected), plain)


def test_a_score_that_is_not_finite_is_not_hidden():
    q, k, weights = random_inputs(1, 9)
    q[0, 8] = torch.nan
    found = select_tokens(q, k, weights, torch.arange(9)[None], None, TOP_K)
    assert (found[0, 8] >= 0).all(), "of what cannot be compared any may be taken, and as many"


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_an_empty_batch_or_sequence_gives_an_empty_result(shape):
    out = select_tokens(*random_inputs(*shape), torch.zeros(shape, dtype=torch.int64), None, TOP_K)
    assert (out.shape, out.dtype) == ((*shape, TOP_K), torch.int32)


@pytest.mark.parametrize("length", [1, 5])
def test_the_fake_kernel_agrees_in_shape_dtype_and_strides(length):
    inputs = [*random_inputs(2, length), torch.arange(length).expand(2, length)]
    want = select_tokens(*inputs, None, TOP_K)
    with FakeTensorMode() as mode:
        got = select_tokens(*[mode.from_tensor(t) for t in inputs], None, TOP_K)
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.zeros(2, 3, 1, SIZE)}, r"4, 4, 3, 2 dimensions. Pass q \[B, S, H, D\]"),
        ({"positions": torch.zeros(2, 3, dtype=torch.int32)}, "Pass int64 positions"),
        ({"weights": torch.zeros(2, 3, HEADS, dtype=torch.bfloat16)}, "weights torch.bfloat16"),
        ({"weights": torch.zeros(2, 3, HEADS + 1)}, "All heads need a weight"),
        ({"k": torch.zeros(2, 3, SIZE + 1)}, "queries and keys one size"),
        ({"k": torch.zeros(2, 3, SIZE, dtype=torch.bfloat16)}, "Use one dtype"),
        ({"top_k": 0}, "top_k is 0"),
        ({"k_cache": torch.zeros(2, 4, SIZE, device="meta")}, "Use one device"),
        ({"k_cache": torch.zeros(2, 4, SIZE + 1)}, r"Allocate it as \[max_batch, max_len, 4\]"),
        ({"k_cache": torch.zeros(1, 4, SIZE)}, "The batch has 2 rows"),
        ({"positions": torch.arange(3).expand(2, 3) + 2}, "Position 4 lies outside the KV cache of 4 slots"),
        ({"k": torch.zeros(2, 4, SIZE)}, "disagree on"),
        ({"k_cache": None, "entries": torch.zeros(6, dtype=torch.int64), "pages": torch.zeros(1, 2, dtype=torch.int64),
          "spans": torch.tensor([[6, 0]])}, "reads and writes a cache"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_used_are_named(changes, message):
    q, k, weights = random_inputs(2, 3)
    args = {"q": q, "k": k, "weights": weights, "positions": torch.arange(3).expand(2, 3),
            "k_cache": torch.zeros(2, 4, SIZE), "top_k": TOP_K}  # fmt: skip
    with pytest.raises(ArgumentError, match=message):
        select_tokens(**{**args, **changes})


def test_a_selection_of_another_kind_is_refused():
    tokens = [torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 2), torch.zeros(1, 2, 4), torch.zeros(1, 2, 2)]
    where = (torch.zeros(5, 4), torch.arange(2)[None], None, None, 0.3)
    with pytest.raises(ArgumentError, match=r"selected is torch.int64 with 3 dimensions"):
        mla_attention(*tokens, *where, selected=torch.zeros(1, 2, 2, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="disagree on"):
        mla_attention(*tokens, *where, selected=torch.zeros(1, 3, 2, dtype=torch.int32))
