"""Each row of a batch is sampled by its own rules, as transformers would, whatever the other rows are."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from graphfuse.generation import sampler as sampler_module
from graphfuse.generation.sampler import NOT_FINITE, Sampler, Uniforms
from graphfuse.generation.sampling import SamplingParams

CPU = torch.device("cpu")
NO_EOS = frozenset[int]()
EOS = frozenset({2, 9})
V = 50


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def started(*params, token_ids=(), eos=NO_EOS, vocab_size=V):
    """A sampler whose slots 1, 2, … sample with `params`."""
    sampler = Sampler(len(params) + 1, vocab_size, CPU)
    for slot, each in enumerate(params, 1):
        sampler.begin(slot, each, token_ids, eos)
    return sampler


def allowing(*rows, vocab_size=V):
    """The bitmask that allows these ids in each row; `None` allows all."""
    words = torch.zeros(len(rows), -(-vocab_size // 32), dtype=torch.int64)
    for row, ids in zip(words, rows, strict=True):
        for token_id in range(vocab_size) if ids is None else ids:
            row[token_id // 32] |= 1 << token_id % 32
    return words.to(torch.int32)


def test_greedy_rows_take_the_most_likely_token_and_the_lowest_id_of_equals():
    logits = randn(3, V)
    logits[1] = 0
    sampled = started(*[SamplingParams()] * 3)(logits, [1, 2, 3], [0, 0, 0], None)
    assert sampled.tokens.tolist() == [int(logits[0].argmax()), 0, int(logits[2].argmax())]
    assert (sampled.logprob, sampled.top_ids, sampled.top_logprobs) == (None, None, None)


def test_a_greedy_batch_is_argmax_and_a_check(monkeypatch):
    """Nothing of the other rules may cost it anything."""
    calls = []

    class Count(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(func.__name__)
            return func(*args, **(kwargs or {}))

    sampler = started(SamplingParams(), SamplingParams(min_tokens=3, max_tokens=9), eos=EOS)
    sampler(randn(2, V), [1, 2], [4, 3], None)
    with Count():
        sampler(randn(2, V, seed=1), [1, 2], [5, 4], None)
    assert sorted(c for c in calls if c not in ("randn", "manual_seed", "__get__")) == ["isfinite", "max", "where"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_of_any_dtype(dtype):
    logits = randn(2, V).to(dtype)
    everything = SamplingParams(temperature=1.0, repetition_penalty=1.2, min_tokens=2, logprobs=2, top_k=5)
    sampler = started(SamplingParams(), everything, token_ids=[3], eos=EOS)
    sampled = sampler(logits, [1, 2], [0, 0], numbers(0.5, 0.5), allowing(None, range(20)))
    assert sampled.tokens[0] == logits[0].argmax()
    assert sampled.top_logprobs.dtype == torch.float32


def test_draws_have_the_frequencies_of_the_distribution():
    """Pearson's chi-square, at a level of one in a million."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -30.0])
    count = 40_000
    sampler = started(SamplingParams(temperature=0.8, seed=0), vocab_size=6)
    uniforms = Uniforms(11)
    draws = torch.tensor([uniforms.next() for _ in range(count)], dtype=torch.float64)
    tokens = sampler(logits.expand(count, -1), [1] * count, [0] * count, draws).tokens
    observed = torch.bincount(tokens, minlength=6).double()
    expected = count * torch.softmax(logits.double() / 0.8, -1)
    assert observed[5] == 0
    assert float(((observed - expected)[:5] ** 2 / expected[:5]).sum()) < 33.4  # 4 degrees of freedom


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty):
    logits = 3 * randn(1, V)
    seen = [4, 4, 11, 31, 32, 49]
    sampler = started(SamplingParams(repetition_penalty=penalty, max_tokens=99), token_ids=seen)
    process = RepetitionPenaltyLogitsProcessor(penalty)
    for step in range(30):
        sampled = sampler(logits, [1], [step], None)
        expected = int(process(torch.tensor([seen]), logits).argmax())
        assert sampled.tokens.tolist() == [expected]
        seen.append(expected)


