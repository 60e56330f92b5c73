"""Integer weights follow transformers' distribution, and what stays is what its warpers leave."""

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from graphfuse.generation.drawing import draw, token_weights, truncate


def settings(*rows):
    """temperature, top_k, top_p, min_p, a tensor each."""
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return (
        torch.tensor(temperature, dtype=torch.float64),
        torch.tensor(top_k),
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor(min_p, dtype=torch.float64),
    )


def weigh(logits, *rows, num_candidates=None):
    temperature, *limits = settings(*rows)
    return truncate(token_weights(logits, temperature), *limits, num_candidates)


def reference_distribution(logits, temperature, top_k, top_p, min_p):
    """The k most likely, the smallest set of those that reaches top_p, those not below min_p: in plain loops."""
    probabilities = torch.softmax(logits.double() / temperature, -1).tolist()
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    if top_k:
        order = order[:top_k]
    total = sum(probabilities[i] for i in order)
    kept, share = [], 0.0
    for i in order:
        if share >= top_p:
            break
        kept.append(i)
        share += probabilities[i] / total
    kept = [i for i in kept if probabilities[i] >= min_p * probabilities[order[0]]]
    result = torch.zeros(len(probabilities), dtype=torch.float64)
    for i in kept:
        result[i] = probabilities[i]
    return result / result.sum()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
def test_weights_follow_the_reference_distribution(temperature, top_k, top_p, min_p):
    logits = 2 * torch.randn(3, 37, generator=torch.Generator().manual_seed(0))
    weights = weigh(logits, *[(temperature, top_k, top_p, min_p)] * 3)
    for row in range(3):
        expected = reference_distribution(logits[row], temperature, top_k, top_p, min_p)
        actual = weights[row].double() / weights[row].sum()
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
        assert ((weights[row] > 0) == (expected > 2**-42 * expected.max())).all()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 4, 20])
@pytest.mark.parametrize("top_p", [0.3, 0.95, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_the_tokens_that_transformers_keeps_are_kept(temperature, top_k, top_p, min_p):
    logits = 2 * torch.randn(8, 64, generator=torch.Generator().manual_seed(5))
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    scores = warpers(torch.zeros(8, 1, dtype=torch.int64), logits.clone())
    weights = weigh(logits, *[(temperature, top_k, top_p, min_p)] * 8)
    assert torch.equal(weights > 0, scores > float("-inf"))
    shares = weights.double() / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(shares.float(), torch.softmax(scores, -1))


def test_rows_of_a_batch_keep_their_own_settings():
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    rows = [(0.7, 0, 1.0, 0.0), (1.0, 3, 1.0, 0.0), (1.3, 0, 0.6, 0.0), (1.0, 10, 0.8, 0.0), (1.0, 0, 1.0, 0.3)]
    together = weigh(logits, *rows)
    for i, row in enumerate(rows):
        assert torch.equal(weigh(logits[i : i + 1], row)[0], together[i])


@pytest.mark.parametrize("num_candidates", [12, 100])
def test_looking_for_candidates_leaves_what_sorting_leaves(num_candidates):
    logits = torch.randint(0, 6, (6, 50), generator=torch.Generator().manual_seed(2)).float()  # equals everywhere
    rows = [
        (1.0, k, p, m) for k, p, m in [(1, 1.0, 0.0), (5, 0.7, 0.0), (12, 1.0, 0.2), (7, 0.9, 0.0)] + [(9, 1, 0)] * 2
    ]
    assert torch.equal(weigh(logits, *rows, num_candidates=num_candidates), weigh(logits, *rows))


@pytest.mark.parametrize("num_candidates", [None, 3])
def test_of_equal_logits_the_lower_ids_stay(num_candidates):
    logits = torch.tensor([[0.0, 0, 9, 0, 0, 9, 9, 0], [0.0, 0, 9, 0, 0, 0, 0, 0], [0.0] * 8])
    kept = weigh(logits, *[(1.0, 3, 1.0, 0.0)] * 3, num_candidates=num_candidates) > 0
    assert [row.nonzero().flatten().tolist() for row in kept] == [[2, 5, 6], [0, 1, 2], [0, 1, 2]]


def test_top_p_splits_equals_by_id_as_well():
    kept = weigh(torch.zeros(1, 8), (1.0, 0, 0.5, 0.0)) > 0
    assert kept[0].nonzero().flatten().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30])
def test_a_tiny_temperature_is_greedy(temperature):
    weights = token_weights(torch.tensor([[1.0, -3e38, 2.0, 1.9]]), torch.tensor([temperature], dtype=torch.float64))
    assert weights.tolist() == [[0, 0, 2**42, 0]]


def test_draw_inverts_the_cumulative_weights():
    weights = torch.tensor([[0, 1, 0, 3, 0]]).expand(5, -1)
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(weights, uniform).tolist() == [1, 1, 3, 3, 3]


def test_the_largest_vocabulary_does_not_overflow():
    weights = token_weights(torch.zeros(1, 2**20), torch.ones(1))
    assert int(weights.sum()) == 2**62
    uniform = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert int(draw(weights, uniform)) == 2**20 - 1
