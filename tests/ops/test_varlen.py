"""Ragged attention of prompts against float64, one query after the other; the kernel's path with a stand-in for it."""

from __future__ import annotations

import math

import pytest
import torch

from graphfuse.errors import ArgumentError
from graphfuse.ops import varlen
from graphfuse.ops.layout import Span, starts_of
from graphfuse.ops.varlen import gather_pages, gather_slots, page_slots, slots_of_step, varlen_attention, why_plain
from tests.kernels.paged import NOWHERE, paged

LENGTHS = [(3, 3), (1, 9), (0, 4), (5, 12), (0, 0), (7, 7)]  # queries, keys


def ragged(heads=4, kv_heads=2, size=8, value_size=None, dtype=torch.float32, lengths=LENGTHS):
    """(q, k, v, query_starts, key_starts, max_query, max_key)"""
    queries, keys = zip(*lengths, strict=True)
    starts = [torch.tensor([0, *n]).cumsum(0).int() for n in (queries, keys)]
    q = torch.randn(sum(queries), heads, size).to(dtype)
    k, v = (torch.randn(sum(keys), kv_heads, n).to(dtype) for n in (size, value_size or size))
    return q, k, v, *starts, max(queries), max(keys)


def exact(q, k, v, query_starts, key_starts, max_query, max_key, scale, window=None, sinks=None, with_lse=False):
    """`[T, Hq, Dv]` float64; with_lse: and `[Hq, T]`, of the scores without sinks."""
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    lse = torch.zeros(q.shape[1], len(q), dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    pairs = [torch.stack([s[:-1], s[1:]], 1).tolist() for s in (query_starts, key_starts)]
    for (q0, q1), (k0, k1) in zip(*pairs, strict=True):
        for at in range(q0, q1):
            end = k1 - (q1 - 1 - at)
            start = k0 if window is None else max(k0, end - window)
            for h in range(q.shape[1]):
                scores = scale * (k[start:end, h // group].double() @ q[at, h].double())
                lse[h, at] = scores.logsumexp(0)
                total = scores.exp().sum() + (0.0 if sinks is None else math.exp(float(sinks[h])))
                out[at, h] = scores.exp() / total @ v[start:end, h // group].double()
    return (out, lse) if with_lse else out


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (5, 1)])
@pytest.mark.parametrize("sinks", [False, True])
def test_each_query_sees_the_keys_up_to_its_own(window, heads, kv_heads, sinks):
    given = ragged(heads, kv_heads)
    sink = torch.linspace(-2, 2, heads) if sinks else None
    got = varlen_attention(*given, 0.3, window, sink)
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), exact(*given, 0.3, window, sink), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("value_size", [4, 16])
def test_values_of_another_size_than_keys(value_size):
    given = ragged(value_size=value_size)
    torch.testing.assert_close(varlen_attention(*given, 0.3).double(), exact(*given, 0.3), atol=1e-5, rtol=1e-5)


def test_sinks_with_values_smaller_than_keys_but_not_larger():
    sinks = torch.linspace(-2, 2, 4)
    given = ragged(value_size=4)
    want = exact(*given, 0.3, None, sinks)
    torch.testing.assert_close(varlen_attention(*given, 0.3, None, sinks).double(), want, atol=1e-5, rtol=1e-5)
    with pytest.raises(ArgumentError, match="at most that size"):
        varlen_attention(*ragged(value_size=16), 0.3, None, sinks)


def test_no_queries_at_all():
    given = ragged(lengths=[(0, 4), (0, 0)])
    assert varlen_attention(*given, 0.3).shape == (0, 4, 8)


def test_what_belongs_to_other_sequences_is_not_seen():
    q, k, v, *rest = ragged()
    want = varlen_attention(q, k, v, *rest, 0.3)
    k[3:12], v[3:12] = torch.nan, torch.nan  # the second sequence's
    got = varlen_attention(q, k, v, *rest, 0.3)
    assert got[3].isnan().all()
    assert torch.equal(torch.cat([got[:3], got[4:]]), torch.cat([want[:3], want[4:]]))


class Flash:
    """In the place of torch's function, as its 2.11 or its later form; notes what it is called with."""

    def __init__(self, monkeypatch, enable_gqa: bool):
        self.calls: list[dict] = []
        import torch.nn.attention.varlen as module

        def old(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
            left, right = window_size
            assert right == 0 and q.shape[2] == k.shape[2] == v.shape[2]
            self.calls.append({"window": left})
            window = None if left < 0 else left + 1
            out, lse = exact(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, scale, window, with_lse=True)
            out = out.to(q.dtype)
            return out if return_aux is None else (out, lse.float())

        def new(
            q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
            enable_gqa=False,
        ):  # fmt: skip
            assert enable_gqa or q.shape[1] == k.shape[1]
            return old(
                q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, return_aux=return_aux, scale=scale, window_size=window_size
            )

        monkeypatch.setattr(module, "varlen_attn", new if enable_gqa else old)
        monkeypatch.setattr(varlen, "why_plain", lambda q, v: None)
        varlen._has_enable_gqa.cache_clear()


@pytest.fixture(params=[False, True], ids=["torch 2.11", "later torch"])
def flash(request, monkeypatch):
    yield Flash(monkeypatch, request.param)
    varlen._has_enable_gqa.cache_clear()


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("kv_heads", "value_size"), [(4, 8), (2, 8), (2, 4)])
def test_the_kernel_is_told_the_window_and_its_result_given_sinks(flash, window, sinks, kv_heads, value_size):
    given = ragged(4, kv_heads, value_size=value_size)
    sink = torch.linspace(-2, 2, 4) if sinks else None
    got = varlen_attention(*given, 0.3, window, sink)
    torch.testing.assert_close(got.double(), exact(*given, 0.3, window, sink), atol=1e-5, rtol=1e-5)
    assert got.is_contiguous() and flash.calls == [{"window": -1 if window is None else window - 1}]


def test_sinks_of_any_size_behind_the_kernel(flash):
    given = ragged(dtype=torch.bfloat16)
    assert (varlen_attention(*given, 0.3, None, torch.full((4,), 1e4)) == 0).all()
    plain = varlen_attention(*given, 0.3)
    assert torch.equal(varlen_attention(*given, 0.3, None, torch.full((4,), -1e4)), plain)


def test_torch_has_the_parameters_that_the_kernel_path_names():
    import inspect

    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    assert {"return_aux", "scale", "window_size"} <= set(inspect.signature(varlen_attn).parameters)
    assert AuxRequest(lse=True).lse


def test_the_cpu_takes_the_plain_path_and_says_why():
    q, _, v, *_ = ragged(dtype=torch.bfloat16)
    assert "CUDA" in str(why_plain(q, v))


@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("total", [False, True])
def test_pages_are_gathered_in_order(page_size, total):
    lengths = [1, 40, 0, 16, 7]
    where = paged([n - 1 for n in lengths], page_size, spare=2)
    where.pages[2] = NOWHERE
    cache = where.cache(2, 3, dtype=torch.float32)
    counts = torch.tensor(lengths)
    got = gather_pages(cache, where.pages, counts, sum(lengths) if total else None)
    want = torch.cat([cache[page, slot] for page, slot in where.seen(None)])
    assert torch.equal(got, want) and got.isfinite().all()
    slots = page_slots(where.pages, counts, page_size)
    assert torch.equal(gather_slots(cache[..., 0], slots), want[..., 0])
    assert gather_pages(cache, where.pages[:0], counts[:0]).shape == (0, 2, 3)


def test_the_layers_of_a_step_share_slots_and_other_steps_have_their_own():
    pages = torch.tensor([[9, 9], [1, 2], [3, 4]])
    starts = starts_of((Span(1, 1, 3, 2), Span(2, 4, 2, 4)), pages.device)
    slots = slots_of_step(pages, 1, starts, 4)
    assert slots.tolist() == [4, 5, 6, 7, 8, 12, 13, 14, 15, 16, 17]
    assert slots_of_step(pages, 1, starts, 4) is slots
    assert torch.equal(slots_of_step(pages.clone(), 1, starts, 4), slots)
    pages[1, 0] = 5  # the same tensor for the next step
    assert slots_of_step(pages, 1, starts, 4).tolist()[:4] == [20, 21, 22, 23]
    assert slots_of_step(pages, 1, starts, 8).tolist()[:4] == [40, 41, 42, 43]
    longer = starts_of((Span(1, 1, 3, 3), Span(2, 4, 2, 4)), pages.device)
    assert len(slots_of_step(pages, 1, longer, 4)) == 12
    with torch.inference_mode():
        unseen = torch.tensor([[9, 9], [1, 2], [3, 4]])
        first = slots_of_step(unseen, 1, starts, 4)
        unseen[1, 0] = 5
        assert first[0] == 4 and slots_of_step(unseen, 1, starts, 4)[0] == 20
