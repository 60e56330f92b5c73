"""Paged decoding on a GPU: real sizes, CUDA graphs, rows independent to the bit, as close to float64 as torch is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graphfuse.kernels.paged_decode import paged_decode
from graphfuse.kernels.paged_latent_decode import paged_latent_decode
from graphfuse.kernels.paged_write import paged_write
from tests.kernels.paged import exact, exact_latent, paged

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 2e-2, FP16: 3e-3, FP32: 2e-5}
HEADS = {  # query heads, key-value heads, size
    "Qwen3-30B-A3B TP2": (16, 2, 128),
    "Llama-3-8B TP2": (16, 4, 128),
    "Qwen3-Next TP2": (8, 1, 256),
    "gpt-oss": (64, 8, 64),
    "one group of 64": (64, 1, 128),
    "no groups": (8, 8, 80),
}
MLA_SIZES = {"DeepSeek-V3 TP2": (64, 512, 64), "TP8": (16, 512, 64), "Mistral Small 4 TP2": (16, 256, 64)}
RAGGED = [0, 63, 64, 127, 128, 1000, 2047, 2048, 5000, 8191, 8192, 20000]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def gqa_inputs(where, heads, kv_heads, size, dtype=BF16, window=None):
    q = torch.randn(len(where.positions), heads, size, dtype=dtype, device="cuda")
    return q, *(where.cache(kv_heads, size, dtype=dtype, window=window) for _ in range(2))


def latent_inputs(where, heads, rank, rope, dtype=BF16):
    rows = len(where.positions)
    queries = [torch.randn(rows, heads, n, dtype=dtype, device="cuda") for n in (rank, rope)]
    return *queries, *(where.cache(n, dtype=dtype) for n in (rank, rope))


@pytest.mark.parametrize("name", [*HEADS])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_ragged_rows_equal_float64(name, page_size, dtype):
    where = paged(RAGGED, page_size, spare=5, device="cuda")
    given, size = gqa_inputs(where, *HEADS[name], dtype), HEADS[name][2]
    got = paged_decode(*given, where.pages, where.positions, size**-0.5)
    want = exact(*given, where, size**-0.5)
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", [*MLA_SIZES])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_ragged_rows_of_latents_equal_float64(name, page_size, dtype):
    where = paged(RAGGED, page_size, spare=5, device="cuda")
    given = latent_inputs(where, *MLA_SIZES[name], dtype)
    got = paged_latent_decode(*given, where.pages, where.positions, 192**-0.5)
    want = exact_latent(*given, where, 192**-0.5)
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [1, 128, 1000, 4096])
@pytest.mark.parametrize("page_size", [16, 64])
def test_windows_and_sinks(window, page_size):
    where = paged(RAGGED, page_size, device="cuda")
    given = gqa_inputs(where, 64, 8, 64, window=window)
    sinks = torch.linspace(-3, 3, 64, dtype=BF16, device="cuda")
    got = paged_decode(*given, where.pages, where.positions, 0.125, window, sinks)
    want = exact(*given, where, 0.125, window, sinks)
    torch.testing.assert_close(got.double(), want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B TP2", "Llama-3-8B TP2", "Qwen3-Next TP2"])
def test_as_close_to_float64_as_torchs_own_attention(name):
    heads, kv_heads, size = HEADS[name]
    where = paged([1023] * 8, 64, device="cuda")
    q, k, v = gqa_inputs(where, heads, kv_heads, size)
    got = paged_decode(q, k, v, where.pages, where.positions, size**-0.5)
    rows = [torch.stack([cache[page, slot] for page, slot in where.seen(None)]).transpose(1, 2) for cache in (k, v)]
    theirs = F.scaled_dot_product_attention(q[:, :, None], *rows, enable_gqa=True)[:, :, 0]
    truth = exact(q, k, v, where, size**-0.5)
    ours_off, theirs_off = (got.double() - truth).norm(), (theirs.double() - truth).norm()
    rounding = (truth.to(BF16).double() - truth).norm()  # of the result alone; weights are rounded too
    assert ours_off <= max(1.2 * theirs_off, 1.6 * rounding), (ours_off, theirs_off, rounding)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("page_size", [16, 64])
def test_a_row_is_the_same_to_the_bit_whatever_stands_around_it(window, page_size):
    lengths = [1, 65, 700, 2048, 2049, 9000] + [17 * n for n in range(1, 123)]
    where = paged([n - 1 for n in lengths], page_size, spare=40, device="cuda")
    q, k, v = gqa_inputs(where, 16, 2, 128, window=window)
    together = paged_decode(q, k, v, where.pages, where.positions, 0.1, window)
    assert torch.equal(together, paged_decode(q, k, v, where.pages, where.positions, 0.1, window))
    for rows in ([0], [3], [5], [40, 5], [*range(3, 20)], [*range(127, -1, -1)]):
        width = max(int(where.positions[r]) // page_size + 1 for r in rows)
        pages, positions = where.pages[rows, :width].contiguous(), where.positions[rows]
        got = paged_decode(q[rows], k, v, pages, positions, 0.1, window)
        assert torch.equal(got, together[rows]), rows


@pytest.mark.parametrize("rows", [1, 8, 100, 200])
def test_a_row_of_latents_depends_on_neither_the_others_nor_the_width_of_the_table(rows):
    where = paged([n - 1 for n in (700, 65, 2049)], 64, spare=30, device="cuda")
    given = latent_inputs(where, 64, 512, 64)
    seen = []
    for at, width in ((0, where.pages.shape[1]), (0, 11), (1, 20)):
        row = torch.full((rows,), 1, device="cuda")
        row[at % rows] = 0  # the row that is looked at
        pages, positions = where.pages[row, :width].contiguous(), where.positions[row]
        queries = [x[row] for x in given[:2]]
        seen.append(paged_latent_decode(*queries, *given[2:], pages, positions, 0.1)[at % rows])
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


def replays_as_all_of_it_changes(decode, queries, caches, where):
    """Captured once, replayed as queries, pages and positions change; equal to plain calls, to the bit."""
    pages, positions = where.pages.clamp(max=where.num_pages - 1), where.positions.clone()
    decode(*queries, *caches, pages, positions, 0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(*queries, *caches, pages, positions, 0.1)
    for step in range(4):
        for q in queries:
            q.normal_()
        positions.copy_(where.positions - step * 37).clamp_(min=0)
        pages.copy_(pages.roll(1, 1))
        graph.replay()
        assert out.isfinite().all()
        assert torch.equal(out, decode(*queries, *caches, pages, positions, 0.1))


@pytest.mark.parametrize("rows", [1, 7, 130])
def test_a_cuda_graph_replays_as_pages_and_positions_change(rows):
    where = paged([(97 * r + 300) % 3000 for r in range(rows)], 64, device="cuda")
    caches = [torch.randn(where.num_pages, 64, 2, 128, dtype=BF16, device="cuda") for _ in range(2)]
    queries = [torch.randn(rows, 16, 128, dtype=BF16, device="cuda")]
    replays_as_all_of_it_changes(paged_decode, queries, caches, where)


@pytest.mark.parametrize("rows", [1, 7, 130])
def test_a_cuda_graph_of_latents_replays_as_pages_and_positions_change(rows):
    where = paged([(97 * r + 300) % 3000 for r in range(rows)], 64, device="cuda")
    caches = [torch.randn(where.num_pages, 64, n, dtype=BF16, device="cuda") for n in (512, 64)]
    queries = [torch.randn(rows, 64, n, dtype=BF16, device="cuda") for n in (512, 64)]
    replays_as_all_of_it_changes(paged_latent_decode, queries, caches, where)


def test_kernels_in_a_row_wait_for_each_others_results():
    """Each launch may begin before the one before it ends: queries made by the one before are seen whole."""
    where = paged([900] * 64, 64, device="cuda")
    q, k, v = gqa_inputs(where, 16, 2, 128)
    want = q
    for _ in range(20):
        want = paged_decode(want, k, v, where.pages, where.positions, 1.0)
        torch.cuda.synchronize()
    for _ in range(5):
        got = q
        for _ in range(20):
            got = paged_decode(got, k, v, where.pages, where.positions, 1.0)
        assert torch.equal(got, want)


def test_caches_of_more_than_two_to_the_31_numbers():
    num_pages, heads = (1 << 31) // (64 * 2 * 128) + 100, (16, 2, 128)
    caches = [torch.empty(num_pages, 64, *heads[1:], dtype=BF16, device="cuda") for _ in range(2)]
    where = paged([500, 64], 64, device="cuda")
    where.pages.clamp_(max=where.num_pages - 1).add_(num_pages - where.num_pages)
    where.num_pages = num_pages
    for cache in caches:
        cache[where.pages.flatten()] = torch.randn(where.pages.numel(), 64, *heads[1:], device="cuda").to(BF16)
    q = torch.randn(2, 16, 128, dtype=BF16, device="cuda")
    got = paged_decode(q, *caches, where.pages, where.positions, 0.1)
    torch.testing.assert_close(got.double(), exact(q, *caches, where, 0.1), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("tokens", [1, 128, 8192])
@pytest.mark.parametrize(("a_shape", "b_shape"), [((4, 128), (4, 128)), ((512,), (64,)), ((8, 80), (8, 80))])
def test_rows_are_written_to_their_entries(tokens, a_shape, b_shape):
    entries = torch.randperm(1000 * 16, device="cuda")[:tokens]
    a = torch.randn(tokens, 3, *a_shape, device="cuda").bfloat16()[:, 1]
    b = torch.randn(tokens, *b_shape, device="cuda").bfloat16()
    caches = [a.new_zeros(1000, 16, *shape) for shape in (a_shape, b_shape)]
    wanted = [cache.clone() for cache in caches]
    for want, x in zip(wanted, (a, b), strict=True):
        want.flatten(0, 1)[entries] = x
    paged_write(a, b, entries, *caches)
    assert all(torch.equal(cache, want) for cache, want in zip(caches, wanted, strict=True))
