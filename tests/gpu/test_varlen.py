"""Ragged attention of prompts on a GPU: the kernel's path equals the plain one of the CPU in float64."""

from __future__ import annotations

import pytest
import torch

from graphfuse.ops.varlen import gather_pages, varlen_attention, why_plain
from tests.kernels.paged import paged

pytestmark = pytest.mark.gpu

LENGTHS = [(3, 3), (1, 900), (0, 40), (500, 1200), (0, 0), (257, 257), (64, 65)]  # queries, keys
ONE_EACH = [(1, 1), (1, 77), (1, 300)]


def ragged(heads, kv_heads, size, value_size, dtype, lengths=LENGTHS):
    queries, keys = zip(*lengths, strict=True)
    starts = [torch.tensor([0, *n], device="cuda").cumsum(0).int() for n in (queries, keys)]
    q = torch.randn(sum(queries), heads, size, dtype=dtype, device="cuda")
    k, v = (torch.randn(sum(keys), kv_heads, n, dtype=dtype, device="cuda") for n in (size, value_size))
    return q, k, v, *starts, max(queries), max(keys)


def check(given, window=None, sinks=None, tolerance=2e-2):
    got = varlen_attention(*given, 0.1, window, sinks)
    host = [x.cpu().double() if x.is_floating_point() else x.cpu() for x in given[:5]]
    want = varlen_attention(*host, *given[5:], 0.1, window, None if sinks is None else sinks.cpu().double())
    assert got.is_contiguous()
    torch.testing.assert_close(got.cpu().double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 1, 128])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("lengths", [LENGTHS, ONE_EACH], ids=["ragged", "one each"])
@pytest.mark.parametrize("sizes", [(16, 2, 128, 128), (8, 1, 256, 256), (8, 8, 64, 64), (16, 16, 192, 128)], ids=str)
def test_the_kernel_equals_the_plain_path(window, sinks, lengths, sizes):
    torch.manual_seed(0)
    given = ragged(*sizes, torch.bfloat16, lengths)
    assert why_plain(given[0], given[2]) is None
    check(given, window, torch.linspace(-2, 5, sizes[0], device="cuda") if sinks else None)


def test_what_the_kernel_does_not_take():
    torch.manual_seed(0)
    check(ragged(8, 2, 64, 64, torch.float32), window=100, tolerance=1e-4)
    check(ragged(8, 2, 100, 100, torch.float16), tolerance=1e-2)


def test_pages_are_gathered_in_order():
    lengths = [1, 400, 0, 160, 77]
    where = paged([n - 1 for n in lengths], 16, spare=2, device="cuda")
    cache = where.cache(2, 8, dtype=torch.bfloat16)
    got = gather_pages(cache, where.pages, torch.tensor(lengths, device="cuda"), sum(lengths))
    assert torch.equal(got, torch.cat([cache[page, slot] for page, slot in where.seen(None)]))