def test_the_penalty_changes_the_distribution_as_in_transformers():
    """Each token in turn stands at the edge of the draw: the cumulative shares agree to 1e-5."""
    logits, seen, count = 2 * randn(1, V), [1, 2, 3, 33], 20_000
    sampler = started(SamplingParams(temperature=1.0, repetition_penalty=1.5), token_ids=seen)
    shares = torch.softmax(RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([seen]), logits)[0].double(), -1)
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    plan = sampler._planned_for([1], [0])
    scores = sampler._processed(logits, plan, None).expand(count, -1)
    tokens = started(SamplingParams(temperature=1.0))(scores, [1] * count, [0] * count, grid).tokens
    frequencies = torch.bincount(tokens, minlength=V).double() / count
    torch.testing.assert_close(frequencies, shares, rtol=0, atol=1.01 / count)


def test_a_slot_forgets_the_sequence_before():
    logits = randn(1, V)
    best, second = logits[0].topk(2).indices.tolist()
    params = SamplingParams(repetition_penalty=100.0)
    sampler = started(params, token_ids=[best])
    assert sampler(logits, [1], [0], None).tokens.tolist() == [second]
    sampler.begin(1, params, [second], NO_EOS)
    assert sampler(logits, [1], [0], None).tokens.tolist() == [best]


def test_a_slot_samples_as_its_last_sequence_asks():
    logits = torch.zeros(1, V)
    sampler = started(SamplingParams(logprobs=2))
    assert sampler(logits, [1], [0], None).top_ids.shape == (1, 2)
    sampler.begin(1, SamplingParams(temperature=1.0), [], NO_EOS)
    sampled = sampler(logits, [1], [0], numbers(0.99))
    assert (sampled.tokens.tolist(), sampled.logprob) == ([49], None)


def test_going_on_after_a_preemption_is_as_if_there_had_been_none():
    params = SamplingParams(temperature=0.7, repetition_penalty=1.4, top_p=0.9, max_tokens=99)
    steps = [3 * randn(1, V, seed=s) for s in range(20)]

    def generate(broken_at):
        sampler, uniforms, tokens = started(params, token_ids=[7]), Uniforms(3), []
        for step, logits in enumerate(steps):
            if step == broken_at:
                sampler = started(params, params, token_ids=[7, *tokens])
                uniforms = Uniforms(3, skip=step)
            tokens += sampler(logits, [1], [step], numbers(uniforms.next())).tokens.tolist()
        return tokens

    assert len({tuple(generate(at)) for at in (None, 1, 13)}) == 1


def test_prompt_ids_beyond_the_vocabulary_are_ignored():
    sampler = started(SamplingParams(repetition_penalty=2.0, stop_token_ids=[V + 3]), token_ids=[V, V + 70], eos={V})
    assert sampler(randn(1, V), [1], [0], None).tokens.tolist() == [int(randn(1, V).argmax())]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_end_tokens_are_forbidden_until_min_tokens(temperature):
    logits = torch.full((1, V), -2.0)
    logits[0, [2, 9, 30]] = 40.0
    logits[0, 17] = 20.0
    params = SamplingParams(temperature=temperature, min_tokens=3, stop_token_ids=[30])
    sampler = started(params, eos=EOS)
    tokens = [int(sampler(logits, [1], [step], numbers(0.1)).tokens) for step in range(5)]
    assert tokens[:3] == [17] * 3
    assert set(tokens[3:]) <= {2, 9, 30}

    process = MinNewTokensLengthLogitsProcessor(4, 3, eos_token_id=[2, 9, 30])
    for step in range(5):
        scores = process(torch.zeros(1, 4 + step, dtype=torch.int64), logits.clone())
        assert (scores[0, 30] == float("-inf")) == (tokens[step] == 17)


