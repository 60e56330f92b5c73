"""The engine gives each prompt what it gets alone, whatever the sizes, the arrivals and the room in the cache."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphfuse.errors import ConfigError, GenerationError
from graphfuse.generation import LLM, Job, SamplingParams
from graphfuse.generation.build import Sizes

TEXTS = [
    "The capital of France is",
    "The capital of Norway is Oslo, and",
    "A",
    "One two three four five six seven. One two three four five six seven. One two three",
    "日本 🙂",
    "The capital of France is Paris, and the capital of Norway is",
]
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Each text by itself, with plenty of room."""
    llm = LLM(checkpoint, device="cpu", compile=False)
    return [llm.generate([text], replace(GREEDY, max_tokens=5 + 3 * i))[0].token_ids for i, text in enumerate(TEXTS)]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.permutations(range(len(TEXTS))),
    batch=st.integers(1, 4),
    step=st.integers(1, 40),
    page_size=st.sampled_from([1, 4, 16]),
    cache=st.integers(96, 200),
)
def test_tokens_do_not_depend_on_order_chunks_batch_or_room(checkpoint, alone, order, batch, step, page_size, cache):
    llm = LLM(
        checkpoint, device="cpu", compile=False, max_batch_size=batch, max_step_tokens=step, page_size=page_size,
        cache_tokens=cache,
    )  # fmt: skip
    jobs = [Job(i, TEXTS[i], replace(GREEDY, max_tokens=5 + 3 * i)) for i in order]
    found = dict(llm.complete(iter(jobs)))
    assert {i: completions[0].token_ids for i, completions in found.items()} == dict(enumerate(alone))
    assert llm.progress.num_running == llm.progress.num_waiting == 0 and llm.progress.cache_used == 0.0


def test_a_cache_too_small_for_all_preempts_and_says_so(checkpoint, alone):
    llm = LLM(checkpoint, device="cpu", compile=False, max_batch_size=4, page_size=4, cache_tokens=100)
    params = [replace(GREEDY, max_tokens=5 + 3 * i) for i in range(len(TEXTS))]
    assert [c.token_ids for c in llm.generate(TEXTS, params)] == alone
    assert llm.stats.num_preempted > 0


def test_sampling_goes_on_where_it_was_after_a_preemption(checkpoint):
    params = [
        SamplingParams(max_tokens=30, temperature=1.0, seed=i, repetition_penalty=1.3, ignore_eos=True)
        for i in range(6)
    ]
    roomy = LLM(checkpoint, device="cpu", compile=False).generate(TEXTS, params)
    small = LLM(checkpoint, device="cpu", compile=False, max_batch_size=4, page_size=4, cache_tokens=100)
    assert small.generate(TEXTS, params) == roomy
    assert small.stats.num_preempted > 0


def test_equal_beginnings_are_computed_once(checkpoint):
    llm = LLM(checkpoint, device="cpu", compile=False, page_size=4)
    apart = LLM(checkpoint, device="cpu", compile=False, page_size=64)
    prompts = ["One two three four five six seven. " + end for end in ("The cat", "Paris", "A mat")]
    assert llm.generate(prompts, GREEDY) == apart.generate(prompts, GREEDY)
    assert llm.stats.shared_tokens > 0 and apart.stats.shared_tokens == 0
    total = sum(len(llm.encode(prompt)) for prompt in prompts)
    assert llm.stats.prefill_tokens == total - llm.stats.shared_tokens


def test_several_completions_of_a_prompt_have_seeds_of_their_own(checkpoint):
    llm = LLM(checkpoint, device="cpu", compile=False)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, n=3)
    two = llm.generate(TEXTS[:2], params)
    assert len(two) == 6 and len({tuple(c.token_ids) for c in two}) == 6
    assert [c.prompt_token_ids for c in two[:3]] == [llm.encode(TEXTS[0])] * 3
    assert llm.generate(TEXTS[:1], params) == two[:3]
    assert llm.generate(TEXTS[:1], replace(params, n=1)) == two[:1]
    [(key, completions)] = llm.complete([Job("k", TEXTS[0], params)])
    assert (key, completions) == ("k", two[:3])


def test_jobs_are_read_as_there_is_room_for_them(checkpoint):
    llm = LLM(checkpoint, device="cpu", compile=False, max_batch_size=2)
    taken = 0

    def jobs():
        nonlocal taken
        for i in range(40):
            taken += 1
            yield Job(i, TEXTS[i % 3], replace(GREEDY, max_tokens=4))

    seen = []
    for key, _ in llm.complete(jobs()):
        seen.append(key)
        assert taken <= len(seen) + 6
    assert sorted(seen) == list(range(40))


def test_a_job_that_cannot_be_used_yields_its_error_and_the_others_go_on(checkpoint):
    llm = LLM(checkpoint, device="cpu", compile=False, max_length=32)
    jobs = [Job(0, "A", GREEDY), Job(1, "", GREEDY), Job(2, "The cat " * 40, GREEDY), Job(3, "The", GREEDY)]
    found = dict(llm.complete(jobs))
    assert isinstance(found[1], GenerationError) and "is empty" in str(found[1])
    assert "leaves no room in a context of 32" in str(found[2])
    assert found[0] == llm.generate(["A"], GREEDY) and found[3] == llm.generate(["The"], GREEDY)


