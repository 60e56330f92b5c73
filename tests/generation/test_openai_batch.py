"""OpenAI's batch format: what is read from its lines, and the lines that answer them."""

import json

import pytest

from graphfuse.generation.answers import Format, error_line, read_answer
from graphfuse.generation.completion import Completion, TokenLogprob
from graphfuse.generation.jsonl import read_records
from graphfuse.generation.record import id_key
from graphfuse.generation.sampling import SamplingParams

MESSAGES = [{"role": "user", "content": "Hello"}]
CHAT = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": MESSAGES}}
TEXT = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "Hello"}}
FORMAT = Format("tiny", lambda token_id: f"<{token_id}>")


def record_of(tmp_path, request, **body):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({**request, "body": {**request["body"], **body}}) + "\n")
    [record] = read_records(path)
    return record


def params_of(tmp_path, request, **body):
    record = record_of(tmp_path, request, **body)
    assert record.error is None, record.error
    return record.params(SamplingParams(max_tokens=77))


def test_both_endpoints_are_read(tmp_path):
    chat, text = record_of(tmp_path, CHAT), record_of(tmp_path, TEXT)
    assert (chat.id, chat.endpoint, chat.prompt, chat.is_raw) == ("a", "chat", MESSAGES, False)
    assert (text.id, text.endpoint, text.prompt, text.is_raw) == ("a", "completions", "Hello", True)
    assert record_of(tmp_path, TEXT, prompt=["Hello"]).prompt == "Hello"
    assert record_of(tmp_path, TEXT, prompt=[3, 4]).prompt == [3, 4]
    assert record_of(tmp_path, TEXT, prompt=[[3, 4]]).prompt == [3, 4]


