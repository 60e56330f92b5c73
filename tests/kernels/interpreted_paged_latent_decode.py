"""The cases of paged decoding of latents, run by `test_paged_decode.py` in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from graphfuse.errors import ArgumentError
from graphfuse.kernels import paged_latent_decode as module
from graphfuse.kernels.paged_latent_decode import paged_latent_decode
from tests.kernels.interpreter_as_gpus import arithmetic_of_gpus
from tests.kernels.paged import exact_latent, paged

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 2e-2, FP16: 3e-3, FP32: 3e-6}


@pytest.fixture(autouse=True)
def arithmetic_and_memory_of_gpus():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills memory that nobody wrote with NaN
    with arithmetic_of_gpus():
        yield


def inputs(where, heads=4, rank=32, rope=16, dtype=FP32):
    rows = len(where.positions)
    queries = [torch.randn(rows, heads, size).to(dtype) for size in (rank, rope)]
    return *queries, *(where.cache(size, dtype=dtype) for size in (rank, rope))


def check(where, heads=4, rank=32, rope=16, dtype=FP32):
    given, scale = inputs(where, heads, rank, rope, dtype), (rank + rope) ** -0.5
    got = paged_latent_decode(*given, where.pages, where.positions, scale)
    assert (got.dtype, got.shape, got.is_contiguous()) == (dtype, given[0].shape, True)
    want = exact_latent(*given, where, scale)
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("page_size", [8, 16, 64, 256])
def test_ragged_rows_in_every_dtype_and_page_size(dtype, page_size):
    check(paged([0, 5, 63, 64, 200, 401], page_size, spare=2), dtype=dtype)


@pytest.mark.parametrize("heads", [1, 4, 16, 20, 64, 100])
def test_every_number_of_heads(heads):
    check(paged([130, 7], 16), heads, dtype=BF16)


@pytest.mark.parametrize(("rank", "rope"), [(16, 16), (48, 24), (256, 64), (512, 64), (32, 128)])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_every_size(rank, rope, dtype):
    check(paged([70, 150], 32), 2, rank, rope, dtype)


@pytest.mark.parametrize("multiprocessors", [1, 5, 132])
@pytest.mark.parametrize("length", [1, 128, 129, 2049, 8193])
def test_lengths_at_the_ends_of_splits(length, multiprocessors, monkeypatch):
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: multiprocessors)
    check(paged([length - 1], 128), 1, 16, 16, BF16)


def test_rows_may_share_pages():
    check(paged([200, 200, 90, 33], 16, shared=4))


def test_a_row_before_its_first_token_is_zeros_and_reads_nothing():
    where = paged([-1, 20], 16)
    where.pages[0] = 1 << 40
    given = inputs(where)
    got = paged_latent_decode(*given, where.pages, where.positions, 0.1)
    assert (got[0] == 0).all() and got[1].isfinite().all()


def test_what_is_not_finite_shows_in_its_own_row_only():
    where = paged([200, 300], 16)
    given = inputs(where)
    clean = paged_latent_decode(*given, where.pages, where.positions, 0.1)
    for query in given[:2]:
        kept = query.clone()
        query[0] = torch.nan
        got = paged_latent_decode(*given, where.pages, where.positions, 0.1)
        assert got[0].isnan().all() and torch.equal(got[1], clean[1])
        query.copy_(kept)


@pytest.mark.parametrize("multiprocessors", [1, 9, 132])
def test_a_row_depends_on_neither_the_others_nor_the_width_of_the_table(multiprocessors, monkeypatch):
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: multiprocessors)
    where = paged([2100, 130], 64, spare=7)
    given = inputs(where, dtype=BF16)
    want = paged_latent_decode(*given, where.pages, where.positions, 0.1)
    for r, position in enumerate(where.positions.tolist()):
        pages, positions = where.pages[[r] * 2], where.positions[[r] * 2]
        queries = [x[[r] * 2] for x in given[:2]]
        got = paged_latent_decode(*queries, *given[2:], pages[:, : position // 64 + 1], positions, 0.1)
        assert all(torch.equal(each, want[r]) for each in got)


def test_views_are_read_and_written_where_they_lie():
    where = paged([40, 150], 16)
    q_latent, q_rope, latent, k_rope = inputs(where)
    want = paged_latent_decode(q_latent, q_rope, latent, k_rope, where.pages, where.positions, 0.1)
    q, cache = torch.cat([q_latent, q_rope], -1), torch.cat([latent, k_rope], -1)
    out = torch.zeros(2, 4, 40)
    parts = q[..., :32], q[..., 32:], cache[..., :32], cache[..., 32:]
    got = paged_latent_decode(*parts, where.pages, where.positions, 0.1, out=out[..., 3:35])
    assert torch.equal(got, want)
    assert got.data_ptr() == out[..., 3:35].data_ptr() and (out[..., :3] == 0).all() and (out[..., 35:] == 0).all()


def test_sizes_that_are_not_served_are_refused():
    where = paged([3], 16)
    for rank, rope in ((8, 64), (1024, 64), (512, 8), (512, 256)):
        with pytest.raises(ArgumentError, match="not served"):
            paged_latent_decode(*inputs(where, 1, rank, rope), where.pages, where.positions, 1.0)
