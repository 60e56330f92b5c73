"""`graphfuse::norm_rotary` on the CPU: the formula that models write out, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from graphfuse.errors import ArgumentError
from graphfuse.models.layers import RMSNorm, ZeroCentredRMSNorm, rotate
from graphfuse.ops.norm_rotary import norm_rotary

HEADS, KV_HEADS, D = 4, 2, 16


def inputs(batch=2, length=3, rotated=D, dtype=torch.float32):
    """Views of one tensor, as a model's one product gives them."""
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(batch, length, HEADS + 2 * KV_HEADS, D, generator=generator).to(dtype)
    q, k, _ = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
    angles = torch.randn(batch, length, 1, rotated, generator=generator)
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rotated", [D, 6])
@pytest.mark.parametrize("norm_type", [None, RMSNorm, ZeroCentredRMSNorm])
def test_it_is_the_formula_of_our_models_bit_for_bit(norm_type, rotated, dtype):
    q, k, cos, sin = inputs(rotated=rotated, dtype=dtype)
    norms = [norm_type(D, 1e-5, dtype=dtype, device="cpu") if norm_type else lambda x: x for _ in range(2)]
    weights = []
    for seed, norm in enumerate(norms if norm_type else ()):
        weights.append(norm.weight.data.copy_(torch.rand(D, generator=torch.Generator().manual_seed(seed))))
    zero_centred = norm_type is ZeroCentredRMSNorm
    got = norm_rotary(q, k, cos, sin, *(weights or (None, None)), 1e-5, float(zero_centred), not zero_centred)
    for x, norm, rotated_x in zip((q, k), norms, got, strict=True):
        assert rotated_x.is_contiguous()
        assert torch.equal(rotated_x, rotate(norm(x), cos, sin))


def test_a_call_without_tokens():
    q, k = norm_rotary(*inputs(length=0))
    assert q.shape == (2, 0, HEADS, D) and k.shape == (2, 0, KV_HEADS, D)


def test_it_passes_torchs_checks_of_an_op():
    weights = torch.rand(D), torch.rand(D)
    torch.library.opcheck(norm_rotary, (*inputs(), *weights, 1e-5, 1.0, False))


def test_shapes_on_fake_tensors_are_those_of_the_results():
    with FakeTensorMode():
        q, k = norm_rotary(*(torch.zeros(x.shape, dtype=torch.bfloat16) for x in inputs(rotated=6)))
    assert (q.shape, k.shape) == ((2, 3, HEADS, D), (2, 3, KV_HEADS, D))
    assert q.dtype == k.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 3, D)}, r"3, 4, 4 and 4 dimensions. Pass q \[B, S, Hq, D\]"),
        ({"k": torch.zeros(2, 3, KV_HEADS, 8)}, "Pass the same size"),
        ({"q": torch.zeros(2, 3, HEADS, D).double()}, "Pass float16, bfloat16 or float32"),
        ({"k": torch.zeros(2, 3, KV_HEADS, D).bfloat16()}, "Use one dtype"),
        ({"cos": torch.zeros(2, 3, 1, D).bfloat16(), "sin": torch.zeros(2, 3, 1, D).bfloat16()}, "Use one dtype"),
        ({"cos": torch.zeros(2, 3, 1, D, device="meta")}, "Use one device"),
        ({"cos": torch.zeros(2, 3, 1, 8)}, r"Pass \(1, R\) for both"),
        ({"cos": torch.zeros(2, 3, 1, 18), "sin": torch.zeros(2, 3, 1, 18)}, "R even and at most that size"),
        ({"cos": torch.zeros(2, 3, 1, 5), "sin": torch.zeros(2, 3, 1, 5)}, "R even"),
        ({"cos": torch.zeros(2, 1, 1, D), "sin": torch.zeros(2, 1, 1, D)}, r"disagree on \[batch, sequence\]"),
        ({"q_weight": torch.zeros(D)}, "Pass both or neither"),
        ({"q_weight": torch.zeros(D), "k_weight": torch.zeros(8)}, r"shape \(8,\). Pass one number for each of 16"),
        ({"q_weight": torch.zeros(D), "k_weight": torch.zeros(D).half()}, "Use one dtype"),
    ],
)
def test_mistakes_are_named(change, message):
    arguments = dict(zip(("q", "k", "cos", "sin"), inputs(), strict=True))
    with pytest.raises(ArgumentError, match=message):
        norm_rotary(**(arguments | change))
