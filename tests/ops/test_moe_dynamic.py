"""`graphfuse::moe_experts` with activation scales found on the fly, against the formula in float64.

Rounding is looked up in the list of the dtype's values, so nothing here is computed as the op computes it.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

from graphfuse.errors import ArgumentError
from graphfuse.ops.moe import moe_experts
from tests.ops.test_moe import E, H, I, K, T, assert_equal, naive, random_inputs

FP8 = torch.float8_e4m3fn
DTYPES = [FP8, torch.float8_e5m2, torch.int8]
BLOCK = (4, 8)  # divides neither H = 12 nor I = 10: the last group of a row is short


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def values_of(dtype):
    """All finite numbers of an 8-bit dtype, in float64."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return values[values.isfinite()].unique()


def rounded_row(row, dtype, group):
    """One row of float64 as it comes back from storage in `dtype`, with one scale for each `group` inputs."""
    known, parts = values_of(dtype), []
    for part in row.split(group):
        scale = float(part.abs().max() / known.max()) or 1.0
        nearest = (part[:, None] / scale - known).abs().argmin(1)
        parts.append(known[nearest] * scale)
    return torch.cat(parts)


def quantised_weights(dtype, block_shape=None):
    """Stored weights, their scales, and what they stand for."""
    stored, scales, whole = [], [], []
    for w in (torch.randn(E, 2 * I, H), torch.randn(E, H, I)):
        q = (w * 20).to(dtype)
        n, k = w.shape[1:]
        if block_shape is None:
            scale = torch.rand(E, n) / 10 + 0.01
            full = scale[:, :, None].expand(E, n, k)
        else:
            scale = torch.rand(E, math.ceil(n / block_shape[0]), math.ceil(k / block_shape[1])) / 10 + 0.01
            full = scale.repeat_interleave(block_shape[0], 1).repeat_interleave(block_shape[1], 2)[:, :n, :k]
        stored.append(q)
        scales.append(scale)
        whole.append(q.double() * full.double())
    return stored, {"gate_up_scale": scales[0], "down_scale": scales[1], "block_shape": block_shape}, whole


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_shape", [None, BLOCK], ids=["rows", "blocks"])
def test_both_inputs_are_rounded_with_a_scale_for_each_row_or_group(dtype, block_shape):
    tokens, _, _, ids, weights = random_inputs()
    stored, scales, whole = quantised_weights(dtype, block_shape)
    got = moe_experts(tokens, *stored, ids, weights, E, **scales, dynamic=True)
    group = block_shape[1] if block_shape else 1000
    through = lambda x, e: rounded_row(x, dtype, group)  # noqa: E731
    assert_equal(got, naive(tokens, *whole, ids, weights, round_tokens=through, round_middle=through))
    plain = moe_experts(tokens, *stored, ids, weights, E, **scales)
    assert float((got - plain).abs().max()) > 1e-3 * float(plain.abs().max())


@pytest.mark.parametrize("block_shape", [None, BLOCK], ids=["rows", "blocks"])
def test_of_quantised_tokens_only_the_activated_values_are_rounded(block_shape):
    tokens, _, _, ids, weights = random_inputs()
    stored, scales, whole = quantised_weights(FP8, block_shape)
    tokens, tokens_scale = tokens.to(FP8), torch.rand(T, 1 if block_shape is None else 2) + 0.5
    full = tokens_scale if block_shape is None else tokens_scale.repeat_interleave(BLOCK[1], 1)[:, :H]
    got = moe_experts(
        tokens, *stored, ids, weights, E, **scales, dynamic=True, tokens_scale=tokens_scale, out_dtype=torch.float32
    )
    group = block_shape[1] if block_shape else 1000
    want = naive(
        tokens.double() * full, *whole, ids, weights, round_middle=lambda x, e: rounded_row(x, FP8, group)
    )  # fmt: skip
    assert_equal(got, want)


