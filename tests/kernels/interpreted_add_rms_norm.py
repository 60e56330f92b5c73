"""The cases of the add + RMSNorm kernel, run by `test_add_rms_norm.py` in a process with TRITON_INTERPRET=1.

Triton decides at import whether its kernels are interpreted, so these cases cannot share a process with other tests.
"""

import itertools

import pytest
import torch

from graphfuse.kernels.add_rms_norm import add_rms_norm
from tests.kernels.interpreter_as_gpus import arithmetic_of_gpus


@pytest.fixture(autouse=True)
def round_as_gpus_do():
    with arithmetic_of_gpus():
        yield


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def eager(x, residual, weight, eps, weight_bias, cast_before_weight):
    """The formula as a model writes it, one rounding at a time."""
    r = x if residual is None else residual + x
    f = r.to(torch.float32)
    f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return f.to(r.dtype), r
    w = weight.to(torch.float32) + weight_bias
    if cast_before_weight:
        return (f.to(r.dtype).to(torch.float32) * w).to(r.dtype), r
    return (f * w).to(r.dtype), r


def exact(x, residual, weight, eps, weight_bias):
    """The same function in float64 with no rounding between."""
    r = x.double() if residual is None else residual.double() + x.double()
    f = r * torch.rsqrt(r.pow(2).mean(-1, keepdim=True) + eps)
    return f if weight is None else f * (weight.double() + weight_bias)


def ulps(a, b):
    """Distance in units in the last place, elementwise."""
    whole = torch.int32 if a.dtype is torch.float32 else torch.int16

    def line(t):  # floats in order on the integer line
        bits = t.contiguous().view(whole).to(torch.int64)
        sign = -(1 << (31 if whole is torch.int32 else 15))
        return torch.where(bits < 0, sign - bits, bits)

    return (line(a) - line(b)).abs().max().item() if a.numel() else 0


def inputs(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).to(dtype)
    residual = (3 * torch.randn(shape, generator=generator)).to(dtype)
    weight = (1 + 0.3 * torch.randn(shape[-1], generator=generator)).to(dtype)
    return x, residual, weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 3, 64, 100, 576, 2880])
def test_matches_eager_at_any_hidden_size(dtype, hidden):
    x, residual, weight = inputs((3, hidden), dtype)
    normed, summed = add_rms_norm(x, residual, weight, 1e-6)
    expected, expected_sum = eager(x, residual, weight, 1e-6, 0.0, True)
    assert torch.equal(summed, expected_sum)
    # One ulp for the order of the mean; float32 has no rounding to hide it behind, rsqrt and the mean each add one.
    assert ulps(normed, expected) <= (4 if dtype is torch.float32 else 1)


FORMS = list(itertools.product([True, False], [True, False], [0.0, 1.0], [True, False]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("with_residual", "with_weight", "weight_bias", "cast_before_weight"), FORMS)
def test_matches_eager_in_every_form(dtype, with_residual, with_weight, weight_bias, cast_before_weight):
    x, residual, weight = inputs((2, 96), dtype, seed=1)
    form = (residual if with_residual else None, weight if with_weight else None, 1e-5, weight_bias, cast_before_weight)
    normed, summed = add_rms_norm(x, *form)
    expected, expected_sum = eager(x, *form)
    assert torch.equal(summed, expected_sum)
    assert ulps(normed, expected) <= (4 if dtype is torch.float32 else 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cast_before_weight", [True, False])
def test_is_no_further_from_float64_than_eager(dtype, cast_before_weight):
    x, residual, weight = inputs((4, 1000), dtype, seed=2)
    truth = exact(x, residual, weight, 1e-6, 1.0)
    ours = add_rms_norm(x, residual, weight, 1e-6, 1.0, cast_before_weight)[0].double()
    theirs = eager(x, residual, weight, 1e-6, 1.0, cast_before_weight)[0].double()
    assert (ours - truth).norm() <= 1.01 * (theirs - truth).norm() + 1e-7 * truth.norm()


def test_the_place_of_the_cast_matters():
    x, residual, weight = inputs((8, 512), torch.bfloat16, seed=3)
    before = add_rms_norm(x, residual, weight, 1e-6, 0.0, True)[0]
    after = add_rms_norm(x, residual, weight, 1e-6, 0.0, False)[0]
    assert not torch.equal(before, after)


def test_a_float32_weight_with_bfloat16_activations_is_read_as_float32():
    x, residual, weight = inputs((2, 64), torch.bfloat16, seed=4)
    weight = weight.float() + 1e-3
    assert ulps(add_rms_norm(x, residual, weight, 1e-6)[0], eager(x, residual, weight, 1e-6, 0.0, True)[0]) <= 1


def test_without_tokens_nothing_is_launched():
    x, residual, weight = inputs((0, 64), torch.bfloat16)
    normed, summed = add_rms_norm(x, residual, weight, 1e-6)
    assert normed.shape == summed.shape == (0, 64)


def test_leading_dimensions_are_kept():
    x, residual, weight = inputs((2, 3, 64), torch.float32)
    normed, summed = add_rms_norm(x, residual, weight, 1e-6)
    assert normed.shape == summed.shape == (2, 3, 64)
    assert ulps(normed, eager(x, residual, weight, 1e-6, 0.0, True)[0]) <= 4


def test_inputs_are_not_modified():
    x, residual, weight = inputs((2, 64), torch.float32)
    before = [t.clone() for t in (x, residual, weight)]
    add_rms_norm(x, residual, weight, 1e-6)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, residual, weight), strict=True))
