"""Lines of output in our own format, and what is known from reading them again."""

import json
from dataclasses import replace

import pytest

from graphfuse.generation.answers import Format, error_line, read_answer
from graphfuse.generation.completion import Completion, TokenLogprob
from graphfuse.generation.record import Record, id_key, line_key

RECORD = Record(line=4, index=3, size=9, key=id_key("x"), id="x", prompt="p")
FORMAT = Format("tiny", lambda token_id: f"<{token_id}>")
COMPLETION = Completion("é\n", [3, 4], "stop", [1])


def test_a_completion_is_a_line():
    line = FORMAT.answer(RECORD, [COMPLETION])
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    data = json.loads(line)
    assert data == {"id": "x", "text": "é\n", "finish_reason": "stop", "num_prompt_tokens": 1, "num_tokens": 2}
    assert list(data) == ["id", "text", "finish_reason", "num_prompt_tokens", "num_tokens"]
    known = read_answer(line)
    assert (known.key, known.is_error, known.num_prompt_tokens) == (RECORD.key, False, 1)


def test_token_ids_and_log_probabilities_are_there_if_asked_for():
    logprobs = [TokenLogprob(3, -0.5, [(4, float("-inf"))]), TokenLogprob(4, -1.0, [(3, -2.0)])]
    completion = replace(COMPLETION, logprobs=logprobs)
    data = json.loads(replace(FORMAT, token_ids=True).answer(RECORD, [completion]))
    assert data["token_ids"] == [3, 4]
    assert data["logprobs"] == [
        {"token_id": 3, "token": "<3>", "logprob": -0.5, "top": [{"token_id": 4, "token": "<4>", "logprob": -9999.0}]},
        {"token_id": 4, "token": "<4>", "logprob": -1.0, "top": [{"token_id": 3, "token": "<3>", "logprob": -2.0}]},
    ]


def test_several_completions_stand_in_a_list():
    line = FORMAT.answer(RECORD, [COMPLETION, replace(COMPLETION, text="b", finish_reason="length")])
    assert json.loads(line) == {
        "id": "x",
        "completions": [
            {"text": "é\n", "finish_reason": "stop", "num_tokens": 2},
            {"text": "b", "finish_reason": "length", "num_tokens": 2},
        ],
        "num_prompt_tokens": 1,
    }
    assert read_answer(line).num_prompt_tokens == 1


def test_an_error_has_the_id_or_else_the_line():
    assert json.loads(error_line(RECORD, "why")) == {"id": "x", "error": "why"}
    assert read_answer(error_line(RECORD, "why")).key == id_key("x")
    nameless = replace(RECORD, id=None, key=line_key(4))
    assert json.loads(error_line(nameless, "why")) == {"id": None, "line": 4, "error": "why"}
    known = read_answer(error_line(nameless, "why"))
    assert (known.key, known.id, known.is_error) == (line_key(4), None, True)


@pytest.mark.parametrize("id", ["\ud800é", 0, False, 1.5, [1, {"a": None}], 10**30, -0.0])
def test_an_id_comes_back_as_it_was_written(id):
    record = replace(RECORD, id=id, key=id_key(id))
    line = error_line(record, "why")
    assert json.loads(line)["id"] == id
    assert read_answer(line).key == record.key


@pytest.mark.parametrize(
    "line",
    [
        b"", b"\n", b"[]", b"3", b"{}", b'{"id": 1}', b'{"id": null, "text": "a"}', b'{"id": null, "error": "a"}',
        b'{"id": 1, "prompt": "a"}', b'{"id": 1, "text": "a"', b'{"id": "a", "custom_id": null}', b"\xff",
        b'{"id": null, "line": true, "error": "a"}',
    ],
)  # fmt: skip
def test_what_is_no_answer(line):
    with pytest.raises(ValueError):
        read_answer(line)
