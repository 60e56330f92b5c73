"""Files of prompts: every line is used, or becomes an error; none is held longer than it is needed."""

import json
import tracemalloc

import pytest

from graphfuse.errors import GenerationError, SchemaError
from graphfuse.generation import jsonl
from graphfuse.generation.jsonl import read_records
from graphfuse.generation.record import id_key
from graphfuse.generation.sampling import SamplingParams


def read(tmp_path, data):
    path = tmp_path / "in.jsonl"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return list(read_records(path))


def test_prompts_and_messages_are_read_in_order(tmp_path):
    lines = '{"id": 1, "prompt": "a", "label": 3}\n\n{"id": "b", "messages": [{"role": "user", "content": "c"}]}\r\n'
    first, second = read(tmp_path, lines)
    assert (first.id, first.prompt, first.line, first.index) == (1, "a", 1, 0)
    assert (second.id, second.prompt) == ("b", [{"role": "user", "content": "c"}])
    assert (second.line, second.index) == (3, 1)
    assert first.size + second.size == len(lines.encode())
    assert first.error is None and first.endpoint is None and first.sampling == {}


@pytest.mark.parametrize(
    ("line", "id", "message"),
    [
        ("{", None, "Line 2 is not JSON"),
        (b"\xff\xfe", None, "Line 2 is not UTF-8"),
        (b'{"id": 7, "prompt": "\xe9"}', None, "Line 2 is not UTF-8"),
        ("[1]", None, "Line 2 is not an object"),
        ('{"prompt": "a"}', None, 'Line 2 has no "id"'),
        ('{"id": null, "prompt": "a"}', None, 'Line 2 has no "id"'),
        ('{"id": 7}', 7, 'Line 2 needs a "prompt" or "messages"'),
        ('{"id": 7, "prompt": "a", "messages": []}', 7, "Give exactly one of them"),
        ('{"id": 7, "prompt": 3}', 7, "is not text"),
        ('{"id": 7, "prompt": ""}', 7, 'The "prompt" of line 2 is empty'),
        ('{"id": 7, "messages": "a"}', 7, "are not a list of objects"),
        ('{"id": 7, "messages": ["a"]}', 7, "are not a list of objects"),
        ('{"id": 7, "messages": []}', 7, 'The "messages" of line 2 is empty'),
        ('{"id": 7, "prompt": "a", "prompt": "b"}', None, "the key 'prompt' stands twice"),
        ('{"id": NaN, "prompt": "a"}', None, 'The "id" of line 2 holds a number that JSON has not'),
        ('{"id": [1e999], "prompt": "a"}', None, 'The "id" of line 2 holds a number that JSON has not'),
        ('{"id": 7, "messages": ' + "[" * 9000 + "]" * 9000 + "}", None, "nested more than 64 levels deep"),
        ('{"id": ' + "9" * 5000 + "}", None, "Line 2 is not JSON"),
        ('{"id": 7}'.encode("utf-16"), None, "Line 2 is not"),
        ('{"id": 1, "prompt": "b"}', None, 'The "id" 1 of line 2 is that of an earlier line'),
        ('{"id": 7, "prompt": "a", "max_tokens": "3"}', 7, "The \"max_tokens\" of line 2 is '3'. Give a whole number"),
        ('{"id": 7, "prompt": "a", "top_k": true}', 7, 'The "top_k" of line 2 is True'),
        ('{"id": 7, "prompt": "a", "temperature": 1e999}', 7, None),
        ('{"id": 7, "prompt": "a", "seed": 1' + "0" * 400 + "}", 7, 'The "seed" of line 2 is'),
        ('{"id": 7, "prompt": "a", "stop": 5}', 7, 'The "stop" of line 2 is 5. Give text, or a list of texts'),
        ('{"id": 7, "prompt": "a", "stop": ["x", ""]}', 7, 'The "stop" of line 2 is'),
        ('{"id": 7, "prompt": "a", "stop_token_ids": [-1]}', 7, "Give a list of token ids"),
        ('{"id": 7, "prompt": "a", "ignore_eos": 1}', 7, "Give true or false"),
        ('{"id": 7, "prompt": "a", "json_schema": "x"}', 7, "Give a JSON schema"),
    ],
)
def test_a_line_that_cannot_be_used_is_an_error_and_the_others_go_on(tmp_path, line, id, message):
    first, last = b'{"id": 1, "prompt": "a"}', b'{"id": 2, "prompt": "a"}'
    records = read(tmp_path, b"\n".join([first, line if isinstance(line, bytes) else line.encode(), last]))
    assert [record.prompt for record in (records[0], records[2])] == ["a", "a"]
    assert records[1].id == id
    if message is not None:
        assert message in records[1].error and records[1].prompt is None
    else:  # of the right type; whether it is in range is found by `params`
        with pytest.raises(GenerationError):
            records[1].params(SamplingParams())


