"""`Record`: one line of an input file, and the fields of a line that say how its answer is sampled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from graphfuse.errors import GenerationError, brief
from graphfuse.generation.sampling import SamplingParams

Endpoint = Literal["chat", "completions"]
"""Which of OpenAI's endpoints a line of its batch format asks."""

_COUNTS = ("max_tokens", "min_tokens", "top_k", "seed", "logprobs", "n")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
SAMPLING_FIELDS = (*_COUNTS, *_NUMBERS, "stop", "stop_token_ids", "ignore_eos", "json_schema")
"""The fields of `SamplingParams` that a line may have."""


class Unusable(Exception):
    """Why a line cannot be used: two sentences for its error. Never leaves the package."""


@dataclass(frozen=True)
class Record:
    """A prompt, or why there is none."""

    line: int
    """Its number in the file, from 1."""

    index: int
    """Its place among the lines that are not blank, from 0."""

    size: int
    """Bytes, with the blank lines before it."""

    key: bytes
    """16 bytes that stand for the id, in the input as in the output; for the line, where no id can."""

    digest: bytes = b""
    """Of the whole line, for ranks to compare what they have read."""

    id: Any = None
    """What JSON has but null. None: there is none, or an earlier line has it."""

    endpoint: Endpoint | None = None
    """Set for a line of OpenAI's batch format, whose answer is written in that format too."""

    prompt: str | list[dict[str, Any]] | list[int] | None = None
    is_raw: bool = False
    """The prompt goes to the model as it is, whatever chat template there is."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The sampling fields that the line has, of the right types."""

    error: str | None = None

    def params(self, shared: SamplingParams) -> SamplingParams:
        """`shared` with this line's own fields. A shared seed becomes that of the line's place in the file, so that
        equal prompts get different answers, and neither a resume nor a broken line changes what others get.

        Raises:
            GenerationError: a value is out of its range.
        """
        own: dict[str, Any] = dict(self.sampling)
        if shared.seed is not None:
            own.setdefault("seed", (shared.seed + self.index) % 2**63)
        return replace(shared, **own) if own else shared

    def without_prompt(self) -> Record:
        """What its answer needs, for as long as it is being made."""
        return replace(self, prompt=None, sampling={})


def id_key(id: Any) -> bytes:
    """The key of an id. 1, 1.0 and "1" are different ids."""
    return _digest("id " + json.dumps(id, sort_keys=True))


def line_key(line: int) -> bytes:
    """The key of a line that has no id of its own."""
    return _digest(f"line {line}")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def sampling_fields(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Those of `SAMPLING_FIELDS` that `data` has and that are not null.

    Raises:
        Unusable: one is of a wrong type.
    """
    found = {name: data[name] for name in SAMPLING_FIELDS if data.get(name) is not None}
    for name, value in found.items():
        found[name] = _checked(name, value, where)
    return found


def _checked(name: str, value: Any, where: str) -> Any:
    if name in _COUNTS or name in _NUMBERS:
        kind = "a whole number" if name in _COUNTS else "a number"
        fits = type(value) is int and -(2**63) <= value < 2**63
        if not fits and not (name in _NUMBERS and type(value) is float):
            raise _wrong(name, value, where, kind)
        return value
    if name == "stop":
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise _wrong(name, value, where, "text, or a list of texts")
        return tuple(texts)
    if name == "stop_token_ids":
        if not isinstance(value, list) or not all(type(i) is int and 0 <= i < 2**63 for i in value):
            raise _wrong(name, value, where, "a list of token ids")
        return tuple(value)
    if name == "ignore_eos":
        if not isinstance(value, bool):
            raise _wrong(name, value, where, "true or false")
        return value
    if not isinstance(value, dict):
        raise _wrong(name, value, where, "a JSON schema, which is an object")
    return value


def _wrong(name: str, value: Any, where: str, kind: str) -> Unusable:
    return Unusable(f'The "{name}" of {where} is {brief(value)}. Give {kind}, or leave it out.')


def refusal(error: GenerationError) -> str:
    """The message of an error as a line of output holds it: printable, on one line, of bounded length."""
    text = brief(error, 1000)
    return text if text.endswith((".", ")", "…")) else text + "."