def test_one_huge_value_coarsens_its_own_row_or_group_only():
    tokens, _, _, ids, weights = random_inputs()
    huge = tokens.clone()
    huge[2, 0] = 100
    for block_shape in (None, BLOCK):
        stored, scales, whole = quantised_weights(FP8, block_shape)
        group = block_shape[1] if block_shape else 1000
        through = lambda x, e: rounded_row(x, FP8, group)  # noqa: B023, E731
        got = moe_experts(huge, *stored, ids, weights, E, **scales, dynamic=True)
        want = naive(huge, *whole, ids, weights, round_tokens=through, round_middle=through)
        assert_equal(got[2:3], want[2:3])
        others = [0, 1, 3, 4, 5]
        assert torch.equal(
            got[others], moe_experts(tokens, *stored, ids, weights, E, **scales, dynamic=True)[others]
        )  # fmt: skip
        assert_equal(got[others], want[others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_shape", [None, BLOCK], ids=["rows", "blocks"])
def test_zeros_stay_zeros(dtype, block_shape):
    tokens, _, _, ids, weights = random_inputs()
    stored, scales, _ = quantised_weights(dtype, block_shape)
    tokens[1], tokens[3, : BLOCK[1]] = 0, 0  # a whole row, and one group of a row
    got = moe_experts(tokens, *stored, ids, weights, E, **scales, dynamic=True)
    assert torch.equal(got[1], torch.zeros(H))
    assert got.isfinite().all()


def test_very_small_and_very_large_tokens_use_all_of_fp8():
    tokens, _, _, ids, weights = random_inputs()
    stored, scales, _ = quantised_weights(FP8)
    # silu(gate) * up is gate * up / 2 near zero: half the tokens, a quarter of the result, to the last digit of FP8.
    small, smaller = (
        moe_experts(tokens * 2.0**-n, *stored, ids, weights, E, **scales, dynamic=True) for n in (40, 41)
    )  # fmt: skip
    torch.testing.assert_close(smaller * 4, small, rtol=1e-5, atol=0)
    assert small.abs().max() > 0
    half = torch.full((T, H), 65504.0, dtype=torch.float16)
    assert moe_experts(half, *stored, ids, weights, E, **scales, dynamic=True, out_dtype=torch.float32).isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_with_a_nan_or_an_infinity_gives_nans_and_spoils_no_other(bad, dtype):
    tokens, _, _, ids, weights = random_inputs()
    stored, scales, _ = quantised_weights(dtype)
    clean = moe_experts(tokens, *stored, ids, weights, E, **scales, dynamic=True)
    tokens[4, 7] = bad
    got = moe_experts(tokens, *stored, ids, weights, E, **scales, dynamic=True)
    assert got[4].isnan().all()
    others = [0, 1, 2, 3, 5]
    assert torch.equal(got[others], clean[others])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_results_round_once_after_each_projection(dtype):
    tokens, _, _, ids, weights = random_inputs()
    stored, scales, whole = quantised_weights(FP8)
    tokens = tokens.to(dtype)
    got = moe_experts(tokens, *stored, ids, weights, E, **scales, dynamic=True)
    assert got.dtype == dtype
    through = lambda x, e: rounded_row(x, FP8, 1000)  # noqa: E731
    # The activated values are rounded to 16 bits first, so a few fall to the other side of a tie between FP8 numbers.
    assert_equal(got, naive(tokens, *whole, ids, weights, round_tokens=through, round_middle=through), tol=3e-2)


def test_transposed_and_interleaved_weights_with_biases_are_the_same_numbers():
    tokens, _, _, ids, weights = random_inputs()
    stored, scales, _ = quantised_weights(FP8)
    b1, b2 = torch.randn(E, 2 * I), torch.randn(E, H)
    want = moe_experts(
        tokens, *stored, ids, weights, E, gate_up_bias=b1, down_bias=b2, **scales, dynamic=True
    )  # fmt: skip
    zipped = torch.arange(2 * I).view(2, I).t().flatten()
    gate_up = stored[0].view(torch.uint8)[:, zipped].transpose(1, 2).contiguous().view(FP8)
    down = stored[1].view(torch.uint8).transpose(1, 2).contiguous().view(FP8)
    scales = {**scales, "gate_up_scale": scales["gate_up_scale"][:, zipped]}
    got = moe_experts(
        tokens, gate_up, down, ids, weights, E, gate_up_bias=b1[:, zipped], down_bias=b2, **scales, dynamic=True,
        gate_up_layout="interleaved", transposed=True,
    )  # fmt: skip
    torch.testing.assert_close(got, want)


def test_the_schema_and_the_fake_kernel_agree_with_what_the_op_does():
    tokens, _, _, ids, weights = random_inputs()
    stored, scales, _ = quantised_weights(torch.int8, BLOCK)
    outcome = torch.library.opcheck(
        moe_experts, (tokens, *stored, ids, weights, E), {**scales, "dynamic": True, "launch": ""},
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
    assert set(outcome.values()) == {"SUCCESS"}
    with FakeTensorMode() as mode:
        fake = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in scales.items()}
        args = [mode.from_tensor(t) for t in (tokens, *stored, ids, weights)]
        assert moe_experts(*args, E, **fake, dynamic=True, launch="any").shape == (T, H)


PLAIN = {"gate_up": torch.zeros(E, 2 * I, H), "down": torch.zeros(E, H, I), "gate_up_scale": None, "down_scale": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (PLAIN, "which is torch.float32. Pass weights quantised"),
        ({**PLAIN, "gate_up_scale": torch.ones(E), "down_scale": torch.ones(E)}, "which is torch.float32"),
        ({name: PLAIN[name].to(torch.uint8) for name in ("gate_up", "down")}, "which is torch.uint8"),
        ({"tokens_scale": torch.ones(1)}, "tokens_scale is given. Leave tokens_scale out"),
        ({"intermediate_scale": torch.ones(1)}, "intermediate_scale is given. Leave intermediate_scale out"),
        (
            {"tokens": torch.zeros(T, H).to(FP8), "tokens_scale": torch.ones(1), "out_dtype": torch.float32,
             "intermediate_scale": torch.ones(E)},
            "intermediate_scale is given",
        ),
        ({"tokens": torch.zeros(T, H).to(FP8)}, "need tokens_scale and out_dtype"),
    ],
)  # fmt: skip
def test_what_cannot_be_scaled_on_the_fly_is_named(changes, message):
    args = {
        "tokens": torch.zeros(T, H),
        "gate_up": torch.zeros(E, 2 * I, H).to(FP8),
        "down": torch.zeros(E, H, I).to(FP8),
        "gate_up_scale": torch.ones(E),
        "down_scale": torch.ones(E),
        "topk_ids": torch.zeros(T, K, dtype=torch.int64),
        "topk_weights": torch.zeros(T, K),
        "num_experts": E,
        "dynamic": True,
        **changes,
    }
    with pytest.raises(ArgumentError, match=message):
        moe_experts(**args)
    with FakeTensorMode() as mode, pytest.raises(ArgumentError, match=message):
        moe_experts(**{k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in args.items()})
