"""Sampling draws from the right distribution, exactly, and each row by itself."""

import pytest
import torch

from graphfuse.generation.sampler import NOT_FINITE, Sampler, draw, token_weights, truncate
from graphfuse.generation.sampling import SamplingParams

CPU = torch.device("cpu")


def reference_distribution(logits, temperature, top_k, top_p):
    """Softmax, the k most likely, renormalise, the smallest set that reaches top_p, renormalise: in plain loops."""
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
    result = torch.zeros(len(probabilities), dtype=torch.float64)
    for i in kept:
        result[i] = probabilities[i]
    return result / result.sum()


def settings(*rows):
    temperature, top_k, top_p = zip(*rows, strict=True)
    return torch.tensor(temperature, dtype=torch.float64), torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.9, 1.0])
def test_weights_follow_the_reference_distribution(temperature, top_k, top_p):
    logits = 2 * torch.randn(3, 37, generator=torch.Generator().manual_seed(0))
    t, k, p = settings(*[(temperature, top_k, top_p)] * 3)
    weights = truncate(token_weights(logits, t), k, p)
    for row in range(3):
        expected = reference_distribution(logits[row], temperature, top_k, top_p)
        actual = weights[row].double() / weights[row].sum()
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
        assert ((weights[row] > 0) == (expected > 2**-42 * expected.max())).all()


def test_rows_of_a_batch_keep_their_own_settings():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    rows = [(0.7, 0, 1.0), (1.0, 3, 1.0), (1.3, 0, 0.6), (1.0, 10, 0.8)]
    together = truncate(token_weights(logits, settings(*rows)[0]), *settings(*rows)[1:])
    for i, row in enumerate(rows):
        t, k, p = settings(row)
        assert (truncate(token_weights(logits[i : i + 1], t), k, p)[0] == together[i]).all()


def test_of_equal_logits_top_k_keeps_the_lower_ids():
    weights = truncate(token_weights(torch.zeros(1, 8), torch.ones(1)), torch.tensor([3]), torch.ones(1))
    assert weights[0].nonzero().flatten().tolist() == [0, 1, 2]


def test_draw_inverts_the_cumulative_weights():
    weights = torch.tensor([[0, 1, 0, 3, 0]]).expand(5, -1)
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(weights, uniform).tolist() == [1, 1, 3, 3, 3]


def test_the_largest_vocabulary_does_not_overflow():
    weights = token_weights(torch.zeros(1, 2**20), torch.ones(1))
    assert int(weights.sum()) == 2**62
    uniform = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert int(draw(weights, uniform)) == 2**20 - 1


def test_draws_have_the_frequencies_of_the_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -30.0]])
    count = 20_000
    sampler = Sampler([SamplingParams(temperature=1.0, max_tokens=count)], [11], CPU)
    tokens = torch.cat([sampler(logits, step) for step in range(count)])
    frequencies = torch.bincount(tokens, minlength=5).double() / count
    # Four standard deviations of a share near one half.
    torch.testing.assert_close(frequencies, torch.softmax(logits[0].double(), -1), rtol=0, atol=4 * 0.5 / count**0.5)


def test_greedy_and_sampled_rows_mix():
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(2))
    mixed = Sampler([SamplingParams(), SamplingParams(temperature=1.0)], [0, 7], CPU)
    alone = Sampler([SamplingParams(temperature=1.0)], [7], CPU)
    for step in range(20):
        tokens = mixed(logits, step)
        assert tokens[0] == logits[0].argmax()
        assert tokens[1] == alone(logits[1:], step)[0]


def test_a_longer_completion_goes_on_where_a_shorter_one_ended():
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(3))
    short, long = (Sampler([SamplingParams(temperature=1.0, max_tokens=n)], [5], CPU) for n in (7, 3000))
    assert [int(short(logits, s)) for s in range(7)] == [int(long(logits, s)) for s in range(7)]


def test_the_first_rows_alone_get_the_same_tokens():
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(4))
    sampler = Sampler([SamplingParams(temperature=1.0)] * 3, [1, 2, 3], CPU)
    assert sampler(logits[:2], 5).tolist() == sampler(logits, 5)[:2].tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_marked(bad, temperature):
    logits = torch.zeros(2, 10)
    logits[1, 3] = bad
    tokens = Sampler([SamplingParams(temperature=temperature)] * 2, [0, 1], CPU)(logits, 0)
    assert tokens[0] >= 0
    assert tokens[1] == NOT_FINITE


def test_masked_tokens_are_never_drawn():
    logits = torch.full((1, 10), float("-inf"))
    logits[0, 4] = -3.0
    sampler = Sampler([SamplingParams(temperature=5.0)], [0], CPU)
    assert {int(sampler(logits, s)) for s in range(100)} == {4}