def test_a_line_with_an_id_of_ours_is_ours(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": 1, "custom_id": "a", "prompt": "b", "url": "http://x"}\n')
    [record] = read_records(path)
    assert (record.id, record.endpoint, record.prompt) == (1, None, "b")


def test_text_parts_of_a_message_become_one_text(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert record_of(tmp_path, CHAT, messages=[{"role": "user", "content": parts}]).prompt == [
        {"role": "user", "content": "a\nb"}
    ]


@pytest.mark.parametrize(
    ("request_", "body", "expected"),
    [
        (CHAT, {}, {"max_tokens": 77}),
        (CHAT, {"max_tokens": 5}, {"max_tokens": 5}),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, {"max_tokens": 6}),
        (CHAT, {"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "top_p": 0.9}),
        (CHAT, {"temperature": 1, "seed": 3, "n": 2}, {"temperature": 1, "seed": 3, "n": 2}),
        (CHAT, {"stop": "x"}, {"stop": ("x",)}),
        (CHAT, {"stop": ["x", "y"]}, {"stop": ("x", "y")}),
        (CHAT, {"logprobs": False, "top_logprobs": 0}, {"logprobs": None}),
        (CHAT, {"logprobs": True}, {"logprobs": 0}),
        (CHAT, {"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
        (TEXT, {"logprobs": 3}, {"logprobs": 3}),
        (TEXT, {"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [1]},
         {"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": (1,)}),
        (CHAT, {"response_format": {"type": "text"}}, {"json_schema": None}),
        (CHAT, {"user": "u", "metadata": {"a": "b"}, "store": True, "stream": False, "presence_penalty": 0.0,
                "frequency_penalty": 0, "logit_bias": {}, "tools": None, "tool_choice": "none"}, {"max_tokens": 77}),
    ],
)  # fmt: skip
def test_fields_of_a_body_are_those_of_the_sampling(tmp_path, request_, body, expected):
    params = params_of(tmp_path, request_, **body)
    assert {name: getattr(params, name) for name in expected} == expected


def test_a_response_format_is_a_schema(tmp_path):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    assert params_of(tmp_path, CHAT, response_format=form) == SamplingParams(max_tokens=77, json_schema=schema)
    anything = {"type": "object", "additionalProperties": True}
    form = {"type": "json_object"}
    assert params_of(tmp_path, CHAT, response_format=form) == SamplingParams(max_tokens=77, json_schema=anything)


@pytest.mark.parametrize(
    ("change", "body", "message"),
    [
        ({"url": "/v1/embeddings"}, {}, "is 'POST' '/v1/embeddings'. Use POST with /v1/chat/completions or"),
        ({"url": None}, {}, "Use POST with"),
        ({"url": [1]}, {}, "Use POST with"),
        ({"method": "GET"}, {}, "is 'GET'"),
        ({"body": 3}, None, 'The "body" of line 1 is not an object'),
        ({}, {"messages": []}, 'The "messages" of line 1 are no list of objects with at least one'),
        ({}, {"messages": None}, 'The "messages" of line 1'),
        ({}, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "is not text"),
        ({}, {"tools": [{"type": "function"}]}, "The 'tools' of line 1 is"),
        ({}, {"presence_penalty": 0.5}, "The 'presence_penalty' of line 1 is 0.5, which is not served"),
        ({}, {"stream": True}, "The 'stream' of line 1"),
        ({}, {"reasoning_effort": "high"}, "The 'reasoning_effort' of line 1"),
        ({}, {"max_tokens": "5"}, 'The "max_tokens" of line 1'),
        ({}, {"logprobs": 3}, 'The "logprobs" of line 1 is 3. Give true or false'),
        ({}, {"response_format": {"type": "xml"}}, 'The "response_format" of line 1'),
        ({}, {"response_format": "json"}, 'The "response_format" of line 1'),
        ({}, {"response_format": {"type": "json_schema", "json_schema": {}}}, 'The "response_format" of line 1'),
    ],
)
def test_what_is_not_served_is_an_error_in_the_same_format(tmp_path, change, body, message):
    request = {**CHAT, **change}
    if body is not None:
        request["body"] = {**CHAT["body"], **body}
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(request))
    [record] = read_records(path)
    assert message in record.error and record.prompt is None
    line = json.loads(error_line(record, record.error))
    assert line == {
        "id": line["id"],
        "custom_id": "a",
        "response": None,
        "error": {"code": "invalid_request", "message": record.error},
    }
    assert read_answer(error_line(record, record.error)).is_error


@pytest.mark.parametrize("prompt", [["a", "b"], [1, "a"], None, {"a": 1}])
def test_a_prompt_that_is_neither_text_nor_ids_is_an_error(tmp_path, prompt):
    assert "neither text nor one list" in record_of(tmp_path, TEXT, prompt=prompt).error


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_an_error(tmp_path, prompt):
    assert "is empty" in record_of(tmp_path, TEXT, prompt=prompt).error


def test_a_custom_id_is_text(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({**CHAT, "custom_id": 5}) + "\n" + json.dumps(CHAT) + "\n" + json.dumps(TEXT) + "\n")
    number, good, twice = read_records(path)
    assert 'The "custom_id" of line 1 is not text' in number.error
    assert good.error is None
    line = json.loads(error_line(twice, twice.error))
    assert (line["custom_id"], line["line"]) == (None, 3)
    assert "\"custom_id\" 'a' of line 3 is that of an earlier line" in line["error"]["message"]


def test_a_chat_completion(tmp_path):
    record = record_of(tmp_path, CHAT)
    logprobs = [TokenLogprob(3, -0.5, [(3, -0.5), (4, float("-inf"))])]
    completions = [Completion("hé", [3], "stop", [1, 2], logprobs), Completion("b", [4, 5], "length", [1, 2])]
    line = FORMAT.answer(record, completions)
    data = json.loads(line)
    assert (data["custom_id"], data["error"], data["response"]["status_code"]) == ("a", None, 200)
    body = data["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    first, second = body["choices"]
    assert first == {
        "index": 0,
        "message": {"role": "assistant", "content": "hé"},
        "logprobs": {
            "content": [
                {
                    "token": "<3>",
                    "logprob": -0.5,
                    "bytes": [60, 51, 62],
                    "top_logprobs": [
                        {"token": "<3>", "logprob": -0.5, "bytes": [60, 51, 62]},
                        {"token": "<4>", "logprob": -9999.0, "bytes": [60, 52, 62]},
                    ],
                }
            ],
            "refusal": None,
        },
        "finish_reason": "stop",
    }
    assert (second["index"], second["logprobs"], second["finish_reason"]) == (1, None, "length")
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    known = read_answer(line)
    assert (known.key, known.id, known.is_error, known.num_prompt_tokens) == (id_key("a"), "a", False, 2)


def test_a_text_completion(tmp_path):
    record = record_of(tmp_path, TEXT)
    logprobs = [TokenLogprob(3, -0.5, [(4, -0.25)]), TokenLogprob(10, -1.0, [(4, -0.125)])]
    line = Format("tiny", lambda i: f"<{i}>", token_ids=True).answer(
        record, [Completion("x", [3, 10], "stop", [1], logprobs)]
    )
    body = json.loads(line)["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "x",
            "logprobs": {
                "tokens": ["<3>", "<10>"],
                "token_logprobs": [-0.5, -1.0],
                "top_logprobs": [{"<4>": -0.25}, {"<4>": -0.125}],
                "text_offset": [0, 3],
            },
            "finish_reason": "stop",
            "token_ids": [3, 10],
        }
    ]
