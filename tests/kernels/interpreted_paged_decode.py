"""The cases of paged decoding, run by `test_paged_decode.py` in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from graphfuse.errors import ArgumentError
from graphfuse.kernels import paged_decode as module
from graphfuse.kernels.paged_decode import paged_decode
from graphfuse.kernels.paged_split import MOST_SPLITS, most_splits, split_tokens
from graphfuse.kernels.paged_write import paged_write
from tests.kernels.interpreter_as_gpus import arithmetic_of_gpus
from tests.kernels.paged import exact, paged

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 2e-2, FP16: 3e-3, FP32: 3e-6}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def arithmetic_and_memory_of_gpus():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills memory that nobody wrote with NaN
    with arithmetic_of_gpus():
        yield


def check(where, heads=4, kv_heads=2, size=16, value_size=None, dtype=FP32, window=None, sinks=None):
    value_size = value_size or size
    q = torch.randn(len(where.positions), heads, size).to(dtype)
    k = where.cache(kv_heads, size, dtype=dtype, window=window)
    v = where.cache(kv_heads, value_size, dtype=dtype, window=window)
    got = paged_decode(q, k, v, where.pages, where.positions, size**-0.5, window, sinks)
    assert (got.dtype, got.shape, got.is_contiguous()) == (dtype, (len(q), heads, value_size), True)
    want = exact(q, k, v, where, size**-0.5, window, sinks)
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    return got, want


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("page_size", [8, slow(16), slow(64), 256])
def test_ragged_rows_in_every_dtype_and_page_size(dtype, page_size):
    check(paged([0, 5, 63, 64, 200, 401], page_size, spare=2), dtype=dtype, size=32)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1), (5, 1), (16, 2), (20, 1), slow(70, 1)])
def test_every_size_of_a_group_of_heads(heads, kv_heads):
    check(paged([130, 7], 16), heads, kv_heads)


@pytest.mark.parametrize(("size", "value_size"), [(16, 16), (24, 24), (80, 80), (192, 128), (32, 200), (256, 256)])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_every_head_size(size, value_size, dtype):
    check(paged([70, 150], 32), 2, 1, size, value_size, dtype=dtype)


# Ends of splits of 128, 256 and 512 tokens, and where their size changes.
@pytest.mark.parametrize("length", [1, 127, 128, 129, 256, 257, 2047, 2048, 2049, 2305, 8192, 8193])
def test_lengths_at_the_ends_of_splits(length):
    check(paged([length - 1], 128), 1, 1)


@pytest.mark.parametrize("window", [1, 63, 128, 129, 200, 5000])
@pytest.mark.parametrize("page_size", [slow(8), 64, 256])
def test_windows_wherever_they_begin(window, page_size):
    check(paged([0, 62, 127, 128, 300, 517], page_size, spare=1), 2, 1, window=window)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_sinks_take_their_share(window, dtype):
    sinks = torch.linspace(-3, 3, 8).to(dtype)
    where = paged([0, 12, 300], 16)
    _, want = check(where, 8, 2, dtype=dtype, window=window, sinks=sinks)
    assert (want[0].abs().amax(-1).diff() != 0).all()


def test_sinks_of_any_size_neither_overflow_nor_vanish():
    where = paged([200, 3], 16)
    got, _ = check(where, sinks=torch.full((4,), 1e4))
    assert (got == 0).all()
    check(where, sinks=torch.full((4,), -1e4))
    check(where, sinks=torch.full((4,), -torch.inf))


def test_rows_may_share_pages():
    check(paged([200, 200, 90, 33], 16, shared=4))


def test_large_scores_do_not_overflow():
    where = paged([140, 300], 16)
    q, k, v = torch.randn(2, 2, 16) * 300, where.cache(1, 16, dtype=FP32), where.cache(1, 16, dtype=FP32)
    got = paged_decode(q, k, v, where.pages, where.positions, 1.0)
    torch.testing.assert_close(got.double(), exact(q, k, v, where, 1.0), atol=1e-3, rtol=1e-3)


def test_a_row_before_its_first_token_is_zeros_and_reads_nothing():
    where = paged([-1, 20], 16)
    where.pages[0] = 1 << 40
    for sinks in (None, torch.zeros(4)):
        got, _ = check(where, sinks=sinks)
        assert (got[0] == 0).all()
    assert paged_decode(got[:0], *[where.cache(2, 16, dtype=FP32)] * 2, where.pages[:0], where.positions[:0], 1.0).shape


def test_what_is_not_finite_shows_in_its_own_row_only():
    where = paged([200, 300], 16)
    q, k, v = torch.randn(2, 4, 16), where.cache(2, 16, dtype=FP32), where.cache(2, 16, dtype=FP32)
    clean = paged_decode(q, k, v, where.pages, where.positions, 0.25)
    q[0] = torch.nan
    got = paged_decode(q, k, v, where.pages, where.positions, 0.25)
    assert got[0].isnan().all() and torch.equal(got[1], clean[1])
    q[0], v[where.pages[0, 3], 2] = 1.0, torch.inf
    got = paged_decode(q, k, v, where.pages, where.positions, 0.25)
    assert not got[0].isfinite().any() and torch.equal(got[1], clean[1])


@pytest.mark.parametrize("window", [None, slow(300)])
def test_a_row_is_the_same_to_the_bit_whatever_stands_around_it(window, monkeypatch):
    where = paged([2100, 130, 5, 700], 64, spare=7)
    q = torch.randn(4, 2, 16).bfloat16()
    k, v = (where.cache(1, 16, dtype=BF16, window=window) for _ in range(2))
    seen = []
    for multiprocessors in (1, 3, 132):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device, found=multiprocessors: found)
        together = paged_decode(q, k, v, where.pages, where.positions, 0.25, window)
        for r in range(4):
            width = int(where.positions[r]) // 64 + 1
            alone = paged_decode(
                q[r : r + 1], k, v, where.pages[r : r + 1, :width], where.positions[r : r + 1], 0.25, window
            )
            assert torch.equal(alone[0], together[r])
        seen.append(together)
    assert all(torch.equal(seen[0], other) for other in seen)


def test_views_are_read_and_written_where_they_lie():
    where = paged([40, 150], 16)
    k, v = torch.stack([where.cache(2, 16, dtype=FP32) for _ in range(2)], 2).unbind(2)  # one cache of both
    assert not k.is_contiguous()
    wide = torch.randn(2, 4, 48)
    q, pages = wide[..., 16:32], torch.stack([where.pages, where.pages], 2)[..., 0]
    out = torch.zeros(2, 6, 20)
    got = paged_decode(q, k, v, pages, where.positions, 0.25, out=out[:, 1:5, 2:18])
    assert got.data_ptr() == out[:, 1:5, 2:18].data_ptr()
    want = paged_decode(q.contiguous(), k.contiguous(), v.contiguous(), where.pages, where.positions, 0.25)
    assert torch.equal(got, want)
    got.zero_()
    assert (out == 0).all(), "nothing beside it is written"


@triton.jit
def _rule(out_ptr, max_splits, BLOCK: tl.constexpr):
    span = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tokens = split_tokens(span, max_splits)
    tl.store(out_ptr + span, tl.where(tokens % 128 == 0, tl.cdiv(span, tokens), -1))


@pytest.mark.parametrize("max_splits", [1, 3, 16, MOST_SPLITS])
def test_no_row_has_more_splits_than_there_is_room_for(max_splits):
    splits = torch.empty(1 << 18, dtype=torch.int32)
    _rule[(8,)](splits, max_splits, BLOCK=1 << 15)
    assert (splits[1:] >= 1).all() and (splits <= max_splits).all()
    most = splits.cummax(0).values
    for capacity in [*range(1, 40), *range(40, 1 << 18, 129), 2048, 2049, 8192, 8193, (1 << 18) - 1]:
        assert most[capacity] <= most_splits(capacity, max_splits)


@pytest.mark.parametrize("size", [8, 257])
def test_head_sizes_that_are_not_served_are_refused(size):
    where = paged([3], 16)
    k = where.cache(1, size, dtype=FP32)
    with pytest.raises(ArgumentError, match="16 to 256"):
        paged_decode(torch.zeros(1, 1, size), k, k, where.pages, where.positions, 1.0)


def test_caches_that_cannot_be_read_are_refused():
    q, pages, positions = torch.zeros(1, 1, 16), torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for page_size in (4, 24):
        k = torch.zeros(1, page_size, 1, 16)
        with pytest.raises(ArgumentError, match="power of two"):
            paged_decode(q, k, k, pages, positions, 1.0)
    k = torch.zeros(1, 16, 16, 2).transpose(2, 3)
    with pytest.raises(ArgumentError, match="adjacent"):
        paged_decode(q, k, k, pages, positions, 1.0)


@pytest.mark.parametrize(
    ("a_shape", "b_shape"), [((2, 16), (2, 16)), ((3, 80), (1, 7)), ((512,), (64,)), ((2100,), (1,))]
)
def test_rows_are_written_to_their_entries_and_nowhere_else(a_shape, b_shape):
    entries = torch.tensor([17, 3, 40])
    wide = torch.randn(3, 2, *a_shape).bfloat16()
    a, b = wide[:, 1], torch.randn(*b_shape, 3).movedim(-1, 0)  # rows apart, and columns apart
    caches = [torch.zeros(3, 16, *shape, dtype=x.dtype) for shape, x in ((a_shape, a), (b_shape, b))]
    wanted = [cache.clone() for cache in caches]
    for want, x in zip(wanted, (a, b), strict=True):
        want.flatten(0, 1)[entries] = x
    paged_write(a, b, entries, *caches)
    assert all(torch.equal(cache, want) for cache, want in zip(caches, wanted, strict=True))
    paged_write(a[:0], b[:0], entries[:0], *caches)
    paged_write(a, b, torch.tensor([48, -1, 1 << 40]), *caches)  # nobody's: left out
    assert all(torch.equal(cache, want) for cache, want in zip(caches, wanted, strict=True))
