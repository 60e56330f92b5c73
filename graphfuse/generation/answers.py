"""Lines of output: the answer to a record, or why there is none, in the form that its line of input has.

{"id", "text", "finish_reason", "num_prompt_tokens", "num_tokens"}     + "token_ids", "logprobs" where asked for
{"id", "completions": [{"text", "finish_reason", "num_tokens"}, …], "num_prompt_tokens"}         for n above 1
{"id", "error"}
{"id": null, "line", "error"}              where the line has no id that could name it, or that of an earlier line
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphfuse.generation import openai_batch
from graphfuse.generation.completion import Completion
from graphfuse.generation.openai_batch import LEAST_LOGPROB, TokenText
from graphfuse.generation.record import Record, id_key, line_key
from graphfuse.jsonfile import parse_json


@dataclass(frozen=True)
class Format:
    """What all lines of a run have in common."""

    model: str
    """The name of the model, which OpenAI's format has in each line."""

    token_text: TokenText
    token_ids: bool = False
    """Whether lines have the ids of the generated tokens."""

    def answer(self, record: Record, completions: Sequence[Completion]) -> bytes:
        """The line for a record that was completed, once or `n` times."""
        if record.endpoint is not None:
            return _line(
                openai_batch.answer(
                    record, completions, self.model, token_ids=self.token_ids, token_text=self.token_text
                )
            )
        each = [self._completion(completion) for completion in completions]
        num_prompt_tokens = len(completions[0].prompt_token_ids)
        if len(each) > 1:
            return _line({"id": record.id, "completions": each, "num_prompt_tokens": num_prompt_tokens})
        [only] = each
        first = {name: only.pop(name) for name in ("text", "finish_reason")}
        return _line({"id": record.id, **first, "num_prompt_tokens": num_prompt_tokens, **only})

    def _completion(self, completion: Completion) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "num_tokens": len(completion.token_ids),
        }
        if self.token_ids:
            fields["token_ids"] = completion.token_ids
        if completion.logprobs is not None:
            fields["logprobs"] = [
                {**self._token(token.token_id, token.logprob), "top": [self._token(*each) for each in token.top]}
                for token in completion.logprobs
            ]
        return fields

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token_id": token_id, "token": self.token_text(token_id), "logprob": max(logprob, LEAST_LOGPROB)}


def error_line(record: Record, message: str) -> bytes:
    """The line for a record that was not completed."""
    if record.endpoint is not None:
        return _line(openai_batch.refusal(record, message))
    if record.id is None:
        return _line({"id": None, "line": record.line, "error": message})
    return _line({"id": record.id, "error": message})


def _line(data: dict[str, Any]) -> bytes:
    try:
        return json.dumps(data, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair in an id: JSON can escape it, UTF-8 cannot hold it
        return json.dumps(data).encode() + b"\n"


BEGINNING = b'{"id": '
"""How every line begins, and so one that was cut short."""


@dataclass(frozen=True)
class Known:
    """What a line of output tells of itself."""

    key: bytes
    """That of its record."""

    id: Any
    """None: it stands for a line, whatever its id."""

    is_error: bool
    num_prompt_tokens: int | None
    """None where the line does not say."""


def read_answer(line: bytes) -> Known:
    """What a line of output says.

    Raises:
        ValueError: it is none.
    """
    data = parse_json(line)
    if not isinstance(data, dict) or "id" not in data:
        raise ValueError("it is no answer")
    if "custom_id" in data:
        id, is_error, counts = data["custom_id"], data.get("error") is not None, _usage(data)
    else:
        id, is_error, counts = data["id"], "error" in data, data
        if not is_error and "text" not in data and "completions" not in data:
            raise ValueError("it has neither a text nor an error")
    num_prompt_tokens = counts.get("num_prompt_tokens", counts.get("prompt_tokens"))
    if id is None:
        if type(data.get("line")) is not int:
            raise ValueError("it has neither an id nor a line")
        return Known(line_key(data["line"]), None, is_error, None)
    return Known(id_key(id), id, is_error, num_prompt_tokens if type(num_prompt_tokens) is int else None)


def _usage(data: dict[str, Any]) -> dict[str, Any]:
    found: Any = data
    for name in ("response", "body", "usage"):
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}
