"""Prompts become token ids: plain text, chat messages through the tokenizer's template, or ids as they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from graphfuse.errors import CheckpointError, GenerationError, brief
from graphfuse.jsonfile import read_json

_LOOKED_FOR = ("tokenizer_file", "special_tokens_map_file", "added_tokens_file")

Message = dict[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]
"""Text, a conversation of {"role": …, "content": …} messages, or token ids."""


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The checkpoint's own tokenizer, from files of its folder alone and without code of its own.

    Raises `CheckpointError` when there is none that can be read, or when it asks for more than that.
    """
    _check_paths(Path(path) / "tokenizer_config.json")
    try:
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:  # transformers raises OSError, ValueError, TypeError, … for a missing or broken one
        raise CheckpointError(
            f"{path} has no tokenizer that can be read ({type(error).__name__}: {brief(error, 300)}). "
            "Put its tokenizer files (tokenizer.json, tokenizer_config.json) beside the weights."
        ) from error


def _check_paths(file: Path) -> None:
    """Refuses settings that transformers (5.24) passes on to a tokenizer, and that make it open any path they name.

    The names of files that it looks for itself, and puts in their place, stand in many published configs.
    """
    for key, value in _optional_json(file).items():
        leads_out = any(separator in json.dumps(value, ensure_ascii=False) for separator in ("/", "\\\\"))
        names_files = key == "init_inputs" or (key.endswith("_file") and key not in _LOOKED_FOR)
        if names_files and leads_out:
            raise CheckpointError(
                f"{file} has {brief(key)[1:-1]}={brief(value)}, a path of its own, which would be opened wherever it "
                "leads. Remove it, or use a checkpoint from a source that you trust."
            )


def _optional_json(file: Path) -> dict[str, Any]:
    """The object in a file that may be missing. Raises `CheckpointError`."""
    if not file.exists():
        return {}
    try:
        values = read_json(file)
        if not isinstance(values, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({brief(error)}). Check or download it again.") from error
    return values


def eos_token_ids(path: str | Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that ends a sequence, from generation_config.json, the model's config and the tokenizer.

    Chat models often end a turn with another token than the pretraining one, and name them in different files.

    Raises:
        CheckpointError: generation_config.json is damaged, or what names the token is no id.
    """
    file = Path(path) / "generation_config.json"
    named = {
        str(file): _optional_json(file).get("eos_token_id"),
        "The model's config": config.get_text_config().eos_token_id,
        "The tokenizer": tokenizer.eos_token_id,
    }
    ids: set[int] = set()
    for source, value in named.items():
        each = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if not all(type(token_id) is int for token_id in each):
            raise CheckpointError(f"{source} has eos_token_id={brief(value)}. It must be an id or a list of ids.")
        ids.update(each)
    return frozenset(ids)


class PromptEncoder:
    """Turns prompts into token ids and refuses what the model cannot take."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int, max_length: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._max_length = max_length

    @property
    def has_chat_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def encode(self, prompt: Prompt, name: str = "The prompt") -> list[int]:
        """The token ids of one prompt: at least one, with room for at least one more. Otherwise raises
        `GenerationError`, which begins with `name`."""
        token_ids = self._token_ids(prompt, name)
        if not token_ids:
            raise GenerationError(f"{name} is empty. Give at least one token to continue from.")
        if max(token_ids) >= self.vocab_size:
            raise GenerationError(
                f"{name} has the token id {max(token_ids)}, but the model's vocabulary has {self.vocab_size} ids. "
                "Check that the tokenizer belongs to the model."
            )
        if len(token_ids) >= self._max_length:
            raise GenerationError(
                f"{name} has {len(token_ids)} tokens, which leaves no room in a context of {self._max_length}. "
                "Shorten it, or raise max_length if the model allows more."
            )
        return token_ids

    def _token_ids(self, prompt: Prompt, name: str) -> list[int]:
        if isinstance(prompt, str):
            _check_text(prompt, name)
            return list(self.tokenizer(prompt)["input_ids"]) if prompt else []
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
            raise GenerationError(
                f"{name} is of type {type(prompt).__name__}. Give text, a list of messages, or a list of token ids."
            )
        if prompt and all(isinstance(message, dict) for message in prompt):
            return self._render(prompt, name)
        token_ids: list[int] = []
        for token_id in prompt:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise GenerationError(
                    f"{name} holds {brief(token_id)}. A list must hold only messages, or only token ids."
                )
            if not 0 <= token_id < self.vocab_size:
                raise GenerationError(
                    f"{name} holds token id {brief(token_id)}, outside the vocabulary of {self.vocab_size}. "
                    "Encode it with this model's own tokenizer."
                )
            token_ids.append(token_id)
        return token_ids

    def _render(self, messages: Sequence[Any], name: str) -> list[int]:
        for message in messages:
            if not isinstance(message.get("role"), str) or "content" not in message:
                raise GenerationError(
                    f'{name} has the message {brief(message)}. Each message needs a "role" and a "content".'
                )
        if not self.has_chat_template:
            raise GenerationError(
                f"{name} is a conversation, but this tokenizer has no chat template. Give plain text."
            )
        _check_text(messages, name)
        try:
            encoded: Any = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except Exception as error:  # a template is a program of its own; what it raises is about the messages
            raise GenerationError(
                f"{name} is refused by the chat template ({brief(error)}). Change the roles or their order."
            ) from error
        return list(encoded["input_ids"])


def _check_text(value: Any, name: str) -> None:
    """Refuses half surrogate pairs, which JSON can write and no tokenizer reads, anywhere in text or messages."""
    waiting = [value]  # not by recursion: messages may be nested deeper than the stack allows
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            try:
                part.encode()
            except UnicodeEncodeError as error:
                raise GenerationError(
                    f"{name} has text that is not valid Unicode: character {error.start} is {part[error.start]!a}, "
                    "half of a surrogate pair. Write the whole character."
                ) from error
        elif isinstance(part, dict):
            waiting.extend(part.values())
        elif isinstance(part, Sequence):
            waiting.extend(part)
