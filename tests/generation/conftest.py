"""A tiny random Llama with a tokenizer of its own, as a checkpoint on disk."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CORPUS = [
    "The capital of France is Paris, and the capital of Norway is Oslo.",
    "A cat sat on the mat; the mat was flat. One two three four five six seven.",
    "Straße, café, naïve, 日本語, and 🙂 are more than ASCII.",
]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
MAX_POSITIONS = 128


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=TEMPLATE,
    )


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors this small are slower on several threads, by far when the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The folder. Logits are spread enough for every sampled or greedy choice to be a clear one."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=2.0 * parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def reference(checkpoint):
    """The same weights in transformers."""
    return LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


@pytest.fixture
def with_settings(checkpoint, tmp_path):
    """A copy of the checkpoint with changed entries in one of its JSON files."""

    def change(file: str, **entries) -> str:
        folder = tmp_path / f"changed-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(checkpoint, folder)
        path = folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
        return str(folder)

    return change
