"""The kernel that chooses experts, run by `test_interpreted.py` in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from graphfuse.kernels.route import route
from graphfuse.ops.route_experts import plain

INF, NAN = float("inf"), float("nan")


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def different(num_tokens, num_experts, dtype=torch.float32):
    """Logits that are all different in each row, so that there is one right choice."""
    steps = torch.arange(num_experts) / 32 - 2  # exact in bfloat16 up to 128 experts
    generator = torch.Generator().manual_seed(num_experts)
    return torch.stack([steps[torch.randperm(num_experts, generator=generator)] for _ in range(num_tokens)]).to(dtype)


FORMULAS = {
    "softmax": {"scoring": "softmax"},
    "normalised": {"scoring": "softmax", "normalise": True},
    "sigmoid": {"scoring": "sigmoid", "normalise": True, "eps": 1e-20, "scale": 2.5},
    "eps that counts": {"scoring": "sigmoid", "normalise": True, "eps": 0.5},
    "chosen": {"scoring": "chosen_softmax"},
}


def both(logits, top_k, bias=None, *, scoring="softmax", normalise=False, eps=0.0, scale=1.0, dtype=torch.float32):
    got = route(logits, bias, top_k, scoring, normalise, eps, scale, dtype)
    return got, plain(logits, top_k, scoring, bias, normalise, eps, scale, dtype)


def check(got, want):
    for g, w in zip(got, want, strict=True):
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
    assert torch.equal(got[1], want[1])
    rtol = 2**-7 if got[0].itemsize < 4 else 5e-6  # the interpreter truncates to 16 bits
    torch.testing.assert_close(got[0].float(), want[0].float(), atol=1e-7, rtol=rtol)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (60, 4), (128, 8), (5, 5), (7, 1)])
def test_the_kernel_equals_the_formula(name, biased, num_experts, top_k):
    for dtype in (torch.float32, torch.bfloat16):
        logits = different(3, num_experts, dtype)
        bias = normal(num_experts) / 4 if biased else None
        check(*both(logits, top_k, bias, **FORMULAS[name], dtype=dtype))


@pytest.mark.parametrize(("num_experts", "top_k"), [(384, 8), (512, 10), (1024, 16)])
def test_many_experts(num_experts, top_k):
    check(*both(normal(2, num_experts), top_k, normal(num_experts), **FORMULAS["sigmoid"]))


def test_a_bias_chooses_and_does_not_weigh():
    logits, bias = torch.tensor([[3.0, 1.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 0.0, 9.0])
    weights, ids = route(logits, bias, 2, "sigmoid", False, 0.0, 1.0, torch.float32)
    assert ids.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, torch.sigmoid(torch.tensor([[-1.0, 3.0]])))


def test_of_equal_scores_the_lower_id_comes_first():
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 0.0], [0.0] * 6, [0.0, -0.0, 0.0, -0.0, 0.0, -0.0]])
    for scoring in ("softmax", "sigmoid", "chosen_softmax"):
        _, ids = route(logits, None, 4, scoring, False, 0.0, 1.0, torch.float32)
        assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "chosen_softmax"])
@pytest.mark.parametrize("biased", [False, True])
def test_rows_that_are_not_finite_have_different_ids_of_experts_and_leave_others_alone(scoring, biased):
    logits = different(8, 6)
    logits[1], logits[2], logits[3] = NAN, INF, -INF
    logits[4, 2], logits[5, 2], logits[6, 2] = NAN, INF, -INF
    logits[7] = torch.tensor([-NAN, INF, -INF, 0.0, NAN, 1.0])
    bias = torch.zeros(6) if biased else None
    (weights, ids), want = both(logits, 5, bias, scoring=scoring, normalise=scoring == "sigmoid")
    assert all(sorted(set(row)) == sorted(row) and min(row) >= 0 and max(row) < 6 for row in ids.tolist())
    for row in (0, 6):
        check((weights[row], ids[row]), (want[0][row], want[1][row]))
    assert torch.equal(weights.isnan(), want[0].isnan())
    torch.testing.assert_close(weights, want[0], equal_nan=True)


def test_rows_may_be_far_apart_and_their_numbers_too():
    logits = different(4, 24)
    for x in (logits[:, :20], logits.t().contiguous().t(), logits[::2]):
        check(*both(x, 3, **FORMULAS["normalised"]))


def test_no_tokens():
    weights, ids = route(torch.empty(0, 8), None, 2, "softmax", True, 0.0, 1.0, torch.bfloat16)
    assert (weights.shape, weights.dtype, ids.shape, ids.dtype) == ((0, 2), torch.bfloat16, (0, 2), torch.int64)
