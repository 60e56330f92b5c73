"""`generate` of a compiled model of transformers, on one rank: prompts of all lengths in one graph, experts on the op,
and pipelines around it."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, pipeline

import graphfuse
from graphfuse.errors import GraphBreakError
from tests.transformers_matrix import tiny


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    yield
    torch._dynamo.reset()


def prompt(batch, length):
    return torch.randint(3, tiny.VOCAB, (batch, length), generator=torch.Generator().manual_seed(length))


def generate(model, ids, **more):
    return model.generate(ids, **{"max_length": 16, "min_length": 16, "do_sample": False, **more}).tolist()


def both(family):
    return tiny.build(family, torch.float32), graphfuse.compile(tiny.build(family, torch.float32))


def test_prompts_of_all_lengths_are_one_graph_beside_the_steps():
    whole, compiled = both("llama")
    for length in (5, 9, 2, 1):
        assert generate(compiled, prompt(2, length)) == generate(whole, prompt(2, length))
        assert compiled._prompts.compiled.report.num_graphs == 1
    assert compiled.report.num_graphs == 2
    assert not compiled.report.notes


def test_padded_prompts_keep_their_mask():
    whole, compiled = both("llama")
    ids, mask = prompt(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    assert generate(compiled, ids, attention_mask=mask) == generate(whole, ids, attention_mask=mask)
    assert generate(compiled, ids, attention_mask=mask) != generate(compiled, ids)


def test_a_prompt_that_cannot_be_traced_runs_as_the_model_is(monkeypatch):
    whole, compiled = both("llama")
    want = generate(whole, prompt(2, 5))
    assert generate(compiled, prompt(2, 5), disable_compile=True) == want

    def fails(**inputs):
        compiled._orig_mod(**inputs)  # a part of it may have run, and filled the cache
        raise GraphBreakError("There is a graph break. Mend it.")

    monkeypatch.setattr(compiled._prompts.compiled, "forward", fails)
    assert generate(compiled, prompt(2, 5)) == want
    (note,) = compiled.report.notes
    assert note.startswith("prompts of generate() run as the model is: ") and "graph break" in note
    assert compiled.report.num_graphs == 1


def test_experts_run_on_the_op_while_it_generates_and_only_then():
    whole, compiled = both("qwen3_moe")
    seen = set()

    def look(ids, scores):
        seen.add(compiled.config._experts_implementation)
        return scores

    assert generate(compiled, prompt(2, 5), logits_processor=[look]) == generate(whole, prompt(2, 5))
    assert seen == {"graphfuse"}
    assert compiled.get_experts_implementation() == {"": "grouped_mm"}
    assert len(compiled.report.moe) == 2
    seen.clear()
    generate(compiled, prompt(2, 5), logits_processor=[look], disable_compile=True)
    assert seen == {"grouped_mm"}  # the caller's choice


def test_a_text_generation_pipeline_takes_the_compiled_model():
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, tiny.VOCAB)}}
    words["<unk>"] = words.pop("w3")
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", padding_side="left"
    )
    tokenizer.chat_template = "{% for message in messages %}w7 {{ message['content'] }} {% endfor %}w8"
    whole, compiled = both("llama")
    chat = [{"role": "user", "content": "w11 w12 w13"}]
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    answers = [
        pipeline("text-generation", model=model, tokenizer=tokenizer)(chat, **settings) for model in (whole, compiled)
    ]
    assert answers[0] == answers[1]
    assert answers[1][0]["generated_text"][-1]["role"] == "assistant"
    assert compiled.report.traced
