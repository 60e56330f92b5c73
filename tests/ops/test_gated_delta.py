"""`graphfuse::gated_delta` against its recurrence, token by token in float64."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from graphfuse.errors import ArgumentError
from graphfuse.ops.gated_delta import CHUNK, gated_delta


def recurrence(q, k, v, g, beta, state):
    """One row. q, k [S, Hk, Dk]; v [S, Hv, Dv]; g, beta [S, Hv]; state [Hv, Dk, Dv]. Outputs and the last state."""
    state, out = state.double().clone(), torch.zeros(v.shape, dtype=torch.float64)
    group = v.shape[1] // k.shape[1]
    for t in range(v.shape[0]):
        for h in range(v.shape[1]):
            key, query = (x[t, h // group].double() for x in (k, q))
            key = key / (key @ key + 1e-6).sqrt()
            query = query / (query @ query + 1e-6).sqrt() / len(query) ** 0.5
            forgotten = g[t, h].double().exp() * state[h]
            error = beta[t, h].double() * (v[t, h].double() - key @ forgotten)
            state[h] = forgotten + torch.outer(key, error)
            out[t, h] = query @ state[h]
    return out, state


def random_inputs(batch, length, *, seed=0, key_heads=2, heads=4, key_dim=8, value_dim=6, forgetting=1.0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(batch, length, *shape, generator=generator)

    q, k, v = normal(key_heads, key_dim), normal(key_heads, key_dim), normal(heads, value_dim)
    return q, k, v, -forgetting * normal(heads).exp(), normal(heads).sigmoid()


def positions_of(starts, length):
    return torch.tensor(starts)[:, None] + torch.arange(length)


def check_rows(inputs, got, lengths, before, cache):
    for b, length in enumerate(lengths):
        want, state = recurrence(*(x[b, :length] for x in inputs), before[b])
        torch.testing.assert_close(got[b, :length].double(), want, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(cache[b].double(), state, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
@pytest.mark.parametrize(("key_heads", "heads"), [(1, 1), (2, 6)])
def test_a_text_from_its_start_is_the_recurrence_from_zero(length, key_heads, heads):
    inputs = random_inputs(2, length, key_heads=key_heads, heads=heads)
    cache = torch.full((3, heads, 8, 6), 7.0)
    got = gated_delta(*inputs, positions_of([0, 0], length), torch.tensor([length, length]), cache)
    check_rows(inputs, got, [length, length], torch.zeros(2, heads, 8, 6), cache)
    assert (cache[2] == 7.0).all(), "a row of the cache that the call does not have"
    assert got.is_contiguous()
    without = gated_delta(*inputs, positions_of([0, 0], length), torch.tensor([length, length]), None)
    assert torch.equal(got, without)


@pytest.mark.parametrize("length", [1, 3, 70])
def test_a_later_call_goes_on_from_the_state_and_a_row_at_position_zero_starts_anew(length):
    inputs = random_inputs(2, length)
    before = torch.randn(2, 4, 8, 6, generator=torch.Generator().manual_seed(1))
    cache = before.clone()
    got = gated_delta(*inputs, positions_of([5, 0], length), torch.tensor([length, length]), cache)
    before[1] = 0.0
    check_rows(inputs, got, [length, length], before, cache)


def test_padding_leaves_the_state_at_each_rows_last_token():
    inputs = random_inputs(4, 70)
    lengths = [70, 64, 3, 0]
    before = torch.randn(4, 4, 8, 6, generator=torch.Generator().manual_seed(1))
    cache = before.clone()
    got = gated_delta(*inputs, positions_of([2, 2, 2, 2], 70), torch.tensor(lengths), cache)
    check_rows(inputs, got, lengths, before, cache)
    assert torch.equal(cache[3], before[3])


def test_prompt_and_single_tokens_give_what_one_call_gives():
    inputs = random_inputs(2, 9)
    whole = gated_delta(*inputs, positions_of([0, 0], 9), torch.tensor([9, 9]), None)
    cache = torch.zeros(2, 4, 8, 6)
    parts = [gated_delta(*(x[:, :5] for x in inputs), positions_of([0, 0], 5), torch.tensor([5, 5]), cache)]
    for t in range(5, 9):
        one = [x[:, t : t + 1] for x in inputs]
        parts.append(gated_delta(*one, positions_of([t, t], 1), torch.tensor([1, 1]), cache))
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("forgetting", [0.0, 1e-3, 30.0])
def test_nothing_and_nearly_everything_may_be_forgotten(forgetting):
    inputs = random_inputs(1, 2 * CHUNK, forgetting=forgetting)
    cache = torch.zeros(1, 4, 8, 6)
    got = gated_delta(*inputs, positions_of([0], 2 * CHUNK), torch.tensor([2 * CHUNK]), cache)
    check_rows(inputs, got, [2 * CHUNK], torch.zeros(1, 4, 8, 6), cache)


def test_bfloat16_is_computed_in_float32():
    q, k, v, g, beta = random_inputs(1, 20)
    q, k, v, beta = (x.bfloat16() for x in (q, k, v, beta))
    got = gated_delta(q, k, v, g, beta, positions_of([0], 20), torch.tensor([20]), None)
    want, _ = recurrence(q[0], k[0], v[0], g[0], beta[0], torch.zeros(4, 8, 6))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got[0].double(), want, atol=1e-3, rtol=2**-8)


def test_a_zero_head_gives_zero():
    """Padding of a division over ranks: not NaN, from a key of length zero."""
    q, k, v, g, beta = random_inputs(1, 3)
    got = gated_delta(0 * q, 0 * k, 0 * v, g, beta, positions_of([0], 3), torch.tensor([3]), None)
    assert (got == 0).all()


def test_it_passes_torchs_checks_of_an_op():
    inputs = random_inputs(2, 3)
    torch.library.opcheck(gated_delta, (*inputs, positions_of([0, 0], 3), torch.tensor([3, 2]), None))


def test_shapes_on_fake_tensors_are_those_of_the_result():
    with FakeTensorMode():
        inputs = random_inputs(2, 3)
        got = gated_delta(*inputs, torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, dtype=torch.int64), None)
        assert (got.shape, got.dtype) == ((2, 3, 4, 6), torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 3, 2)}, r"Pass q and k \[B, S, Hk, Dk\]"),
        ({"k": torch.zeros(2, 3, 1, 8)}, "q and k need the same"),
        ({"v": torch.zeros(2, 3, 3, 6)}, "must be a multiple"),
        ({"g": torch.zeros(2, 3, 4).double()}, "Pass float32 g"),
        ({"beta": torch.zeros(2, 3, 2)}, "for the 4 heads"),
        ({"beta": torch.zeros(2, 3, 4).bfloat16()}, "Use one dtype"),
        ({"positions": torch.zeros(2, 3)}, "Pass int64"),
        ({"lengths": torch.zeros(2, 1, dtype=torch.int64)}, r"\[B, S\] and \[B\]"),
        ({"state_cache": torch.zeros(2, 4, 6, 8)}, r"float32 \[max_batch, 4, 8, 6\]"),
        ({"state_cache": torch.zeros(2, 4, 8, 6).bfloat16()}, "Allocate it as float32"),
        ({"state_cache": torch.zeros(1, 4, 8, 6)}, "The batch has 2 rows but the cache holds 1"),
        ({"state_cache": torch.zeros(2, 4, 8, 6, device="meta")}, "Use one device"),
    ],
)
def test_mistakes_are_named(change, message):
    arguments = dict(zip(("q", "k", "v", "g", "beta"), random_inputs(2, 3), strict=True))
    arguments |= {"positions": positions_of([0, 0], 3), "lengths": torch.tensor([3, 3]), "state_cache": None}
    with pytest.raises(ArgumentError, match=message):
        gated_delta(**(arguments | change))


@pytest.mark.parametrize("spans", [[(5, 0)], [(1, 3), (4, 0)], [(1, 3), (1, 4)]])
def test_the_result_is_contiguous_however_the_values_lie(spans):
    length = sum(n for n, _ in spans)
    q, k, v, g, beta = random_inputs(1, length)
    positions = torch.cat([torch.arange(before, before + n) for n, before in spans])[None]
    ragged = (None, torch.zeros(3, 4, 8, 6), torch.arange(1, 1 + len(spans)), torch.tensor(spans))
    for rest in ((torch.tensor([length]), None), ragged):
        want = gated_delta(q, k, v, g, beta, positions, *(t if t is None else t.clone() for t in rest))
        lying = v.transpose(2, 3).contiguous().transpose(2, 3)
        got = gated_delta(q, k, lying, g, beta, positions, *(t if t is None else t.clone() for t in rest))
        assert got.is_contiguous() and torch.equal(got, want)
