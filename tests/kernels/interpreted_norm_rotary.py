"""Norm and rotation of queries and keys, run by `test_interpreted.py` in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from graphfuse.kernels.norm_rotary import norm_rotary
from models.layers import rotate

EPS = 1e-6


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(num_tokens, q_heads, kv_heads, size, rotated, dtype):
    """As a model has them: q and k lie in one product, cos and sin in the model's dtype."""
    qkv = normal(num_tokens, q_heads + 2 * kv_heads, size, dtype=dtype)
    q, k, _ = qkv.split([q_heads, kv_heads, kv_heads], dim=1)
    angles = normal(num_tokens, rotated, seed=1)
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


def llama_norm(x, weight):
    f = x.float()
    f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * f.to(x.dtype)


def zero_centred_norm(x, weight):
    f = x.float()
    f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + EPS)
    return (f * (1.0 + weight.float())).to(x.dtype)


NORMS = {"llama": (llama_norm, 0.0, True), "zero-centred": (zero_centred_norm, 1.0, False)}
"""A norm, and what the kernel is told of it: weight_bias, cast_before_weight."""
SHAPES = [(3, 4, 2, 16, 16), (2, 3, 1, 80, 80), (2, 5, 5, 96, 32), (3, 2, 2, 24, 10), (1, 20, 2, 256, 64)]


TOLERANCE = {torch.float32: (0, 0), torch.float16: (0, 0), torch.bfloat16: (0.05, 0.02)}
"""Absolute and relative: the interpreter truncates to bfloat16 where GPUs round. There it is exact, too."""


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_rotation_is_the_eager_one_bit_for_bit(shape, dtype):
    q, k, cos, sin = inputs(*shape, dtype)
    atol, rtol = TOLERANCE[dtype]
    got = norm_rotary(q, k, cos, sin, None, None, 0.0, 0.0, True)
    for x, rotated in zip((q, k), got, strict=True):
        assert rotated.is_contiguous()
        torch.testing.assert_close(rotated, rotate(x, cos[:, None], sin[:, None]), atol=atol, rtol=rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_comes_first(norm, shape, dtype):
    q, k, cos, sin = inputs(*shape, dtype)
    function, weight_bias, cast_before_weight = NORMS[norm]
    weights = [normal(shape[3], seed=seed, dtype=dtype) for seed in (2, 3)]
    got = norm_rotary(q, k, cos, sin, *weights, EPS, weight_bias, cast_before_weight)
    atol, rtol = (0.1, 0.02) if dtype == torch.bfloat16 else (1e-5, 1e-5)
    for x, weight, rotated in zip((q, k), weights, got, strict=True):
        want = rotate(function(x, weight), cos[:, None], sin[:, None])
        torch.testing.assert_close(rotated, want, atol=atol, rtol=rtol)


def test_the_normalised_value_is_rounded_before_the_weight_only_where_it_is_to_be():
    q, k, cos, sin = inputs(*SHAPES[0], torch.float16)
    weights = [normal(16, seed=seed, dtype=torch.float16) for seed in (2, 3)]
    early, late = (norm_rotary(q, k, cos, sin, *weights, EPS, 0.0, cast)[0] for cast in (True, False))
    want = rotate(llama_norm(q, weights[0]), cos[:, None], sin[:, None])
    assert (early != want).float().mean() < 0.05  # squares are added in another order
    assert (late != want).float().mean() > 0.05


def test_rows_with_a_stride_of_their_own_and_columns_apart():
    q, _, cos, sin = inputs(3, 4, 2, 16, 16, torch.float16)
    apart = normal(3, 16, 4, dtype=torch.float16).transpose(1, 2)  # columns lie four apart
    every_other = q[:, ::2]
    q_got, k_got = norm_rotary(apart, every_other, cos, sin, None, None, 0.0, 0.0, True)
    assert torch.equal(q_got, rotate(apart, cos[:, None], sin[:, None]))
    assert torch.equal(k_got, rotate(every_other, cos[:, None], sin[:, None]))


def test_no_tokens():
    q, k, cos, sin = inputs(0, 4, 2, 16, 16, torch.bfloat16)
    q_got, k_got = norm_rotary(q, k, cos, sin, None, None, 0.0, 0.0, True)
    assert q_got.shape == (0, 4, 16) and k_got.shape == (0, 2, 16)
