"""Ragged sequences of recurrent mixers on a GPU: the ops, which take the kernels, against float64."""

from __future__ import annotations

import pytest
import torch

from graphfuse.kernels import gated_delta_chunks
from graphfuse.ops.causal_conv import causal_conv
from graphfuse.ops.gated_delta import gated_delta

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

LENGTHS, BEFORE = [1, 1, 5, 63, 64, 65, 2, 300], [9, 0, 0, 3, 0, 7, 0, 1]
STATES = [3, 8, 1, 0, 6, 2, 9, 5]
SPANS = torch.tensor(list(zip(LENGTHS, BEFORE, strict=True)))
TOTAL, FIRST, NUM_STATES = sum(LENGTHS), 2, 10


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


def where():
    positions = torch.cat([torch.arange(b, b + n) for n, b in SPANS.tolist()])
    return {"positions": positions[None].cuda(), "states": torch.tensor(STATES).cuda(), "spans": SPANS}


def sequences():
    """(its tokens, its state, whether it goes on) of each."""
    start = 0
    for (length, before), state in zip(SPANS.tolist(), STATES, strict=True):
        yield slice(start, start + length), state, before > 0
        start += length


def unit(x):
    return x / (x * x).sum(-1, keepdim=True).add(1e-6).sqrt()


def recurrence(tokens, cache):
    """All sequences token by token in float64: outputs and states."""
    q, k, v, g, beta = (t.double() for t in tokens)
    group = v.shape[1] // k.shape[1]
    q, k = (unit(x).repeat_interleave(group, 1) for x in (q, k))
    cache, out = cache.double(), torch.empty_like(v)
    for here, row, goes_on in sequences():
        state = cache[row] if goes_on else torch.zeros_like(cache[row])  # [Hv, Dk, Dv]
        for t in range(here.start, here.stop):
            state = state * g[t].exp()[:, None, None]
            error = beta[t, :, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
            state = state + k[t][:, :, None] * error[:, None, :]
            out[t] = torch.einsum("hk,hkv->hv", q[t], state) / k.shape[2] ** 0.5
        cache[row] = state
    return out, cache


def rms(x):
    return x.double().square().mean().sqrt().item()


@pytest.mark.parametrize(("forgetting", "alike"), [(0.05, 0.0), (1e-3, 3.0), (30.0, 0.0)])
@pytest.mark.parametrize(
    ("dtype", "key_heads", "heads", "size"),
    [
        (torch.bfloat16, 16, 32, 128),  # Qwen3-Next-80B-A3B
        (torch.bfloat16, 2, 2, 64),
        (torch.float16, 2, 4, 128),
        (torch.float32, 2, 4, 128),
    ],
)
def test_the_delta_rule_errs_as_plain_torch_does(monkeypatch, dtype, key_heads, heads, size, forgetting, alike):
    """Products of bfloat16 parts and of tf32x3 are right to 16 bits and more, so that a bfloat16 output's rounding
    hides them; float32, and states, show them. Where nearly all is forgotten, a chunk's logarithms add up to thousands,
    whose differences are right to 2**-13."""
    mixed = normal(TOTAL, 2 * key_heads * size + heads * size).to(dtype)  # as the projection has it: in a row
    q, k, v = mixed.split([key_heads * size, key_heads * size, heads * size], dim=1)
    q, k, v = q.view(TOTAL, key_heads, size), k.view(TOTAL, key_heads, size), v.view(TOTAL, heads, size)
    k = k + alike * normal(1, key_heads, size, seed=5).to(dtype)
    tokens = q, k, v, -forgetting * normal(TOTAL, heads, seed=1).exp(), normal(TOTAL, heads, seed=2).sigmoid().to(dtype)
    before = normal(NUM_STATES, heads, size, size, seed=3)
    want, want_states = recurrence(tokens, before)

    def run():
        cache = before.clone()
        out = gated_delta(*(t[None] for t in tokens), lengths=None, state_cache=cache, **where())[0]
        return out, cache

    got, states = run()
    again, again_states = run()
    assert torch.equal(again, got) and torch.equal(again_states, states), "the same bits each time"
    with monkeypatch.context() as patch:
        patch.setattr(gated_delta_chunks, "why_not", lambda *_: "to compare with plain torch")
        plain, plain_states = run()
    assert not torch.equal(plain_states, states), "the op took the same path twice"
    allowed = 30 if dtype == torch.float32 else 1.1
    assert rms(got[FIRST:] - want[FIRST:]) <= allowed * rms(plain[FIRST:] - want[FIRST:]) + 1e-6 * rms(want[FIRST:])
    used, others = STATES[FIRST:], sorted(set(range(NUM_STATES)) - set(STATES))
    allowed = 3 * rms(plain_states[used] - want_states[used]) + 2**-13 * rms(want_states[used])
    assert rms(states[used] - want_states[used]) <= allowed
    assert torch.equal(states[others], before[others])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("channels", "taps"), [(8192, 4), (70, 2)])
def test_the_convolution(dtype, channels, taps):
    x, weight = normal(TOTAL, channels + 8).to(dtype)[:, :channels], normal(channels, taps, seed=1).to(dtype)
    before = normal(NUM_STATES, channels, taps - 1, seed=2).to(dtype)
    cache, want_cache = before.clone(), before.clone()
    got = causal_conv(x[None], weight, lengths=None, conv_cache=cache, **where())[0]
    want = torch.empty(TOTAL, channels, dtype=torch.float64, device="cuda")
    for here, row, goes_on in sequences():
        old = before[row] if goes_on else torch.zeros_like(before[row])
        inputs = torch.cat((old, x[here].t()), 1)  # [C, K - 1 + L]
        total = (inputs.double().unfold(1, taps, 1) * weight.double()[:, None, :]).sum(-1).t()
        want[here] = total * torch.sigmoid(total)
        want_cache[row] = inputs[:, 1 - taps :]
    rtol = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=rtol)
    assert torch.equal(cache, want_cache)
