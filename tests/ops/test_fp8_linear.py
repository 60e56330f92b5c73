"""Rounding to FP8 and products of FP8: every form of scale against loops and plain formulas; fakes; errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

from graphfuse.errors import ArgumentError
from graphfuse.ops.fp8_linear import FP8, dequantised, fp8_linear, quantise_fp8
from tests.models.tiny_fp8 import e4m3

N, K = 160, 200
SCALES = {"one": (), "channels": (N,), "blocks": (2, 2), "small blocks": (5, 4)}
BLOCKS = {"blocks": [128, 128], "small blocks": [32, 64]}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(math.prod(shape)))


def given(form: str) -> torch.Tensor | None:
    return torch.tensor(0.01) if form == "static" else None


@pytest.mark.parametrize("form", ["static", "token", "group"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [384, 200, 96])
def test_rows_are_rounded_as_documented(form, dtype, size):
    x = (3 * random(2, 5, size)).to(dtype)
    x[0, 0] = 0
    quantised, scales = quantise_fp8(x, form, given(form))
    width = 128 if form == "group" else size
    for i, part in enumerate(x.float().split(width, -1)):
        scale = torch.tensor(0.01)
        if form != "static":
            scale = part.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
            assert torch.equal(scales[..., i : i + 1], scale)
        assert torch.equal(quantised[..., width * i : width * (i + 1)].float(), e4m3(part / scale))
    assert quantised.dtype == FP8 and scales.dtype == torch.float32 and quantised.is_contiguous()


@pytest.mark.parametrize("form", ["static", "token", "group"])
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_that_of_what_both_stand_for(form, kind, bias):
    x, scales = quantise_fp8(random(3, 4, K), form, given(form))
    weight, weight_scale = (
        (50 * random(N, K)).to(FP8),
        random(*SCALES[kind]).abs() if kind != "one" else torch.tensor(0.5),
    )
    b = random(N) if bias else None
    spread = scales if scales.numel() == 1 or scales.shape[-1] == 1 else scales.repeat_interleave(128, -1)[..., :K]
    if kind in BLOCKS:
        n, k = BLOCKS[kind]
        rows, columns = torch.arange(N) // n, torch.arange(K) // k
        meant = weight.double() * weight_scale.double()[rows][:, columns]
    else:
        meant = weight.double() * weight_scale.double().reshape(-1, 1)
    assert torch.equal(dequantised(weight, weight_scale, BLOCKS.get(kind), torch.float64), meant)
    want = torch.einsum("abk,nk->abn", x.double() * spread.double(), meant) + (0 if b is None else b.double())
    for dtype, tolerance in ((torch.float64, 1e-7), (torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
        y = fp8_linear(x, scales, weight, weight_scale, b, BLOCKS.get(kind), dtype)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=tolerance * want.std().item())


@pytest.mark.parametrize("form", ["static", "token", "group"])
@pytest.mark.parametrize("shape", [(3, 200), (2, 3, 256), (0, 256)], ids=str)
def test_the_fakes_give_the_shapes_of_the_ops_for_any_strides(form, shape):
    x = random(*shape).transpose(0, -1).contiguous().transpose(0, -1)
    weight, scale = random(16, shape[-1]).to(FP8), torch.ones(16)

    def describe(x, weight, scale, given):
        quantised, scales = quantise_fp8(x, form, given)
        y = fp8_linear(quantised, scales, weight, scale, None, None, torch.bfloat16)
        return [(tuple(t.shape), t.dtype, t.stride() if t.numel() else None) for t in (quantised, scales, y)]

    real = describe(x, weight, scale, given(form))
    with FakeTensorMode() as mode:
        args = [mode.from_tensor(t) if t is not None else None for t in (x, weight, scale, given(form))]
        assert describe(*args) == real
    assert describe(*[t.to("meta") if t is not None else None for t in (x, weight, scale, given(form))]) == real


def test_torchs_own_checks_of_custom_ops_pass():
    # Not of the schema, which compares arguments before and after: torch cannot compare FP8.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    x, scales = quantise_fp8(random(3, 256), "group", None)
    weight, scale = random(32, 256).to(FP8), torch.ones(1, 2)
    calls = [
        (torch.ops.graphfuse.quantise_fp8.default, (random(3, 256), form, given(form))) for form in ("static", "token")
    ]
    calls.append((torch.ops.graphfuse.fp8_linear.default, (x, scales, weight, scale, None, [128, 128], torch.float32)))
    for op, args in calls:
        assert set(torch.library.opcheck(op, args, test_utils=checks).values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 4)}, "Pass x .* and weight"),
        ({"weight": torch.zeros(3, 5).to(FP8)}, r"weight \[3, 5\]"),
        ({"x_scale": torch.ones(2, 2)}, r"x_scale is \[2, 2\] for x \[2, 4\]"),
        ({"weight_scale": torch.ones(2)}, r"weight_scale has shape \[2\]. Pass \[\] or \[3\]"),
        ({"block_shape": [128, 128]}, r"Pass \[1, 1\]"),
        ({"block_shape": [128]}, "two positive sizes"),
        ({"weight_scale": torch.ones(3).bfloat16()}, "Pass float32"),
        ({"bias": torch.ones(2)}, r"Pass a floating \[3\]"),
        ({"out_dtype": torch.int32}, "out_dtype is torch.int32"),
    ],
)
def test_what_does_not_fit_is_named(changes, message):
    args = {
        "x": torch.zeros(2, 4).to(FP8), "x_scale": torch.ones(2, 1), "weight": torch.zeros(3, 4).to(FP8),
        "weight_scale": torch.ones(3), "bias": None, "block_shape": None, "out_dtype": torch.float32, **changes,
    }  # fmt: skip
    with pytest.raises(ArgumentError, match=message):
        fp8_linear(**args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.zeros(2, 4), "row", None), "form='row' is not known"),
        ((torch.zeros(2, 4, dtype=torch.int32), "token", None), "must be a floating-point tensor"),
        ((torch.zeros(2, 4), "static", None), "Give a scale for 'static'"),
        ((torch.zeros(2, 4), "token", torch.tensor(1.0)), "and for no other form"),
        ((torch.zeros(2, 4), "static", torch.ones(2)), "Give one float32 number"),
    ],
)
def test_roundings_that_do_not_fit_are_named(args, message):
    with pytest.raises(ArgumentError, match=message):
        quantise_fp8(*args)
