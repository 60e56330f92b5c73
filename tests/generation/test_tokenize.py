"""Prompts and end tokens: what a tokenizer or a file of a checkpoint gets wrong is said before a model sees it."""

from __future__ import annotations

import json

import pytest
from transformers import LlamaConfig

from graphfuse.errors import CheckpointError, GenerationError
from graphfuse.generation.tokenize import PromptEncoder, eos_token_ids, load_tokenizer
from tests.generation.conftest import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def encoder(tokenizer, vocab_size=320) -> PromptEncoder:
    return PromptEncoder(tokenizer, vocab_size=vocab_size, max_length=64)


def test_end_tokens_are_those_of_all_three_places(tmp_path, tokenizer):
    config = LlamaConfig(eos_token_id=[7, 8])
    assert eos_token_ids(tmp_path, config, tokenizer) == {7, 8, tokenizer.eos_token_id}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert eos_token_ids(tmp_path, config, tokenizer) == {7, 8, 9, tokenizer.eos_token_id}


@pytest.mark.parametrize("value", ["</s>", "12", 1.0, True, [1, "2"], {"a": 1}], ids=str)
def test_an_end_token_that_is_no_id_is_named(tmp_path, tokenizer, value):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(
        CheckpointError, match=r"generation_config\.json has eos_token_id=.* It must be an id or a list"
    ):
        eos_token_ids(tmp_path, LlamaConfig(), tokenizer)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 9000], ids=str)
def test_a_damaged_file_of_settings_is_no_missing_one(tmp_path, tokenizer, content):
    (tmp_path / "generation_config.json").write_bytes(content[:9000])
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be read"):
        eos_token_ids(tmp_path, LlamaConfig(), tokenizer)
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_of_another_model_is_noticed(tokenizer):
    text = "The capital of France is Paris."
    assert encoder(tokenizer).encode(text)
    with pytest.raises(GenerationError, match=r"has the token id \d+, but the model's vocabulary has 100 ids"):
        encoder(tokenizer, vocab_size=100).encode(text)


def test_messages_nested_deeper_than_the_stack_are_an_error_or_an_answer(tokenizer):
    content: list = []
    for _ in range(100_000):
        content = [content]
    with pytest.raises(GenerationError, match="refused by the chat template"):
        encoder(tokenizer).encode([{"role": "user", "content": content}])
