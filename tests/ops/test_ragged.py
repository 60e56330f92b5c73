"""Ragged calls of the ops with caches give what calls of rows give, sequence by sequence."""

from __future__ import annotations

import pytest
import torch

from graphfuse.errors import ArgumentError
from graphfuse.ops.attention import attention
from graphfuse.ops.causal_conv import causal_conv
from graphfuse.ops.gated_delta import gated_delta
from graphfuse.ops.layout import split
from graphfuse.ops.mla import mla_attention
from graphfuse.ops.select_tokens import select_tokens

PAGE_SIZE, MAX_LENGTH, NUM_PAGES, HEADS, KV_HEADS, SIZE = 4, 16, 12, 4, 2, 8
CALLS = {
    "prompts": ([(5, 0), (9, 0), (2, 0)], [0, 1, 2]),
    "a token each": ([(1, 5), (1, 9), (1, 2)], [0, 1, 2]),
    "tokens, then chunks": ([(1, 2), (3, 5), (6, 9)], [2, 0, 1]),
    "a text of one token among chunks": ([(1, 0), (4, 5)], [1, 0]),
}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Caches:
    """The same contents as rows and as pages, which lie in no order; what is in neither text is not finite in pages."""

    def __init__(self, *shape, seed):
        self.rows = normal(3, MAX_LENGTH, *shape, seed=seed)
        self.pages = torch.zeros(NUM_PAGES + 1, PAGE_SIZE, *shape)
        self.table = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(1)).view(3, -1) + 1
        self.pages[self.table.flatten()] = self.rows.view(NUM_PAGES, PAGE_SIZE, *shape)

    def check(self, rows, ends):
        for row, end in zip(rows, ends, strict=True):
            assert torch.equal(self.pages[self.table[row]].flatten(0, 1)[:end], self.rows[row, :end])
        assert (self.pages[0] == 0).all()


def layout(spans, rows, table):
    positions = torch.cat([torch.arange(before, before + length) for length, before in spans])
    row_of = torch.tensor(rows).repeat_interleave(torch.tensor([length for length, _ in spans]))
    entries = table[row_of, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    return positions[None], {"entries": entries, "pages": table[torch.tensor(rows)], "spans": torch.tensor(spans)}


def one_by_one(op, spans, rows, tokens, caches):
    """Each sequence in a call of its own, with the caches' row."""
    out, start = [], 0
    for (length, before), row in zip(spans, rows, strict=True):
        here = slice(start, start + length)
        positions = torch.arange(before, before + length)[None]
        out.append(op([t[:, here] for t in tokens], positions, [cache[row : row + 1] for cache in caches]))
        start += length
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("window", "sinks"), [(None, False), (3, False), (None, True), (4, True)])
def test_attention(call, window, sinks):
    spans, rows = CALLS[call]
    total = sum(length for length, _ in spans)
    q, k, v = normal(1, total, HEADS, SIZE), normal(1, total, KV_HEADS, SIZE), normal(1, total, KV_HEADS, SIZE, seed=1)
    logits = normal(HEADS) if sinks else None
    keys, values = Caches(KV_HEADS, SIZE, seed=2), Caches(KV_HEADS, SIZE, seed=3)

    def by_row(tokens, positions, caches):
        return attention(*tokens, positions, *caches, 0.4, window, logits)

    want = one_by_one(by_row, spans, rows, (q, k, v), (keys.rows, values.rows))
    positions, where = layout(spans, rows, keys.table)
    got = attention(q, k, v, positions, keys.pages, values.pages, 0.4, window, logits, **where)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    for cache in (keys, values):
        cache.check(rows, [length + before for length, before in spans])