def test_sampling_fields_of_a_line_come_before_those_of_all(tmp_path):
    own = {
        "max_tokens": 5, "min_tokens": 1, "temperature": 1, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "n": 2, "seed": 9,
        "repetition_penalty": 1.5, "stop": "x", "stop_token_ids": [4], "logprobs": 2, "ignore_eos": True,
    }  # fmt: skip
    [record] = read(tmp_path, json.dumps({"id": 1, "prompt": "a", **own}))
    params = record.params(SamplingParams(max_tokens=50, seed=3, stop=("y", "z")))
    assert params == SamplingParams(**own)
    [record] = read(tmp_path, '{"id": 1, "prompt": "a", "max_tokens": null, "stop": null}')
    shared = SamplingParams(max_tokens=50, stop=("y", "z"))
    assert record.params(shared) == shared


def test_a_schema_of_a_line_is_used(tmp_path):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    [record] = read(tmp_path, json.dumps({"id": 1, "prompt": "a", "json_schema": schema}))
    assert record.params(SamplingParams()) == SamplingParams(json_schema=schema)


def test_seeds_go_by_the_place_in_the_file(tmp_path):
    lines = '{"id": 0, "prompt": "a"}\n\n{broken\n{"id": 2, "prompt": "a"}\n{"id": 3, "prompt": "a", "seed": 40}\n'
    records = read(tmp_path, lines)
    shared = SamplingParams(temperature=1, seed=2**63 - 1)
    assert [records[i].params(shared).seed for i in (0, 2, 3)] == [2**63 - 1, 1, 40]
    assert records[0].params(SamplingParams()).seed is None


def test_ids_are_told_apart_as_json_tells_them(tmp_path):
    ids = [1, 1.0, "1", True, [1], {"a": 1, "b": 2}, "\ud800", "é", 10**30]
    records = read(tmp_path, "".join(json.dumps({"id": id, "prompt": "a"}) + "\n" for id in ids))
    assert [record.error for record in records] == [None] * len(ids)
    [_, other] = read(tmp_path, '{"id": {"a": 1, "b": 2}, "prompt": "a"}\n{"id": {"b": 2, "a": 1}, "prompt": "a"}')
    assert "earlier line" in other.error
    assert all(id_key(json.loads(json.dumps(id))) == id_key(id) for id in ids)


def test_a_line_with_the_id_of_a_broken_one_is_an_error(tmp_path):
    first, second = read(tmp_path, '{"id": 1, "prompt": ""}\n{"id": 1, "prompt": "a"}')
    assert (first.id, second.id) == (1, None)
    assert second.prompt is None and "earlier line" in second.error


def test_a_byte_order_mark_and_numbers_that_json_has_not_in_other_keys_are_no_errors(tmp_path):
    [record] = read(tmp_path, b'\xef\xbb\xbf{"id": 1, "prompt": "a", "score": NaN}')
    assert (record.id, record.prompt) == (1, "a")


def test_a_line_separator_inside_text_does_not_end_the_line(tmp_path):
    [record] = read(tmp_path, '{"id": 1, "prompt": "a\u2028b\x85d"}')
    assert record.prompt == "a\u2028b\x85d"


def test_a_line_that_is_too_long_is_an_error_and_the_next_one_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "MAX_LINE", 1 << 10)
    lines = [json.dumps({"id": i, "prompt": "a" * n}) for i, n in enumerate((1, 5000, 900, 1024))]
    records = read(tmp_path, "\n".join(lines))
    assert [record.error is None for record in records] == [True, False, True, False]
    assert "longer than" in records[1].error and records[1].line == 2
    assert sum(record.size for record in records) == len("\n".join(lines))


def test_records_are_not_kept(tmp_path):
    path = tmp_path / "in.jsonl"
    with path.open("w") as file:
        for i in range(2000):
            file.write(json.dumps({"id": i, "prompt": "x" * 20_000}) + "\n")
    tracemalloc.start()
    try:
        assert sum(record.error is None for record in read_records(path)) == 2000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000  # of 40 MB


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(SchemaError, match="cannot be read"):
        list(read_records(tmp_path / "none.jsonl"))
    with pytest.raises(SchemaError, match="cannot be read"):
        list(read_records("a\0b"))
    with pytest.raises(SchemaError, match="is no regular file"):
        list(read_records(tmp_path))
