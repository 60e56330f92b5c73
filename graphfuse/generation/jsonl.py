"""Prompts from a JSON Lines file, completions into another one.

    in   {"id": …, "prompt": "text"}                   out  {"id", "text", "token_ids", "finish_reason"}
         {"id": …, "messages": [{"role", "content"}]}       {"id", "error"}

A line that cannot be used becomes an error in its place, and the others go on. Other keys of a line are left alone, so
that a data set's own fields need not be removed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from graphfuse.errors import SchemaError, brief
from graphfuse.generation.completion import Completion
from graphfuse.jsonfile import parse_json


@dataclass(frozen=True)
class Record:
    """One line of input: a prompt, or why there is none."""

    id: Any
    prompt: str | list[dict[str, Any]] | None = None
    error: str | None = None


def read_records(path: str | Path) -> list[Record]:
    """Every line that is not blank, in order. Raises `SchemaError` if the file cannot be read at all."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except (OSError, ValueError) as error:
        raise SchemaError(f"{path} cannot be read ({brief(error)}). Give an existing JSON Lines file.") from error
    return [_record(line, number) for number, line in enumerate(lines, 1) if line.strip()]


def _record(line: bytes, number: int) -> Record:
    try:
        data = parse_json(line)
    except ValueError as error:
        return Record(None, error=f"Line {number} is not JSON ({brief(error)}). Write one JSON object a line.")
    if not isinstance(data, dict) or "id" not in data:
        return Record(None, error=f'Line {number} is not an object with an "id". Write {{"id": …, "prompt": …}}.')
    try:
        json.dumps(data["id"], allow_nan=False)
    except ValueError:
        return Record(None, error=f'The "id" of line {number} holds a number that JSON has not. Give another one.')
    prompt, messages = data.get("prompt"), data.get("messages")
    if (prompt is None) == (messages is None):
        return Record(data["id"], error=f'Line {number} needs a "prompt" or "messages". Give exactly one of them.')
    if prompt is not None and not isinstance(prompt, str):
        return Record(data["id"], error=f'The "prompt" of line {number} is not text. Give a string, or "messages".')
    if messages is not None and not (isinstance(messages, list) and all(isinstance(m, dict) for m in messages)):
        return Record(data["id"], error=f'The "messages" of line {number} are not a list of objects. Write them so.')
    if messages == []:
        return Record(data["id"], error=f'The "messages" of line {number} is empty. Give at least one message.')
    return Record(data["id"], prompt=prompt if messages is None else messages)


def completion_line(record: Record, completion: Completion) -> str:
    return _line(
        {
            "id": record.id,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
        }
    )


def error_line(record: Record) -> str:
    return _line({"id": record.id, "error": record.error})


def _line(data: dict[str, Any]) -> str:
    line = json.dumps(data, ensure_ascii=False) + "\n"
    try:
        line.encode()
    except UnicodeEncodeError:  # half a surrogate pair in an id: JSON can escape it, UTF-8 cannot hold it
        return json.dumps(data) + "\n"
    return line


def partial_path(path: Path) -> Path:
    """What `written_at_once` writes to until it is done."""
    return path.with_name(path.name + ".partial")


@contextmanager
def written_at_once(path: str | Path) -> Iterator[TextIO]:
    """A file to write to. It grows as `path`.partial, and becomes `path` when the block ends without an error: whoever
    sees `path` sees all of it, and a run that broke off leaves what it had beside it."""
    path = Path(path)
    partial = partial_path(path)
    try:
        file = partial.open("w", encoding="utf-8")
    except OSError as error:
        raise SchemaError(
            f"{partial} cannot be written ({error.strerror}). Give an output path in an existing, writable folder."
        ) from error
    with file:
        yield file
    os.replace(partial, path)