def test_min_tokens_leaves_eos_alone_where_it_ends_nothing():
    logits = torch.zeros(1, V)
    logits[0, 2] = 5.0
    sampler = started(SamplingParams(min_tokens=3, ignore_eos=True), eos=EOS)
    assert sampler(logits, [1], [0], None).tokens.tolist() == [2]


def test_penalty_and_minimum_come_in_the_order_of_transformers():
    logits, seen = 3 * randn(1, V), [5, 6, 7]
    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.7), MinNewTokensLengthLogitsProcessor(3, 4, eos_token_id=[2, 9])]
    )
    sampler = started(SamplingParams(repetition_penalty=1.7, min_tokens=4), token_ids=seen, eos=EOS)
    expected = processors(torch.tensor([seen]), logits.clone())
    assert torch.equal(sampler._processed(logits, sampler._planned_for([1], [0]), None), expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_taken(temperature):
    sampler = started(*[SamplingParams(temperature=temperature)] * 2)
    allowed = [0, 31, 32, 49]
    seen = set()
    for step in range(60):
        bitmask = allowing(allowed, None)
        tokens = sampler(randn(2, V, seed=step), [1, 2], [step] * 2, numbers(step / 60, 0.5), bitmask).tokens
        seen.add(int(tokens[0]))
    assert seen == set(allowed)


def test_logprobs_are_those_of_the_models_own_distribution():
    logits = 3 * randn(3, V)
    loud = SamplingParams(temperature=2.0, top_k=4, repetition_penalty=1.5, logprobs=3)
    sampler = started(SamplingParams(), SamplingParams(logprobs=5), loud, token_ids=[1])
    sampled = sampler(logits, [1, 2, 3], [0] * 3, numbers(0.0, 0.0, 0.99))
    expected = torch.log_softmax(logits, -1)
    assert torch.equal(sampled.logprob, expected.gather(1, sampled.tokens[:, None])[:, 0])
    assert sampled.top_ids.shape == sampled.top_logprobs.shape == (3, 5)
    assert torch.equal(sampled.top_logprobs, expected.sort(descending=True).values[:, :5])
    assert torch.equal(sampled.top_logprobs, expected.gather(1, sampled.top_ids))


def test_logprobs_of_bfloat16_logits_are_float32():
    logits = (3 * randn(1, V)).bfloat16()
    sampled = started(SamplingParams(logprobs=1))(logits, [1], [0], None)
    assert torch.equal(sampled.top_logprobs[:, 0], torch.log_softmax(logits.float(), -1).amax(-1))


def test_no_alternatives_are_an_empty_list():
    sampled = started(SamplingParams(logprobs=0))(randn(1, V), [1], [0], None)
    assert sampled.logprob.shape == (1,)
    assert sampled.top_ids.shape == (1, 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_marked_and_disturb_no_other(bad):
    params = SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01, repetition_penalty=1.3, logprobs=2)
    logits = randn(4, V)
    broken = logits.clone()
    broken[1, 3] = broken[2] = bad
    uniforms = numbers(0.3, 0.4, 0.5, 0.6)
    whole, marked = (
        started(SamplingParams(), params, SamplingParams(), params)(each, [1, 2, 3, 4], [0] * 4, uniforms)
        for each in (logits, broken)
    )
    assert marked.tokens[1:3].tolist() == [NOT_FINITE] * 2
    for field in ("tokens", "logprob", "top_ids", "top_logprobs"):
        assert torch.equal(getattr(whole, field)[[0, 3]], getattr(marked, field)[[0, 3]])


def test_a_bad_logit_is_found_behind_the_bitmask_too():
    logits = randn(1, V)
    logits[0, 3] = float("nan")
    assert started(SamplingParams())(logits, [1], [0], None, allowing([4])).tokens.tolist() == [NOT_FINITE]


def test_a_row_without_an_allowed_token_is_marked():
    for params in (SamplingParams(), SamplingParams(temperature=1.0, top_p=0.5)):
        sampled = started(params)(randn(1, V), [1], [0], numbers(0.5), allowing([]))
        assert sampled.tokens.tolist() == [NOT_FINITE]


def test_a_marked_row_is_not_remembered():
    sampler = started(SamplingParams(repetition_penalty=5.0))
    sampler(torch.full((1, V), float("nan")), [1], [0], None)
    logits = torch.zeros(1, V)
    logits[0, :2] = torch.tensor([1.0, 0.9])
    assert sampler(logits, [1], [1], None).tokens.tolist() == [0]


def test_padding_rows_are_greedy():
    sampler = started(SamplingParams(temperature=1.0, repetition_penalty=2.0))
    tokens = sampler(randn(4, V), [1, 0, 0, 0], [0] * 4, numbers(0.5, 0.0, 0.0, 0.0)).tokens
    assert tokens[1:].tolist() == randn(4, V)[1:].argmax(-1).tolist()


def test_parts_of_a_batch_are_drawn_alike(monkeypatch):
    params = [SamplingParams(temperature=1.0, top_p=0.8, top_k=i) for i in range(7)]
    logits, uniforms = randn(7, V), torch.rand(7, dtype=torch.float64)

    def tokens():
        return started(*params)(logits, list(range(1, 8)), [0] * 7, uniforms).tokens.tolist()

    whole = tokens()
    monkeypatch.setattr(sampler_module, "_MAX_ELEMENTS", 2 * V)
    assert tokens() == whole


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 2000]),
    top_p=st.sampled_from([0.2, 0.8, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.5]),
    min_tokens=st.sampled_from([0, 2]),
    stop_token_ids=st.sampled_from([(), (4, 5)]),
    logprobs=st.sampled_from([None, 0, 4]),
)
ROWS = st.tuples(PARAMS, st.integers(0, 2**32), st.sampled_from([None, range(0, V, 2)]))


