"""`LLM.generate`: what transformers generates, whatever the batch, and with seeds that mean something."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphfuse.errors import CheckpointError, ConfigError, GenerationError
from graphfuse.generation import LLM, Job, SamplingParams

PROMPTS = ["The capital", "A", "One two three four five six seven. The cat sat on the mat.", "日本 🙂"]


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(checkpoint, device="cpu", compile=False, max_batch_size=8)


def transformers_greedy(reference, token_ids, max_tokens, eos=None):
    """Without padding: each prompt by itself."""
    output = reference.generate(
        torch.tensor([token_ids]), max_new_tokens=max_tokens, do_sample=False, eos_token_id=eos, pad_token_id=0
    )
    return output[0, len(token_ids) :].tolist()


def tokens(completions):
    return [c.token_ids for c in completions]


# --- greedy --------------------------------------------------------------------------------------------------------


def test_greedy_tokens_of_an_unequal_batch_are_those_of_transformers(llm, reference):
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    completions = llm.generate(PROMPTS, params)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.prompt_token_ids == llm.tokenizer(prompt)["input_ids"]
        assert completion.token_ids == transformers_greedy(reference, completion.prompt_token_ids, 24, eos=-1)
        assert completion.finish_reason == "length"
        assert completion.text == llm.tokenizer.decode(completion.token_ids, skip_special_tokens=True)


def test_rows_end_at_their_own_end_of_sequence(llm, reference, with_settings):
    free = tokens(llm.generate(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True)))
    eos = free[1][7]  # makes row 1 end after 8 tokens at the latest, and others where they happen to meet it
    stopping = LLM(with_settings("generation_config.json", eos_token_id=[eos]), device="cpu", compile=False)
    completions = stopping.generate(PROMPTS, SamplingParams(max_tokens=24))
    expected = [transformers_greedy(reference, c.prompt_token_ids, 24, eos=[eos, 1]) for c in completions]
    assert tokens(completions) == expected
    assert len(completions[1].token_ids) <= 8 and completions[1].finish_reason == "stop"
    assert len({len(t) for t in expected}) > 1
    ended = completions[1]
    assert ended.text == stopping.tokenizer.decode(ended.token_ids[:-1], skip_special_tokens=True)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_each_file_can_name_the_end_of_sequence(llm, with_settings, file):
    [free] = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=5, ignore_eos=True))
    changed = LLM(with_settings(file, eos_token_id=free.token_ids[2]), device="cpu", compile=False)
    [ended] = changed.generate([PROMPTS[0]], SamplingParams(max_tokens=5))
    assert ended.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[2]) + 1]


def test_a_batch_gives_what_its_prompts_give_one_by_one(llm):
    params = SamplingParams(max_tokens=16)
    assert llm.generate(PROMPTS, params) == [llm.generate([p], params)[0] for p in PROMPTS]


def test_more_prompts_than_fit_run_as_several_batches(llm, checkpoint):
    small = LLM(checkpoint, device="cpu", compile=False, max_batch_size=3)
    prompts = [*PROMPTS, *reversed(PROMPTS)]
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    seen = []
    completions = small.generate(prompts, params, on_completion=lambda i, c: seen.append((i, c)))
    assert completions == llm.generate(prompts, params)
    assert seen == list(enumerate(completions))


def test_a_used_cache_does_not_show_in_later_calls(llm):
    params = SamplingParams(max_tokens=10)
    first = llm.generate(["A"], params)
    llm.generate([PROMPTS[2]] * 8, params)
    assert llm.generate(["A"], params) == first


def test_the_context_length_ends_a_completion(checkpoint):
    llm = LLM(checkpoint, device="cpu", compile=False, max_length=20, max_batch_size=2)
    prompts = [[5] * 18, [6] * 19]
    completions = llm.generate(prompts, SamplingParams(max_tokens=50, ignore_eos=True))
    assert [len(c.token_ids) for c in completions] == [2, 1]
    assert {c.finish_reason for c in completions} == {"length"}


def test_no_prompts_give_no_completions(llm):
    assert llm.generate([]) == []


# --- compiled ------------------------------------------------------------------------------------------------------


def test_one_compiled_graph_serves_prefill_and_decode_of_every_batch(llm, checkpoint):
    params = SamplingParams(max_tokens=6)
    with LLM(checkpoint, device="cpu", max_batch_size=4, max_length=96) as compiled:
        for prompts in (["A"], PROMPTS, [PROMPTS[2]]):
            assert tokens(compiled.generate(prompts, params)) == tokens(llm.generate(prompts, params))
        assert compiled.report.num_graphs == 1


def test_a_cache_that_grows_under_a_compiled_model_keeps_the_tokens(llm, checkpoint):
    with LLM(checkpoint, device="cpu") as compiled:
        for prompts in (["A"], PROMPTS):
            params = SamplingParams(max_tokens=6)
            assert tokens(compiled.generate(prompts, params)) == tokens(llm.generate(prompts, params))


# --- sampling ------------------------------------------------------------------------------------------------------


def test_a_seed_reproduces_and_another_one_does_not(llm):
    one, same, other = (
        tokens(llm.generate(PROMPTS, SamplingParams(temperature=1.0, max_tokens=20, seed=s))) for s in (1, 1, 2)
    )
    assert one == same
    assert one != other


def test_equal_prompts_of_a_call_are_sampled_differently(llm):
    completions = llm.generate(["The"] * 3, SamplingParams(temperature=1.0, max_tokens=20, seed=0))
    assert len({tuple(t) for t in tokens(completions)}) == 3


def test_a_seeded_prompt_does_not_feel_the_batch_around_it(llm):
    params = [SamplingParams(temperature=0.8 + 0.1 * i, top_k=20 * i, seed=i, max_tokens=10 + i) for i in range(4)]
    together = llm.generate(PROMPTS, params)
    assert together == [llm.generate([prompt], [param])[0] for prompt, param in zip(PROMPTS, params, strict=True)]
    assert together[::-1] == llm.generate(PROMPTS[::-1], params[::-1])


def test_without_a_seed_calls_differ_even_after_manual_seed(llm):
    params = SamplingParams(temperature=1.0, max_tokens=20)
    torch.manual_seed(0)
    first = tokens(llm.generate(["The"], params))
    torch.manual_seed(0)
    assert tokens(llm.generate(["The"], params)) != first


def test_top_k_of_one_is_greedy(llm):
    greedy = llm.generate(PROMPTS, SamplingParams(max_tokens=8))
    assert llm.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=2.0, top_k=1)) == greedy


# --- text ----------------------------------------------------------------------------------------------------------


def test_text_is_cut_before_a_stop_string_that_spans_tokens(llm):
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=100, ignore_eos=True)
    [free] = llm.generate(["The"], params)
    pieces = [llm.tokenizer.decode([t]) for t in free.token_ids]
    # The end of one token's text and the beginning of the next one's, whole characters, not in the text before.
    first, stop = next(
        (i, pieces[i][-1:] + pieces[i + 1][:1])
        for i in range(10, 99)
        if (pieces[i] + pieces[i + 1]).isascii()
        and pieces[i][-1:] + pieces[i + 1][:1] not in llm.tokenizer.decode(free.token_ids[: i + 1])
    )
    [stopped] = llm.generate(["The"], replace(params, stop=[stop]))
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.token_ids == free.token_ids[: first + 2]


def test_streamed_text_adds_up_to_the_text(llm):
    shown = [""] * len(PROMPTS)
    calls = []

    def show(i, text):
        calls.append(i)
        shown[i] += text

    params = SamplingParams(temperature=1.5, seed=4, max_tokens=30)
    completions = llm.generate(PROMPTS, params, on_text=show)
    assert shown == [c.text for c in completions]
    assert completions == llm.generate(PROMPTS, params)
    assert len(calls) > 2 * len(PROMPTS)


def test_messages_go_through_the_chat_template(llm):
    messages = [{"role": "user", "content": "The cat"}]
    text = "<|user|>The cat</s><|assistant|>"
    params = SamplingParams(max_tokens=4)
    [from_messages] = llm.generate([messages], params)
    [from_text] = llm.generate([text], params)
    assert from_messages == from_text
    assert from_messages.prompt_token_ids == llm.tokenizer(text, add_special_tokens=False)["input_ids"]


# --- speed ---------------------------------------------------------------------------------------------------------


def test_stats_count_the_tokens_of_the_last_call(llm):
    completions = llm.generate(PROMPTS, SamplingParams(max_tokens=5))
    prompt_tokens = sum(len(c.prompt_token_ids) for c in completions)
    assert llm.stats.prefill_tokens + llm.stats.shared_tokens == prompt_tokens
    assert llm.stats.decode_tokens == sum(len(c.token_ids) - 1 for c in completions)
    assert llm.stats.prefill_tokens_per_second > 0
    assert "prefill" in llm.stats.to_text() and "decode" in llm.stats.to_text()


# --- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "Prompt 1 is empty. Give at least one token"),
        ([], "Prompt 1 is empty"),
        ("The cat sat on the mat. " * 40, "leaves no room in a context of 128. Shorten it"),
        ([3, 320], "token id 320, outside the vocabulary"),
        ([3, -1], "token id -1, outside the vocabulary"),
        ([3, "a"], "only messages, or only token ids"),
        ([True], "only messages, or only token ids"),
        (3.5, "Prompt 1 is of type float"),
        (b"abc", "Prompt 1 is of type bytes"),
        ([{"role": "user"}], 'needs a "role" and a "content"'),
        ("a\ud800", r"Prompt 1 has text that is not valid Unicode: character 1 is '\\ud800'"),
        ([{"role": "user", "content": "\ud800"}], "Prompt 1 has text that is not valid Unicode: character 0"),
        ([{"role": "user", "content": [{"text": "\ud800"}]}], "Prompt 1 has text that is not valid Unicode"),
        ([{"role": "wizard", "content": "a"}], "refused by the chat template .*unknown role wizard"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_named(llm, prompt, message):
    with pytest.raises(GenerationError, match=message):
        llm.generate(["A", prompt])


@pytest.mark.parametrize("prompts", ["text", [1, 2], [{"role": "user", "content": "a"}], 7])
def test_a_single_prompt_must_be_in_a_list(llm, prompts):
    with pytest.raises(GenerationError, match="list"):
        llm.generate(prompts)


def test_messages_without_a_template_are_refused(checkpoint, llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    assert not llm.has_chat_template
    with pytest.raises(GenerationError, match=r"no chat template\. Give plain text"):
        llm.generate([[{"role": "user", "content": "a"}]])


def test_as_many_params_as_prompts(llm):
    with pytest.raises(GenerationError, match="2 prompts but 1 SamplingParams"):
        llm.generate(["A", "B"], [SamplingParams()])


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [{"max_tokens": 3}], [None], 3])
def test_params_of_another_type_are_refused(llm, params):
    with pytest.raises(GenerationError, match=r"Parameters are of type \w+\. Give graphfuse\.SamplingParams"):
        llm.generate(["A"], params)


def test_jobs_of_another_type_are_refused(llm):
    with pytest.raises(GenerationError, match=r"A job is of type tuple\. Give graphfuse\.Job"):
        list(llm.complete([("key", "A", SamplingParams())]))
    [(_, error)] = llm.complete([Job("key", "A", None)])
    assert "Parameters are of type NoneType" in str(error)


def test_a_closed_llm_generates_nothing(checkpoint):
    with LLM(checkpoint, device="cpu", compile=False) as llm:
        pass
    for call in (lambda: llm.generate(["A"]), lambda: list(llm.complete([]))):
        with pytest.raises(ConfigError, match=r"This LLM is closed\. Make a new one"):
            call()


def test_logits_that_are_not_numbers_are_reported(checkpoint):
    llm = LLM(checkpoint, device="cpu", compile=False)
    with torch.no_grad():
        llm.model.norm.weight.fill_(float("nan"))
    with pytest.raises(
        GenerationError, match=r"Prompt 0: The logits hold NaN or infinity after 0 tokens\. Try dtype=float32"
    ):
        llm.generate(["A"])


def test_a_context_longer_than_the_model_was_made_for_is_refused(checkpoint):
    with pytest.raises(ConfigError, match="max_length=129 exceeds the model's 128 positions"):
        LLM(checkpoint, device="cpu", max_length=129)


def test_a_batch_of_none_is_refused(checkpoint):
    with pytest.raises(ConfigError, match="max_batch_size=0 is not a whole number of at least 1"):
        LLM(checkpoint, device="cpu", max_batch_size=0)


def test_a_checkpoint_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no tokenizer that can be read"):
        LLM(tmp_path, device="cpu")