@pytest.mark.parametrize("call", CALLS)
def test_latent_attention(call):
    spans, rows = CALLS[call]
    total, rank, rope = sum(length for length, _ in spans), 6, 4
    tokens = (
        normal(1, total, HEADS, SIZE),
        normal(1, total, HEADS, rope),
        normal(1, total, rank),
        normal(1, total, rope),
    )
    up = normal(HEADS * (SIZE + 5), rank)
    latents, keys = Caches(rank, seed=2), Caches(rope, seed=3)

    def by_row(tokens, positions, caches):
        return mla_attention(*tokens, up, positions, *caches, 0.4)

    want = one_by_one(by_row, spans, rows, tokens, (latents.rows, keys.rows))
    positions, where = layout(spans, rows, latents.table)
    got = mla_attention(*tokens, up, positions, latents.pages, keys.pages, 0.4, **where)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    latents.check(rows, [length + before for length, before in spans])


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("top_k", [1, 2, 7, 16])
@pytest.mark.parametrize("unseen", [False, True])
def test_selection_and_attention_to_it(monkeypatch, call, top_k, unseen):
    """`unseen`: positions are not looked at to learn how much to read, as on a GPU."""
    spans, rows = CALLS[call]
    if unseen:
        for module in ("select_tokens", "mla"):
            monkeypatch.setattr(
                f"graphfuse.ops.{module}.longest", lambda _at, pages, _cache: pages.shape[1] * PAGE_SIZE
            )
    total, rank, rope = sum(length for length, _ in spans), 6, 4
    tokens = (
        normal(1, total, HEADS, SIZE),
        normal(1, total, HEADS, rope),
        normal(1, total, rank),
        normal(1, total, rope),
        normal(1, total, HEADS, SIZE, seed=5),
        normal(1, total, SIZE, seed=6),
        normal(1, total, HEADS, seed=7),
    )
    up = normal(HEADS * (SIZE + 5), rank)
    latents, keys, index = Caches(rank, seed=2), Caches(rope, seed=3), Caches(SIZE, seed=4)

    def run(tokens, positions, caches, **where):
        selected = select_tokens(*tokens[4:], positions, caches[2], top_k, **where)
        return mla_attention(*tokens[:4], up, positions, *caches[:2], 0.4, selected=selected, **where)

    want = one_by_one(run, spans, rows, tokens, (latents.rows, keys.rows, index.rows))
    positions, where = layout(spans, rows, latents.table)
    got = run(tokens, positions, (latents.pages, keys.pages, index.pages), **where)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    for cache in (latents, keys, index):
        cache.check(rows, [length + before for length, before in spans])


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("op", ["causal_conv", "gated_delta"])
def test_states(call, op):
    spans, rows = CALLS[call]
    total = sum(length for length, _ in spans)
    if op == "causal_conv":
        weight, tokens, before = normal(6, 4), (normal(1, total, 6),), normal(3, 6, 3, seed=2)

        def run(tokens, positions, lengths, cache, **ragged):
            return causal_conv(*tokens, weight, positions, lengths, cache, **ragged)
    else:
        g = -normal(1, total, HEADS).exp()
        tokens = (normal(1, total, KV_HEADS, SIZE), normal(1, total, KV_HEADS, SIZE, seed=1),
                  normal(1, total, HEADS, 5), g, normal(1, total, HEADS).sigmoid())  # fmt: skip
        before = normal(3, HEADS, SIZE, 5, seed=2)

        def run(tokens, positions, lengths, cache, **ragged):
            return gated_delta(*tokens, positions, lengths, cache, **ragged)

    row_cache = before.clone()

    def by_row(tokens, positions, caches):
        return run(tokens, positions, torch.tensor([positions.shape[1]]), caches[0])

    want = one_by_one(by_row, spans, rows, tokens, (row_cache,))
    cache = torch.cat((torch.full_like(before[:1], 7.0), before))  # row 0 is nobody's
    positions, where = layout(spans, rows, torch.zeros(3, 4, dtype=torch.int64))
    got = run(tokens, positions, None, cache, states=torch.tensor(rows) + 1, spans=where["spans"])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache[1:], row_cache, atol=1e-5, rtol=1e-5)
    assert (cache[0] == 7.0).all()


def test_rows_of_one_token_stand_first():
    assert split(3, torch.tensor([[9, 9]] * 3)) == (3, []), "as many tokens as sequences: not looked at"
    num_single, longer = split(7, torch.tensor([[1, 4], [1, 0], [3, 2], [2, 0]]))
    assert num_single == 2
    assert [(s.row, s.start, s.length, s.before, s.end) for s in longer] == [(2, 2, 3, 2, 5), (3, 5, 2, 0, 2)]
    with pytest.raises(ArgumentError, match="spans count 3 tokens, and the call has 4"):
        split(4, torch.tensor([[1, 0], [2, 0]]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pages": None}, "needs entries, pages and spans"),
        ({"pages": torch.zeros(2, dtype=torch.int64)}, r"pages 1, spans 2. Pass \[T\]"),
        ({"entries": torch.zeros(2)}, "entries are torch.float32"),
        ({"spans": torch.zeros(2, 3, dtype=torch.int64)}, r"\[R, 2\]"),
        ({"k_cache": None, "v_cache": None}, "reads and writes caches"),
        ({"pages": torch.zeros(2, 1, dtype=torch.int64, device="meta")}, "pages on meta"),
    ],
)
def test_mistakes_are_named(change, message):
    cache = torch.zeros(3, PAGE_SIZE, 1, 2)
    arguments = {
        "q": torch.zeros(1, 2, 1, 2), "k": torch.zeros(1, 2, 1, 2), "v": torch.zeros(1, 2, 1, 2),
        "positions": torch.zeros(1, 2, dtype=torch.int64), "k_cache": cache, "v_cache": cache, "scale": 1.0,
        "sliding_window": None, "sinks": None, "entries": torch.tensor([4, 8]),
        "pages": torch.tensor([[1], [2]]), "spans": torch.tensor([[1, 0], [1, 0]]),
    }  # fmt: skip
    attention(**arguments)
    with pytest.raises(ArgumentError, match=message):
        attention(**(arguments | change))


@pytest.mark.parametrize("op", [causal_conv, gated_delta])
def test_a_call_with_states_is_of_rows_or_ragged(op):
    conv = {"x": torch.zeros(1, 2, 3), "weight": torch.zeros(3, 2), "conv_cache": torch.zeros(2, 3, 1)}
    heads = torch.zeros(1, 2, 1, 2)
    delta = {"q": heads, "k": heads, "v": heads, "g": heads[..., 0], "beta": heads[..., 0],
             "state_cache": torch.zeros(2, 1, 2, 2)}  # fmt: skip
    arguments = {**(conv if op is causal_conv else delta), "positions": torch.zeros(1, 2, dtype=torch.int64)}
    states, spans = torch.tensor([1]), torch.tensor([[2, 0]])
    op(**arguments, lengths=None, states=states, spans=spans)
    for wrong in (
        {"lengths": None},
        {"lengths": states, "states": states, "spans": spans},
        {"lengths": None, "states": states},
    ):
        with pytest.raises(ArgumentError, match="Neither rows nor a ragged call"):
            op(**arguments, **wrong)
    cache = "conv_cache" if op is causal_conv else "state_cache"
    with pytest.raises(ArgumentError, match="needs a cache"):
        op(**(arguments | {cache: None}), lengths=None, states=states, spans=spans)
