"""The group-limited router against its formulas, one token and one expert at a time in float64."""

from __future__ import annotations

import math

import pytest
import torch

from graphfuse.models.routers import GroupLimitedRouter

HIDDEN, EXPERTS, TOP_K, SCALE = 16, 12, 4, 2.5


def router(scoring="sigmoid", num_groups=4, top_groups=2, *, normalise=True) -> GroupLimitedRouter:
    made = GroupLimitedRouter(
        HIDDEN, EXPERTS, TOP_K, scoring=scoring, correction_bias=scoring == "sigmoid", num_groups=num_groups,
        top_groups=top_groups, normalise=normalise, scale=SCALE, device="cpu",
    )  # fmt: skip
    for p in made.parameters():
        p.copy_(torch.randn(p.shape) / (1 if p.dim() == 1 else HIDDEN**0.5))
    return made


def naive(made: GroupLimitedRouter, x: torch.Tensor, *, softmax: bool, normalise: bool) -> dict[int, float]:
    """Expert → weight, of one token."""
    logits = [float(made.weight[e].double() @ x.double()) for e in range(EXPERTS)]
    if softmax:
        total = sum(math.exp(z) for z in logits)
        scores = [math.exp(z) / total for z in logits]
    else:
        scores = [1 / (1 + math.exp(-z)) for z in logits]
    bias = made.e_score_correction_bias
    wanted = scores if bias is None else [s + float(b) for s, b in zip(scores, bias, strict=True)]
    size = EXPERTS // made.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(made.num_groups)]
    groups.sort(key=lambda members: -sum(sorted((wanted[e] for e in members), reverse=True)[:2]))
    allowed = [e for members in groups[: made.top_groups] for e in members]
    chosen = sorted(allowed, key=lambda e: -wanted[e])[:TOP_K]
    total = sum(scores[e] for e in chosen) if normalise else 1.0
    return {e: SCALE * scores[e] / total for e in chosen}


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize(("num_groups", "top_groups"), [(4, 2), (3, 2), (1, 1), (4, 4)])
@pytest.mark.parametrize("normalise", [True, False])
def test_the_best_experts_of_the_best_groups_are_weighed_by_their_scores(scoring, num_groups, top_groups, normalise):
    made = router(scoring, num_groups, top_groups, normalise=normalise)
    x = torch.randn(50, HIDDEN)
    ids, weights = made(x)
    for token in range(len(x)):
        want = naive(made, x[token], softmax=scoring == "softmax", normalise=normalise)
        assert dict(zip(ids[token].tolist(), weights[token].tolist(), strict=True)) == pytest.approx(want, rel=1e-5)


def test_the_bias_steers_the_choice_and_not_the_weights():
    made = router(num_groups=1, top_groups=1, normalise=False)
    x = torch.randn(20, HIDDEN)
    made.e_score_correction_bias.zero_()
    made.e_score_correction_bias[7] = 10.0
    ids, weights = made(x)
    assert (ids == 7).any(dim=1).all()
    assert float(weights.max()) <= SCALE


def test_scores_are_float32_in_a_bfloat16_model():
    """Rounded to bfloat16, some of these logits would be equal, and other experts chosen."""
    torch.manual_seed(0)
    made = router(num_groups=1, top_groups=1)
    x = torch.randn(2000, HIDDEN).bfloat16()
    ids, weights = made(x)
    assert weights.dtype == torch.float32
    assert torch.equal(ids, made(x.float())[0])
    rounded = torch.nn.functional.linear(x, made.weight.bfloat16()).sigmoid() + made.e_score_correction_bias.bfloat16()
    assert not torch.equal(ids.sort().values, rounded.topk(TOP_K).indices.sort().values)
