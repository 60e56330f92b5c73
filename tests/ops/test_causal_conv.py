"""`graphfuse::causal_conv` against a loop over rows, tokens and taps in float64."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from graphfuse.errors import ArgumentError
from graphfuse.ops.causal_conv import causal_conv


def naive(x, weight, before):
    """One row. x [S, C]; weight [C, K]; before [C, K - 1]. Outputs, and the inputs that the next token sees."""
    inputs, taps = torch.cat((before.T, x)).double(), weight.shape[1]
    out = torch.stack([(inputs[t : t + taps] * weight.T.double()).sum(0) for t in range(len(x))]) if len(x) else x
    return out * out.sigmoid(), inputs[len(x) :].T


def random_inputs(batch, length, channels=6, taps=4):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) for shape in ((batch, length, channels), (channels, taps))]


def positions_of(starts, length):
    return torch.tensor(starts)[:, None] + torch.arange(length)


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_rows_go_on_from_the_cache_or_start_anew_and_padding_leaves_no_trace(length, taps):
    x, weight = random_inputs(3, length, taps=taps)
    before = torch.randn(4, 6, taps - 1, generator=torch.Generator().manual_seed(1))
    cache, lengths = before.clone(), [length, length, length - 1]
    got = causal_conv(x, weight, positions_of([3, 0, 2], length), torch.tensor(lengths), cache)
    untouched = before[3].clone()
    before[1] = 0.0
    for b, n in enumerate(lengths):
        want, newest = naive(x[b, :n], weight, before[b])
        torch.testing.assert_close(got[b, :n].double(), want.double(), atol=1e-6, rtol=1e-5)
        assert torch.equal(cache[b].double(), newest)
    assert torch.equal(cache[3], untouched), "a row of the cache that the call does not have"
    assert got.is_contiguous()


def test_without_a_cache_there_is_nothing_before_the_first_token():
    x, weight = random_inputs(2, 5)
    got = causal_conv(x, weight, positions_of([7, 0], 5), torch.tensor([5, 5]), None)
    for b in range(2):
        want, _ = naive(x[b], weight, torch.zeros(6, 3))
        torch.testing.assert_close(got[b].double(), want, atol=1e-6, rtol=1e-5)


def test_prompt_and_single_tokens_give_what_one_call_gives():
    x, weight = random_inputs(1, 7)
    whole = causal_conv(x, weight, positions_of([0], 7), torch.tensor([7]), None)
    cache = torch.zeros(1, 6, 3)
    parts = [causal_conv(x[:, :2], weight, positions_of([0], 2), torch.tensor([2]), cache)]
    for t in range(2, 7):
        parts.append(causal_conv(x[:, t : t + 1], weight, positions_of([t], 1), torch.tensor([1]), cache))
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-6, rtol=1e-5)


def test_it_passes_torchs_checks_of_an_op():
    x, weight = random_inputs(2, 3)
    torch.library.opcheck(causal_conv, (x, weight, positions_of([0, 0], 3), torch.tensor([3, 2]), None))


def test_shapes_on_fake_tensors_are_those_of_the_result():
    with FakeTensorMode():
        x, weight = torch.zeros(2, 3, 6, dtype=torch.bfloat16), torch.zeros(6, 4, dtype=torch.bfloat16)
        got = causal_conv(x, weight, torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, dtype=torch.int64), None)
        assert (got.shape, got.dtype) == ((2, 3, 6), torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 3, 5)}, r"Pass x \[B, S, C\] and weight \[C, K\]"),
        ({"weight": torch.zeros(6, 4).bfloat16()}, "Use one dtype"),
        ({"positions": torch.zeros(2, 3)}, "Pass int64"),
        ({"conv_cache": torch.zeros(2, 3, 6)}, r"\[max_batch, 6, 3\]"),
        ({"conv_cache": torch.zeros(2, 6, 3).bfloat16()}, "Use one dtype"),
        ({"conv_cache": torch.zeros(1, 6, 3)}, "The batch has 2 rows but the cache holds 1"),
        ({"conv_cache": torch.zeros(2, 6, 3, device="meta")}, "Use one device"),
    ],
)
def test_mistakes_are_named(change, message):
    x, weight = random_inputs(2, 3)
    arguments = {"x": x, "weight": weight, "positions": positions_of([0, 0], 3), "lengths": torch.tensor([3, 3])}
    with pytest.raises(ArgumentError, match=message):
        causal_conv(**(arguments | {"conv_cache": None} | change))


@pytest.mark.parametrize("spans", [[(5, 0)], [(1, 3), (4, 0)], [(1, 3), (1, 4)]])
def test_the_result_is_contiguous_however_the_input_lies(spans):
    length = sum(n for n, _ in spans)
    x, weight = random_inputs(1, length)
    positions = torch.cat([torch.arange(before, before + n) for n, before in spans])[None]
    ragged = (None, torch.zeros(3, 6, 3), torch.arange(1, 1 + len(spans)), torch.tensor(spans))
    for rest in ((torch.tensor([length]), None), ragged):
        want = causal_conv(x, weight, positions, *(t if t is None else t.clone() for t in rest))
        lying = x.transpose(1, 2).contiguous().transpose(1, 2)
        got = causal_conv(lying, weight, positions, *(t if t is None else t.clone() for t in rest))
        assert got.is_contiguous() and torch.equal(got, want)