@settings(max_examples=150, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_what_a_row_gets_does_not_depend_on_its_neighbours(rows, random):
    """Every row alone, in a slot and a place of its own, against all of them at once; four steps."""
    order = random.sample(range(len(rows)), len(rows))
    slots = random.sample(range(1, 9), len(rows))
    together = Sampler(9, V, CPU)
    alone = [Sampler(2, V, CPU) for _ in rows]
    numbers_of = [Uniforms(seed) for _, seed, _ in rows]
    for i, (params, seed, _) in enumerate(rows):
        for sampler, slot in ((together, slots[i]), (alone[i], 1)):
            sampler.begin(slot, params, [seed % V, 7], EOS)
    for step in range(4):
        logits = [4 * randn(V, seed=seed + step).bfloat16() for _, seed, _ in rows]
        drawn = [u.next() for u in numbers_of]
        guided = [allowed for *_, allowed in rows]
        batch = together(
            torch.stack([logits[i] for i in order]),
            [slots[i] for i in order],
            [step] * len(rows),
            numbers(*[drawn[i] for i in order]),
            allowing(*[guided[i] for i in order]) if any(guided) else None,
        )
        for place, i in enumerate(order):
            mask = allowing(guided[i]) if guided[i] else None
            single = alone[i](logits[i][None], [1], [step], numbers(drawn[i]), mask)
            assert batch.tokens[place] == single.tokens[0]
            if rows[i][0].logprobs is not None:
                wanted = rows[i][0].logprobs
                assert batch.logprob[place] == single.logprob[0]
                assert torch.equal(batch.top_logprobs[place, :wanted], single.top_logprobs[0])


def test_uniforms_are_the_first_numbers_of_the_seeded_generator():
    expected = np.random.Generator(np.random.PCG64(5)).random(100).tolist()
    uniforms = Uniforms(5)
    assert [uniforms.next() for _ in range(100)] == expected
    for skip in (1, 31, 32, 33, 70):
        assert Uniforms(5, skip).next() == expected[skip]


def test_the_largest_seed_is_a_seed():
    assert 0 <= Uniforms(2**63 - 1).next() < 1
    assert Uniforms(5 + 2**32).next() != Uniforms(5).next(), "all bits of a seed count"
