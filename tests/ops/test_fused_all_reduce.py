"""`graphfuse::all_reduce_add_rms_norm_fp8` on gloo ranks: its values, its fake, its errors.

The two ops without FP8 are tested with the backends (tests/comm/test_reference.py) and with the rules that emit them.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from graphfuse.comm import reference
from graphfuse.comm.call import FusedCall
from graphfuse.errors import ArgumentError
from graphfuse.kernels.norm_epilogue import FP8_MAX
from graphfuse.ops.fused_all_reduce import all_reduce_add_rms_norm, all_reduce_add_rms_norm_fp8, all_reduce_rms_norm

FORMS = ("static", "token", "group")
OP = torch.ops.graphfuse.all_reduce_add_rms_norm_fp8.default


def scale_for(form):
    return torch.tensor(0.02) if form == "static" else None


def tensors(group, shape, dtype):
    """x of this rank, and the residual and the weight, which the ranks share."""
    own, common = torch.Generator().manual_seed(dist.get_rank(group)), torch.Generator().manual_seed(9)
    x, residual = torch.randn(shape, generator=own).to(dtype), torch.randn(shape, generator=common).to(dtype)
    return x, residual, (1 + 0.3 * torch.randn(shape[-1], generator=common)).to(dtype)


def naive(normed, form, scale):
    """One number at a time: (quantised as float, scales)."""
    rows = normed.float().reshape(-1, normed.shape[-1]).tolist()
    width = {"static": len(rows[0]), "token": len(rows[0]), "group": 128}[form]
    quantised, scales = [], []
    for row in rows:
        for first in range(0, len(row), width):
            part = row[first : first + width]
            largest = torch.tensor(max(map(abs, part))).clamp(min=1e-10)
            scales.append(scale if form == "static" else largest / FP8_MAX)
            scaled = (torch.tensor(part) / scales[-1]).clamp(-FP8_MAX, FP8_MAX)
            quantised.append(scaled.to(torch.float8_e4m3fn).float())
    return torch.cat(quantised).view(normed.shape), torch.stack(scales)


def values(group, form, dtype, shape):
    x, residual, weight = tensors(group, shape, dtype)
    before = [t.clone() for t in (x, residual, weight)]
    results = []
    for with_residual, with_weight, cast in itertools.product((True, False), (True, False), (True, False)):
        r, w, bias = residual if with_residual else None, weight if with_weight else None, 0.0 if cast else 1.0
        scale = scale_for(form)
        normed, summed, quantised, scales = all_reduce_add_rms_norm_fp8(
            x, r, w, 1e-5, bias, cast, False, form, scale, group.group_name
        )
        expected, expected_sum = reference.run(FusedCall(x, r, w, 1e-5, bias, cast), group)
        wanted, wanted_scales = naive(normed, form, scale)
        assert torch.equal(normed, expected) and torch.equal(summed, expected_sum)
        assert quantised.dtype == torch.float8_e4m3fn and torch.equal(quantised.float(), wanted)
        assert torch.equal(scales.flatten(), wanted_scales[:1] if form == "static" else wanted_scales)
        assert form != "static" or scales.data_ptr() != scale.data_ptr()
        results.append((normed, summed, quantised.view(torch.uint8), scales))  # float8 cannot be pickled
    assert all(torch.equal(*pair) for pair in zip(before, (x, residual, weight), strict=True))
    return results


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_normed_value_of_the_reference_is_quantised_as_documented_on_every_rank(ranks, form, dtype):
    first, second = ranks.run(2, values, form, dtype, (2, 3, 256))
    for of_one, of_other in zip(first, second, strict=True):
        assert [t.dtype for t in of_one] == [dtype, dtype, torch.uint8, torch.float32]
        assert [t.shape for t in of_one[:3]] == [(2, 3, 256)] * 3
        assert of_one[3].shape == {"static": (), "token": (2, 3, 1), "group": (2, 3, 2)}[form]
        for a, b in zip(of_one, of_other, strict=True):
            assert torch.equal(a, b)


def extremes(group):
    """A row of zeros; one large element, which a static scale cannot hold; a scale of one element in a dimension."""
    x, zeros = torch.zeros(2, 128), torch.zeros(2, 128)
    x[1, 5] = 1.0
    weight = torch.full((128,), 1000.0)
    args = (x, zeros, weight, 1e-5, 0.0, True, False)
    static = all_reduce_add_rms_norm_fp8(*args, "static", torch.tensor([1.0]), group.group_name)
    token = all_reduce_add_rms_norm_fp8(*args, "token", None, group.group_name)
    return static[2][1, 5].float().item(), static[3].shape, token[2][0].float().abs().max().item(), token[3][0].item()


def test_saturated_and_empty_rows_are_numbers(ranks):
    for largest, shape, of_zeros, scale_of_zeros in ranks.run(2, extremes):
        assert largest == FP8_MAX
        assert shape == (1,)
        assert of_zeros == 0.0
        assert scale_of_zeros == pytest.approx(1e-10 / FP8_MAX)


def shapes(group, shape, form):
    """Of the op, of its fake and on meta: (shape, dtype, strides) of each result. x is a transposed view."""
    x, residual, weight = tensors(group, shape, torch.bfloat16)
    x = x.transpose(0, -1).contiguous().transpose(0, -1)
    args = (x, residual, weight, 1e-5, 0.0, True, False, form, scale_for(form), group.group_name)

    def describe(results):
        return [(tuple(t.shape), t.dtype, t.stride() if t.numel() else None) for t in results]

    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = describe(OP(*[mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]))
    meta = describe(OP(*[a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]))
    return describe(OP(*args)), fake, meta


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(2, 3, 256), (5, 128), (128,), (0, 256)], ids=str)
def test_the_fake_gives_the_shapes_of_the_op_for_any_strides(ranks, form, shape):
    for real, fake, meta in ranks.run(2, shapes, shape, form):
        assert real == fake == meta


def checked(group):
    """torch's own checks of the schema, the fake kernel and compiling with dynamic shapes."""
    x, residual, weight = tensors(group, (3, 256), torch.float32)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    calls = [
        (OP, (x, r, w, 1e-5, 0.0, True, False, form, scale_for(form), group.group_name))
        for form, r, w in zip(FORMS, (residual, None, residual), (weight, weight, None), strict=True)
    ]
    calls.append((all_reduce_add_rms_norm._opoverload, (x, residual, weight, 1e-5, 0.0, True, False, group.group_name)))
    calls.append((all_reduce_rms_norm._opoverload, (x, weight, 1e-5, 1.0, False, group.group_name)))
    return [set(torch.library.opcheck(op, args, test_utils=checks).values()) for op, args in calls]


