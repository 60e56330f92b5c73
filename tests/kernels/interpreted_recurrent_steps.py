"""Single steps of recurrent mixers, run by `test_interpreted.py` in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from graphfuse.kernels.causal_conv_step import causal_conv_step
from graphfuse.kernels.gated_delta_step import gated_delta_step
from graphfuse.ops.causal_conv import causal_conv
from graphfuse.ops.gated_delta import _EPS, gated_delta

STATES, POSITIONS = torch.tensor([3, 1, 4]), torch.tensor([7, 0, 1])
SPANS = torch.tensor([[1, 7], [1, 0], [1, 1]])


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def caches(*shape, dtype=torch.float32):
    """Twice the same; what belongs to a text that starts anew is not finite."""
    cache = normal(6, *shape, seed=9, dtype=dtype)
    cache[STATES[1]] = float("nan")
    return cache, cache.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("key_heads", "heads", "key_size", "value_size"), [(1, 1, 8, 8), (2, 4, 16, 24), (2, 6, 20, 5), (1, 2, 128, 128)]
)
def test_a_step_of_the_delta_rule(dtype, key_heads, heads, key_size, value_size):
    mixed = normal(3, 2 * key_heads * key_size + heads * value_size, dtype=dtype)  # as the projection has it: in a row
    q, k, v = mixed.split([key_heads * key_size, key_heads * key_size, heads * value_size], dim=1)
    q, k, v = q.view(3, key_heads, -1), k.view(3, key_heads, -1), v.view(3, heads, -1)
    g, beta = -normal(3, heads, seed=1).exp(), normal(3, heads, seed=2, dtype=dtype).sigmoid()
    cache, expected_cache = caches(heads, key_size, value_size)
    want = gated_delta(
        q[None], k[None], v[None], g[None], beta[None], POSITIONS[None], None, expected_cache, STATES, SPANS
    )[0]  # fmt: skip
    got = gated_delta_step(q, k, v, g, beta, POSITIONS, STATES, cache, _EPS)
    assert got.dtype == dtype and got.is_contiguous()
    torch.testing.assert_close(got, want, atol=1e-5, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5)
    torch.testing.assert_close(cache, expected_cache, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("channels", "taps"), [(1, 2), (6, 4), (300, 4), (256, 3)])
def test_a_step_of_the_convolution(dtype, channels, taps):
    x, weight = normal(3, channels + 5, dtype=dtype)[:, :channels], normal(channels, taps, seed=1, dtype=dtype)
    cache, expected_cache = caches(channels, taps - 1, dtype=dtype)
    want = causal_conv(x[None], weight, POSITIONS[None], None, expected_cache, STATES, SPANS)[0]
    got = causal_conv_step(x, weight, POSITIONS, STATES, cache)
    assert got.dtype == dtype and got.is_contiguous()
    torch.testing.assert_close(got, want, atol=1e-6, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(cache, expected_cache)
