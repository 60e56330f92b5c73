"""`graphfuse::route_experts` against the routers' formulas; arguments that do not fit; tracing and Inductor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graphfuse.errors import ArgumentError
from graphfuse.ops.route_experts import route_experts

E, K = 12, 3


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_softmax_over_all_experts(dtype):
    logits = normal(5, E).to(dtype)
    want, ids = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), K, dim=-1)
    got = route_experts(logits, K)
    assert torch.equal(got[1], ids) and torch.equal(got[0], want)
    normalised = route_experts(logits, K, normalise=True, out_dtype=dtype)[0]
    assert torch.equal(normalised, (want / want.sum(dim=-1, keepdim=True)).to(dtype))


def test_sigmoid_with_a_bias_that_chooses_and_does_not_weigh():
    logits, bias = normal(5, E), 2 * normal(E, seed=1)
    scores = logits.sigmoid()
    ids = torch.topk(scores + bias, K, dim=-1).indices
    assert not torch.equal(ids, torch.topk(scores, K, dim=-1).indices)
    weights = scores.gather(1, ids)
    want = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * 2.5
    got = route_experts(logits, K, "sigmoid", bias, True, 1e-20, 2.5)
    assert torch.equal(got[1], ids) and torch.equal(got[0], want)


def test_softmax_of_the_chosen():
    logits = normal(5, E)
    values, ids = torch.topk(logits, K, dim=-1)
    got = route_experts(logits, K, "chosen_softmax")
    assert torch.equal(got[1], ids) and torch.equal(got[0], values.softmax(dim=-1))


def test_no_tokens_and_all_experts():
    weights, ids = route_experts(torch.empty(0, E), K, out_dtype=torch.bfloat16)
    assert (weights.shape, weights.dtype, ids.shape, ids.dtype) == ((0, K), torch.bfloat16, (0, K), torch.int64)
    assert sorted(route_experts(normal(1, E), E)[1][0].tolist()) == list(range(E))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, E), K, "tanh"), "scoring is 'tanh'. Known: softmax, sigmoid, chosen_softmax"),
        ((torch.ones(2, 3, E), K), "logits are torch.float32 of 3 dimensions. Pass"),
        ((torch.ones(2, E).double(), K), "logits are torch.float64 of 2 dimensions. Pass"),
        ((torch.ones(2, E), 0), "top_k is 0 of 12 experts. Pass at least 1"),
        ((torch.ones(2, E), E + 1), "top_k is 13 of 12 experts. Pass at least 1, and at most all"),
        ((torch.ones(2, E), K, "sigmoid", torch.ones(E + 1)), r"bias is torch.float32 of shape \[13\]. Pass"),
        ((torch.ones(2, E), K, "sigmoid", torch.ones(E).int()), r"bias is torch.int32 of shape \[12\]. Pass"),
        ((torch.ones(2, E), K, "sigmoid", torch.ones(E, device="meta")), "logits are on cpu, bias on meta. Use one"),
        ((torch.ones(2, E), K, "softmax", None, False, 0.0, 1.0, torch.int32), "out_dtype is torch.int32. Use"),
    ],
)
def test_what_does_not_fit_is_an_error(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        route_experts(*arguments)


def test_the_op_says_of_itself_what_it_does():
    logits, bias = normal(4, E), normal(E, seed=1)
    torch.library.opcheck(route_experts, (logits, K, "sigmoid", bias, True, 1e-20, 2.5, torch.bfloat16))


def test_inductor_takes_the_op_with_all_of_its_arguments():
    def choose(logits, bias):
        op = torch.ops.graphfuse.route_experts.default
        weights, ids = op(logits * 2, K, "sigmoid", bias, True, 1e-20, 2.5, torch.bfloat16)
        return weights + 1, ids + 1

    logits, bias = normal(4, E), normal(E, seed=1)
    for got, want in zip(torch.compile(choose, fullgraph=True)(logits, bias), choose(logits, bias), strict=True):
        torch.testing.assert_close(got, want)
