"""Records from a JSON Lines file of any size, one at a time.

    {"id": …, "prompt": "text"}                                  may also have the fields of record.SAMPLING_FIELDS
    {"id": …, "messages": [{"role", "content"}, …]}
    {"custom_id": …, "method": "POST", "url": …, "body": {…}}    OpenAI's batch format: openai_batch.py

Each line is read by itself, so a file may mix them. A line that cannot be used is a record with an error, and the
others go on. Other keys of a line are left alone, so that a data set's own fields need not be removed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from graphfuse.errors import SchemaError, brief
from graphfuse.generation.openai_batch import read_request
from graphfuse.generation.record import Record, Unusable, id_key, line_key, sampling_fields
from graphfuse.jsonfile import parse_json

MAX_LINE = 64 << 20
"""Bytes. A longer line, or a file that has no lines, must not fill the memory."""


def read_records(path: str | Path) -> Iterator[Record]:
    """Every line that is not blank, in order. An id that an earlier line has makes the later one an error: 16 bytes of
    each id are kept.

    Raises:
        SchemaError: the file cannot be read, at once or in the middle.
    """
    seen: set[bytes] = set()
    try:
        with open_input(path) as file:
            for record in _records(file):
                if record.key in seen:
                    record = _twice(record)
                seen.add(record.key)
                yield record
    except OSError as error:
        raise _unreadable(path, error) from error


def open_input(path: str | Path) -> BinaryIO:
    """The file, which can be read as often as there are ranks. Raises `SchemaError`."""
    try:
        is_regular = Path(path).is_file() or not Path(path).exists()
        file = Path(path).open("rb") if is_regular else None  # noqa: SIM115
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if file is None:
        raise SchemaError(f"{path} is no regular file, and is read more than once. Write the prompts into one.")
    return file


def _unreadable(path: str | Path, error: Exception) -> SchemaError:
    return SchemaError(f"{path} cannot be read ({brief(error)}). Give an existing JSON Lines file.")


def _records(file: BinaryIO) -> Iterator[Record]:
    number = index = size = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        size += len(line)
        too_long = len(line) > MAX_LINE
        rest = line
        while too_long and not rest.endswith(b"\n") and (rest := file.readline(MAX_LINE)):
            size += len(rest)
        if too_long or line.strip():
            record = Record(number, index, size, line_key(number), hashlib.blake2b(line, digest_size=16).digest())
            if too_long:
                yield replace(record, error=f"Line {number} is longer than {MAX_LINE >> 20} MiB. Shorten it.")
            else:
                yield _read(record, line)
            index, size = index + 1, 0


def _read(record: Record, line: bytes) -> Record:
    number = record.line
    try:
        data = parse_json(line)
    except UnicodeDecodeError as error:
        return replace(record, error=f"Line {number} is not UTF-8 ({brief(error)}). Write it in that encoding.")
    except ValueError as error:
        return replace(record, error=f"Line {number} is not JSON ({brief(error)}). Write one JSON object a line.")
    if not isinstance(data, dict):
        return replace(record, error=f"Line {number} is not an object. {_FORM}")
    is_openai = "id" not in data and "custom_id" in data
    id = data.get("custom_id" if is_openai else "id")
    if id is None:
        return replace(record, error=f'Line {number} has no "id". {_FORM}')
    try:
        json.dumps(id, allow_nan=False)
    except ValueError:
        return replace(record, error=f'The "id" of line {number} holds a number that JSON has not. Give another one.')
    if is_openai and not isinstance(id, str):
        return replace(record, error=f'The "custom_id" of line {number} is not text. Give a string.')
    record = replace(record, id=id, key=id_key(id))
    try:
        if is_openai:
            return read_request(record, data)
        return replace(record, prompt=_prompt(data, number), sampling=sampling_fields(data, f"line {number}"))
    except Unusable as error:
        return replace(record, endpoint="chat" if is_openai else None, error=str(error))


_FORM = 'Write {"id": …, "prompt": …}.'


def _prompt(data: dict[str, Any], number: int) -> str | list[dict[str, Any]]:
    prompt, messages = data.get("prompt"), data.get("messages")
    if (prompt is None) == (messages is None):
        raise Unusable(f'Line {number} needs a "prompt" or "messages". Give exactly one of them.')
    if messages is None:
        if not isinstance(prompt, str):
            raise Unusable(f'The "prompt" of line {number} is not text. Give a string, or "messages".')
        if not prompt:
            raise Unusable(f'The "prompt" of line {number} is empty. Give some text to answer.')
        return prompt
    if not (isinstance(messages, list) and all(isinstance(m, dict) for m in messages)):
        raise Unusable(f'The "messages" of line {number} are not a list of objects. Write them so.')
    if not messages:
        raise Unusable(f'The "messages" of line {number} is empty. Give at least one message.')
    return messages


def _twice(record: Record) -> Record:
    """The record of a line whose id has been taken."""
    name = "id" if record.endpoint is None else "custom_id"
    error = f'The "{name}" {brief(record.id)} of line {record.line} is that of an earlier line. Give each its own.'
    return replace(record.without_prompt(), id=None, key=line_key(record.line), error=error)