def test_a_text_whose_logits_are_not_finite_ends_alone_and_leaves_nothing_behind(checkpoint):
    """One token's embedding is NaN: texts that hold it fail, and the pages they had serve others."""
    llm = LLM(checkpoint, device="cpu", compile=False, max_batch_size=2, page_size=4, cache_tokens=64)
    sound = llm.generate(["A", "The mat"], GREEDY)
    [bad] = llm.tokenizer.encode("Z", add_special_tokens=False)
    with torch.no_grad():
        llm.model.embed_tokens.weight[bad] = float("nan")
    jobs = [Job("bad", [bad] * 9, GREEDY), *(Job(i, text, GREEDY) for i, text in enumerate(("A", "The mat")))]
    found = dict(llm.complete(jobs))
    assert isinstance(found["bad"], GenerationError) and "NaN or infinity" in str(found["bad"])
    assert [found[0][0].token_ids, found[1][0].token_ids] == [c.token_ids for c in sound]


def test_what_is_not_finite_in_pages_of_others_harms_nobody(checkpoint):
    """Texts that read a page table wider than theirs, and pages that an abandoned call has left."""
    llm = LLM(checkpoint, device="cpu", compile=False, max_batch_size=2, page_size=4, max_step_tokens=12)
    good = [[9] * 7, [11] * 2]
    expected = [c.token_ids for c in llm.generate(good, GREEDY)]
    llm.generate([[8] * 40, [10] * 40], GREEDY)  # fills the page tables of both slots
    [bad] = llm.tokenizer.encode("Z", add_special_tokens=False)
    with torch.no_grad():
        llm.model.embed_tokens.weight[bad] = float("nan")
    jobs = [Job("bad", [13] * 20 + [bad] + [14] * 40, GREEDY), *(Job(i, each, GREEDY) for i, each in enumerate(good))]
    found = dict(llm.complete(jobs))
    assert isinstance(found.pop("bad"), GenerationError)
    assert [found[i][0].token_ids for i in range(2)] == expected
    with pytest.raises(GenerationError, match=r"Prompt 0: .*NaN or infinity"):
        llm.generate([[bad] * 5, [bad] * 100], GREEDY)
    assert [c.token_ids for c in llm.generate(good, GREEDY)] == expected


def test_json_of_a_schema(checkpoint):
    pytest.importorskip("xgrammar")
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yes"]}}, "required": ["a"]}
    llm = LLM(checkpoint, device="cpu", compile=False)
    params = SamplingParams(max_tokens=110, temperature=1.0, seed=0, json_schema=schema)
    guided, free = llm.generate(["A", "The"], [params, replace(params, json_schema=None)])
    assert json.loads(guided.text)["a"] in ("x", "yes") and guided.finish_reason == "stop"
    assert free == llm.generate(["The"], [replace(params, json_schema=None)])[0]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size=0 is not a whole number of at least 1"),
        ({"page_size": 12}, "page_size=12 is not a power of two"),
        ({"cache_tokens": 8}, "A cache of 8 tokens has no page of 16"),
        ({"cache_tokens": 10**15}, "There is no memory for a cache of 1000000000000000 tokens"),
        ({"max_step_tokens": 1.5}, "max_step_tokens=1.5 is not a whole number"),
    ],
)
def test_sizes_that_cannot_be_used_are_refused(checkpoint, sizes, message):
    with pytest.raises(ConfigError, match=message):
        LLM(checkpoint, device="cpu", compile=False, **sizes)


def test_pages_that_kernels_cannot_read_are_refused_on_a_gpu():
    Sizes(page_size=4).require_served_on(torch.device("cpu"))
    Sizes(page_size=8).require_served_on(torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"page_size=4 is too small on a GPU\. Use 16"):
        Sizes(page_size=4).require_served_on(torch.device("cuda"))


def test_a_small_cache_bounds_the_context(checkpoint):
    llm = LLM(checkpoint, device="cpu", compile=False, cache_tokens=40)
    assert (llm.cache_tokens, llm.max_length) == (32, 32)
    [completion] = llm.generate(["A"], SamplingParams(max_tokens=100, ignore_eos=True))
    assert len(completion.prompt_token_ids) + len(completion.token_ids) == 32


def test_a_generator_that_is_left_early_leaves_nothing_behind_and_one_runs_at_a_time(checkpoint):
    llm = LLM(checkpoint, device="cpu", compile=False, max_batch_size=2)
    expected = llm.generate(TEXTS, GREEDY)
    results = llm.complete(Job(i, text, GREEDY) for i, text in enumerate(TEXTS))
    next(results)
    with pytest.raises(ConfigError, match="Other prompts are being completed"):
        llm.generate(["A"], GREEDY)
    results.close()
    assert llm.generate(TEXTS, GREEDY) == expected

    def interrupted(index, completion):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(TEXTS, GREEDY, on_completion=interrupted)
    assert (llm.progress.num_running, llm.progress.num_waiting, llm.progress.cache_used) == (0, 0, 0.0)
    assert llm.generate(TEXTS, GREEDY) == expected