def test_torchs_own_checks_of_custom_ops_pass(ranks):
    assert ranks.run(2, checked, timeout=120.0) == [[{"SUCCESS"}] * 5] * 2


ERRORS = {
    "no float": ({"x": torch.zeros(2, 256, dtype=torch.int32)}, r"x is \[2, 256\] int32 on cpu\. It must be a float"),
    "no dimension": ({"x": torch.tensor(1.0)}, r"x is \[\] float32 on cpu\. It must be a floating-point tensor"),
    "weight shape": ({"weight": torch.ones(2)}, r"weight is \[2\] .* The weight must be \[256\] of x's dtype"),
    "weight dtype": ({"weight": torch.ones(256).bfloat16()}, "weight is .*bfloat16.* must be .* of x's dtype"),
    "residual shape": ({"residual": torch.zeros(3, 256)}, r"residual is \[3, 256\].*must have one shape"),
    "residual dtype": ({"residual": torch.zeros(2, 256).half()}, "residual is .*float16.*must have one shape, dtype"),
    "no such group": ({"group_name": "nobody"}, "no process group called 'nobody'. Create it before"),
    "no such form": ({"fp8": "block"}, r"fp8='block' is not known\. Use \"static\", \"token\" or \"group\""),
    "no scale": ({"scale": None}, 'fp8="static" needs the scale. Give a float32 tensor of one element'),
    "many scales": ({"scale": torch.ones(2)}, 'fp8="static" needs the scale'),
    "scale dtype": ({"scale": torch.ones(1).double()}, 'fp8="static" needs the scale'),
    "scale for token": ({"fp8": "token"}, "fp8='token' computes its scales. Leave scale out"),
    "scale for group": ({"fp8": "group"}, "fp8='group' computes its scales. Leave scale out"),
    "odd groups": (
        {"fp8": "group", "scale": None, "x": torch.zeros(2, 200), "residual": None, "weight": None},
        'fp8="group" needs a hidden size of whole groups of 128, and it is 200. Use "token"',
    ),
}


def refused(group, changes):
    args = {
        "x": torch.zeros(2, 256), "residual": torch.zeros(2, 256), "weight": torch.ones(256), "eps": 1e-5,
        "weight_bias": 0.0, "cast_before_weight": True, "x_is_dead": False, "fp8": "static", "scale": torch.tensor(1.0),
        "group_name": group.group_name, **changes,
    }  # fmt: skip
    try:
        all_reduce_add_rms_norm_fp8(**args)
    except ArgumentError as error:
        return str(error)


@pytest.mark.parametrize("case", ERRORS)
def test_arguments_that_do_not_fit_are_named_before_any_rank_waits(ranks, case):
    changes, message = ERRORS[case]
    for said in ranks.run(2, refused, changes):
        with pytest.raises(ArgumentError, match=message):
            raise ArgumentError(said)


@pytest.mark.parametrize("form", ["block", "static", "group"])
def test_the_fake_names_what_does_not_fit_too(form):
    x = torch.zeros(2, 200, device="meta")
    with pytest.raises(ArgumentError, match=f"fp8=.{form}"):
        OP(x, None, None, 1e-5, 0.0, True, False, form, None, "any")
