"""What `graphfuse generate` reads besides a checkpoint: files of prompts, and files of answers to go on with."""

from __future__ import annotations

import json
import re
from pathlib import Path

from graphfuse.errors import GenerationError, GraphfuseError, SchemaError
from graphfuse.generation.answer_file import AnswerFile, read_answered
from graphfuse.generation.answers import Format, error_line, read_answer
from graphfuse.generation.completion import Completion
from graphfuse.generation.jsonl import read_records
from graphfuse.generation.record import SAMPLING_FIELDS, refusal
from graphfuse.generation.sampling import SamplingParams
from graphfuse.generation.tokenize import PromptEncoder
from tests.fuzz.checks import check_message, keys_of, lines_of
from tests.generation.conftest import make_tokenizer

MESSAGES = [{"role": "user", "content": "A cat"}, {"role": "assistant", "content": "sat"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "A cat"}]}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORM = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
CHAT = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions"}
LINES = [
    {"id": 1, "prompt": "The capital", "max_tokens": 3, "stop": ["x"], "seed": 1},
    {"id": "b", "messages": MESSAGES, "label": 0.5},
    {**CHAT, "body": {"model": "m", "messages": PARTS, "max_tokens": 5, "logprobs": True, "top_logprobs": 2}},
    {
        **CHAT,
        "body": {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    },
    {
        **CHAT,
        "url": "/v1/completions",
        "body": {"prompt": [3, 4], "temperature": 1, "n": 2, "stop": "x", "logprobs": 1},
    },
]
LINE_WORDS = [
    *keys_of(LINES), *SAMPLING_FIELDS, "system", "user", "tool", "<s>", "</s>", [1, 2], 5, "json_object", "text",
    "max_completion_tokens", "tools", "logit_bias", "GET", "/v1/embeddings", "$ref", "#", "pattern", "string", "array",
]  # fmt: skip
_ENCODER: list[PromptEncoder] = []
_FORMAT = Format("m", lambda token_id: f"<{token_id}>", token_ids=True)


def read_prompts(folder: Path, data: bytes) -> str:
    file = folder / "prompts.jsonl"
    file.write_bytes(data)
    if not _ENCODER:
        _ENCODER.append(PromptEncoder(make_tokenizer(), vocab_size=320, max_length=64))
    ways, keys = set(), set()
    for record in read_records(file):
        message = record.error
        if message is None:
            assert record.prompt is not None and record.id is not None
            try:
                record.params(SamplingParams())
                token_ids = _ENCODER[0].encode(record.prompt)
                ways.add("prompt" if isinstance(record.prompt, str) else "messages")
                line = _FORMAT.answer(record.without_prompt(), [Completion("x", token_ids, "stop", [1])])
            except GenerationError as error:
                message = refusal(error)
                ways |= {*lines_of(error)[-1:]}
        else:
            assert record.prompt is None
            ways.add(re.sub(r'\d+|\(.*|is [^g].*|"[^"]*"', "", message))
        if message is not None:
            check_message(GraphfuseError(message))
            line = error_line(record, message)
        assert line.endswith(b"\n") and line.count(b"\n") == 1
        json.loads(line, parse_constant=refuse)
        known = read_answer(line)
        assert (known.key, known.is_error) == (record.key, message is not None)
        assert record.key not in keys
        keys.add(record.key)
    return ", ".join(sorted(ways)[:1])


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
ANSWERS = [
    {"id": 1, "text": "x", "finish_reason": "stop", "num_prompt_tokens": 3, "num_tokens": 1},
    {"id": "b", "error": "why"},
    {"id": None, "line": 4, "error": "why"},
    {"id": [2], "completions": [{"text": "x", "finish_reason": "stop", "num_tokens": 1}], "num_prompt_tokens": 3},
    {"id": "batch_req_0", "custom_id": "c", "response": {"status_code": 200, "body": {"usage": USAGE}}, "error": None},
]
ANSWER_WORDS = [*keys_of(ANSWERS), 1, "b", "prompt", [2]]


def read_answers(folder: Path, data: bytes) -> str:
    """What is read must be the same once the file is repaired, which changes nothing where it holds something else."""
    file = folder / "answers.jsonl"
    file.write_bytes(data)
    try:
        answered = read_answered([file])
    except SchemaError:
        with AnswerFile(file) as opened:
            try:
                opened.repair()
                raise AssertionError("it was repaired though it cannot be read")
            except SchemaError:
                assert file.read_bytes() == data
        raise
    with AnswerFile(file) as opened:
        opened.repair()
        opened.write(b'{"id": "one more", "error": "why"}\n')
    after = read_answered([file])
    assert answered.keys < after.keys or len(after.keys) == len(answered.keys)
    assert len(after.keys) <= len(answered.keys) + 1
    return f"{min(2, len(answered.keys))} answers, {min(1, answered.num_errors)} errors"
