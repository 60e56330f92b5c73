"""`graphfuse::attention` against a loop over rows, heads and tokens in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

from graphfuse.errors import ArgumentError
from graphfuse.ops.attention import attention


def naive(q, keys, values, query_positions, key_positions, scale, window, sinks=None):
    """One row. q [S, Hq, D]; keys, values [L, Hkv, D]; positions [S] and [L]; sinks [Hq]."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // keys.shape[1]
    for s in range(q.shape[0]):
        p = int(query_positions[s])
        seen = [j for j, kp in enumerate(key_positions) if kp <= p and (window is None or kp > p - window)]
        for h in range(q.shape[1]):
            scores = [scale * float(q[s, h].double() @ keys[j, h // group].double()) for j in seen]
            weights = [math.exp(x) for x in scores]
            total = sum(weights) + (0.0 if sinks is None else math.exp(float(sinks[h])))
            for w, j in zip(weights, seen, strict=True):
                out[s, h] += w / total * values[j, h // group].double()
    return out


def random_qkv(batch, length, heads=6, kv_heads=2, head_dim=8):
    shape = (batch, length)
    return torch.randn(*shape, heads, head_dim), *(torch.randn(*shape, kv_heads, head_dim) for _ in range(2))


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_without_cache_every_token_sees_itself_and_the_tokens_before(window, heads, kv_heads):
    q, k, v = random_qkv(2, 7, heads, kv_heads)
    positions = torch.arange(7).expand(2, 7)
    got = attention(q, k, v, positions, None, None, 0.3, window)
    for b in range(2):
        want = naive(q[b], k[b], v[b], range(7), range(7), 0.3, window)
        torch.testing.assert_close(got[b].double(), want, atol=1e-5, rtol=1e-5)
    assert got.is_contiguous()


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_a_sink_takes_its_share_of_each_heads_weight(window, heads, kv_heads, monkeypatch):
    monkeypatch.setattr("graphfuse.ops.sinks.SCORES_PER_CHUNK", 2 * heads * 7 * 3)  # three queries at a time
    q, k, v = random_qkv(2, 7, heads, kv_heads)
    sinks = torch.linspace(-3.0, 3.0, heads)
    positions = torch.arange(7).expand(2, 7)
    got = attention(q, k, v, positions, None, None, 0.3, window, sinks)
    for b in range(2):
        want = naive(q[b], k[b], v[b], range(7), range(7), 0.3, window, sinks)
        torch.testing.assert_close(got[b].double(), want, atol=1e-5, rtol=1e-5)
        plain = naive(q[b], k[b], v[b], range(7), range(7), 0.3, window)
        assert ((want - plain).abs().amax((0, 2)) > 0.01).all(), "every head's sink shows"
    assert got.is_contiguous()


def test_sinks_of_any_size_and_dtype_neither_overflow_nor_vanish():
    q, k, v = (x.bfloat16() for x in random_qkv(1, 3))
    positions = torch.arange(3)[None]
    small = attention(q, k, v, positions, None, None, 0.3, None, torch.full((6,), -1e4).bfloat16())
    plain = attention(q, k, v, positions, None, None, 0.3, None)
    torch.testing.assert_close(small, plain, atol=0.02, rtol=0.02)
    large = attention(q, k, v, positions, None, None, 0.3, None, torch.full((6,), 1e4).bfloat16())
    assert (large == 0).all()


@pytest.mark.parametrize("sinks", [None, torch.linspace(-1.0, 2.0, 6)])
@pytest.mark.parametrize("window", [None, 4])
def test_prefill_then_decode_equals_one_pass_for_rows_of_unequal_length(window, sinks):
    lengths, steps, total = [3, 6], 3, 9
    q, k, v = random_qkv(2, total)
    caches = [torch.full((4, 12, 2, 8), 1e4) for _ in range(2)]  # what lies in unused slots must not be seen
    padded = max(lengths)
    first = attention(
        q[:, :padded], k[:, :padded], v[:, :padded], torch.arange(padded).expand(2, -1), *caches, 0.3, window, sinks
    )
    for b, n in enumerate(lengths):
        want = naive(q[b, :n], k[b, :n], v[b, :n], range(n), range(n), 0.3, window, sinks)
        torch.testing.assert_close(first[b, :n].double(), want, atol=1e-5, rtol=1e-5)
    for step in range(steps):
        at = torch.tensor([n + step for n in lengths])
        rows = torch.arange(2)
        out = attention(
            q[rows, at][:, None], k[rows, at][:, None], v[rows, at][:, None], at[:, None], *caches, 0.3, window, sinks
        )
        for b, p in enumerate(at.tolist()):
            want = naive(q[b, p : p + 1], k[b, : p + 1], v[b, : p + 1], [p], range(p + 1), 0.3, window, sinks)
            torch.testing.assert_close(out[b].double(), want, atol=1e-5, rtol=1e-5)
    assert (caches[0][2:] == 1e4).all(), "rows outside the batch are not touched"


def test_a_second_chunk_of_a_prompt_sees_the_first():
    q, k, v = random_qkv(1, 8)
    caches = [torch.zeros(1, 8, 2, 8) for _ in range(2)]
    parts = [
        attention(q[:, a:b], k[:, a:b], v[:, a:b], torch.arange(a, b)[None], *caches, 0.3, None)
        for a, b in [(0, 5), (5, 8)]
    ]
    whole = attention(q, k, v, torch.arange(8)[None], None, None, 0.3, None)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_an_empty_batch_or_sequence_gives_an_empty_result(shape):
    q, k, v = random_qkv(*shape)
    out = attention(q, k, v, torch.zeros(shape, dtype=torch.int64), None, None, 1.0, None)
    assert out.shape == q.shape


def test_the_fake_kernel_agrees_in_shape_dtype_and_strides():
    real = random_qkv(2, 3)
    positions = torch.arange(3).expand(2, 3)
    want = attention(*real, positions, None, None, 1.0, None)
    with FakeTensorMode() as mode:
        got = attention(*[mode.from_tensor(t) for t in real], mode.from_tensor(positions), None, None, 1.0, None)
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    meta = attention(*[t.to("meta") for t in real], positions.to("meta"), None, None, 1.0, None)
    assert meta.shape == want.shape and meta.is_meta


def broken(**changes):
    q, k, v = random_qkv(2, 3)
    args = {
        "q": q, "k": k, "v": v, "positions": torch.arange(3).expand(2, 3),
        "k_cache": torch.zeros(2, 4, 2, 8), "v_cache": torch.zeros(2, 4, 2, 8), "scale": 1.0, "sliding_window": None,
        "sinks": torch.zeros(6),
    }  # fmt: skip
    return list({**args, **changes}.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 3, 8)}, "dimensions"),
        ({"positions": torch.zeros(2, 3, dtype=torch.int32)}, "Pass int64"),
        ({"v": torch.zeros(2, 3, 1, 8)}, "Head shapes do not fit"),
        ({"q": torch.zeros(2, 3, 5, 8)}, "5 query heads cannot be shared by 2"),
        ({"k_cache": None}, "Pass both or neither"),
        ({"k_cache": torch.zeros(2, 4, 2, 8, dtype=torch.bfloat16)}, "Use one dtype"),
        ({"v_cache": torch.zeros(2, 4, 2, 8, device="meta")}, "Use one device"),
        ({"v_cache": torch.zeros(2, 4, 3, 8)}, "A KV cache has shape"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sinks": torch.zeros(2)}, "Pass one floating logit for each of the 6 query heads"),
        ({"sinks": torch.zeros(6, dtype=torch.int64)}, "sinks are torch.int64"),
        ({"sinks": torch.zeros(6, device="meta")}, "Use one device"),
        ({"k": torch.zeros(2, 4, 2, 8), "v": torch.zeros(2, 4, 2, 8)}, "disagree on"),
        ({"k_cache": torch.zeros(1, 4, 2, 8), "v_cache": torch.zeros(1, 4, 2, 8)}, "The batch has 2 rows"),
        ({"positions": torch.arange(3).expand(2, 3) + 2}, "Position 4 lies outside the KV cache of 4 slots"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(changes, message):
    with pytest.raises(ArgumentError, match=message):
        attention(*broken(**changes))
