"""Ragged sequences of recurrent mixers, run by `test_interpreted.py` in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from graphfuse.kernels.causal_conv_ragged import causal_conv_ragged
from graphfuse.kernels.gated_delta_chunks import gated_delta_chunks
from graphfuse.kernels.ragged_chunks import chunks_of
from graphfuse.ops.causal_conv import causal_conv
from graphfuse.ops.gated_delta import _EPS, gated_delta
from graphfuse.ops.layout import split
from tests.kernels.interpreter_as_gpus import arithmetic_of_gpus

CALLS = {
    "one": [(130, 0)],
    "all sorts": [(1, 3), (5, 0), (63, 4), (64, 0), (65, 9), (2, 1), (2, 0)],
    "tokens first": [(1, 9), (1, 0), (3, 7), (130, 2)],
}
UNTOUCHED = 7.0


@pytest.fixture(autouse=True)
def as_on_a_gpu():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills memory that nobody wrote with NaN
    with arithmetic_of_gpus():
        yield


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Call:
    """Sequences whose states lie in no order among others, not finite where a text starts anew."""

    def __init__(self, spans):
        self.spans = torch.tensor(spans)
        self.positions = torch.cat([torch.arange(before, before + length) for length, before in spans])
        self.states = torch.randperm(len(spans) + 3, generator=torch.Generator().manual_seed(3))[: len(spans)]
        self.num_tokens = len(self.positions)
        self.num_single, longer = split(self.num_tokens, self.spans)
        self.chunks = chunks_of(tuple(longer), torch.device("cpu"))

    def caches(self, *shape, dtype=torch.float32):
        cache = normal(len(self.spans) + 3, *shape, seed=9, dtype=dtype)
        for state, (_, before) in zip(self.states.tolist(), self.spans.tolist(), strict=True):
            if before == 0:
                cache[state] = float("nan")
        return cache, cache.clone()

    def check_cache(self, got, want, before, tolerance):
        """What is of longer sequences is new, all else as it was."""
        longer = self.states[self.num_single :]
        torch.testing.assert_close(got[longer], want[longer], **tolerance)
        others = torch.ones(len(got), dtype=torch.bool)
        others[longer] = False
        assert torch.equal(got[others].nan_to_num(), before[others].nan_to_num())


def delta(call, dtype, key_heads, heads, key_size, value_size, forgetting, alike=0.0):
    num = call.num_tokens
    mixed = normal(
        num, 2 * key_heads * key_size + heads * value_size, dtype=dtype
    )  # as the projection has it: in a row
    q, k, v = mixed.split([key_heads * key_size, key_heads * key_size, heads * value_size], dim=1)
    q, k, v = q.view(num, key_heads, -1), k.view(num, key_heads, -1), v.view(num, heads, -1)
    k = k + alike * normal(1, key_heads, key_size, seed=5, dtype=dtype)
    g, beta = -forgetting * normal(num, heads, seed=1).exp(), normal(num, heads, seed=2, dtype=dtype).sigmoid()
    return q, k, v, g, beta


def advanced(call, tokens, cache):
    out = torch.full_like(tokens[2], UNTOUCHED, memory_format=torch.contiguous_format)
    gated_delta_chunks(*tokens, call.positions, call.states, call.chunks, cache, out, _EPS)
    assert (out[: call.num_single] == UNTOUCHED).all()
    return out[call.num_single :]


def expected(call, tokens, cache):
    y = gated_delta(*(t[None] for t in tokens), call.positions[None], None, cache, call.states, call.spans)
    return y[0, call.num_single :]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("one", (1, 2, 64, 48)),
        ("one", (1, 3, 20, 5)),
        ("all sorts", (1, 1, 16, 24)),
        ("tokens first", (2, 4, 16, 16)),
    ],
)
def test_the_delta_rule_in_float32(name, shape):
    call = Call(CALLS[name])
    tokens, (cache, want_cache) = delta(call, torch.float32, *shape, forgetting=0.1), call.caches(shape[1], *shape[2:])
    before = cache.clone()
    got, want = advanced(call, tokens, cache), expected(call, tokens, want_cache)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    call.check_cache(cache, want_cache, before, {"atol": 2e-5, "rtol": 2e-5})


@pytest.mark.parametrize(("forgetting", "alike"), [(0.0, 0.0), (0.0, 10.0), (1e-3, 10.0), (30.0, 0.0)])
def test_gates_of_all_strengths_and_keys_that_are_alike(forgetting, alike):
    """Alike keys make all that is below the diagonal nearly beta: powers of it are huge, its inverse is not."""
    call = Call(CALLS["tokens first"])
    tokens, (cache, want_cache) = delta(call, torch.float32, 1, 1, 16, 16, forgetting, alike), call.caches(1, 16, 16)
    before = cache.clone()
    got, want = advanced(call, tokens, cache), expected(call, tokens, want_cache)
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)
    call.check_cache(cache, want_cache, before, {"atol": 5e-5, "rtol": 5e-5})


@pytest.mark.parametrize(
    ("name", "shape", "alike"),
    [("one", (1, 2, 64, 48), 0.0), ("all sorts", (1, 1, 16, 24), 3.0), ("tokens first", (1, 3, 20, 5), 0.0)],
)
def test_the_delta_rule_in_bfloat16(name, shape, alike):
    """Products are right to 16 bits, 2^-16 of what is summed: of states and values of order one, in several steps.
    Outputs are rounded to bfloat16 besides, where that may fall on the other side."""
    call = Call(CALLS[name])
    tokens = delta(call, torch.bfloat16, *shape, forgetting=0.05, alike=alike)
    cache, want_cache = call.caches(shape[1], *shape[2:])
    before = cache.clone()
    got, want = advanced(call, tokens, cache), expected(call, tokens, want_cache)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, atol=1e-4, rtol=2**-7)
    call.check_cache(cache, want_cache, before, {"atol": 1e-4, "rtol": 1e-4})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("channels", "taps"), [(1, 2), (6, 4), (130, 4), (64, 3)])
@pytest.mark.parametrize("name", CALLS)
def test_the_convolution(name, dtype, channels, taps):
    """Plain torch rounds between convolution and SiLU, the kernel does not."""
    call = Call(CALLS[name])
    x = normal(call.num_tokens, channels + 5, dtype=dtype)[:, :channels]
    weight = normal(channels, taps, seed=1, dtype=dtype)
    cache, want_cache = call.caches(channels, taps - 1, dtype=dtype)
    before, out = cache.clone(), torch.full((call.num_tokens, channels), UNTOUCHED, dtype=dtype)
    want = causal_conv(x[None], weight, call.positions[None], None, want_cache, call.states, call.spans)[0]
    causal_conv_ragged(x, weight, call.positions, call.states, call.chunks, cache, out)
    first = call.num_single
    assert (out[:first] == UNTOUCHED).all()
    tolerance = {"atol": 2e-2, "rtol": 2**-6} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(out[first:], want[first:], **tolerance)
    call.check_cache(cache, want_cache, before, {"atol": 0, "rtol": 0})
