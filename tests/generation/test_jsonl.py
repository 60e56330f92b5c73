"""Files of prompts: every line is used, or becomes an error in its place."""

import json

import pytest

from graphfuse.errors import SchemaError
from graphfuse.generation.completion import Completion
from graphfuse.generation.jsonl import Record, completion_line, error_line, read_records, written_at_once


def read(tmp_path, data):
    path = tmp_path / "in.jsonl"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return read_records(path)


def test_prompts_and_messages_are_read_in_order(tmp_path):
    lines = '{"id": 1, "prompt": "a", "label": 3}\n\n{"id": "b", "messages": [{"role": "user", "content": "c"}]}\r\n'
    assert read(tmp_path, lines) == [Record(1, "a"), Record("b", [{"role": "user", "content": "c"}])]


@pytest.mark.parametrize(
    ("line", "id", "message"),
    [
        ("{", None, "Line 2 is not JSON"),
        (b"\xff\xfe", None, "Line 2 is not JSON"),
        ("[1]", None, 'Line 2 is not an object with an "id"'),
        ('{"prompt": "a"}', None, 'Line 2 is not an object with an "id"'),
        ('{"id": 7}', 7, 'Line 2 needs a "prompt" or "messages"'),
        ('{"id": 7, "prompt": "a", "messages": []}', 7, "Give exactly one of them"),
        ('{"id": 7, "prompt": 3}', 7, "is not text"),
        ('{"id": 7, "messages": "a"}', 7, "are not a list of objects"),
        ('{"id": 7, "messages": ["a"]}', 7, "are not a list of objects"),
        ('{"id": 7, "messages": []}', 7, 'The "messages" of line 2 is empty'),
        ('{"id": 7, "prompt": "a", "prompt": "b"}', None, "the key 'prompt' stands twice"),
        ('{"id": NaN, "prompt": "a"}', None, 'The "id" of line 2 holds a number that JSON has not'),
        ('{"id": [1e999], "prompt": "a"}', None, 'The "id" of line 2 holds a number that JSON has not'),
        ('{"id": 7, "messages": ' + "[" * 9000 + "]" * 9000 + "}", None, "nested more than 64 levels deep"),
        ('{"id": ' + "9" * 5000 + "}", None, "Line 2 is not JSON"),
        ('{"id": 7}'.encode("utf-16"), None, "Line 2 is not JSON"),
    ],
)
def test_a_line_that_cannot_be_used_becomes_an_error_in_its_place(tmp_path, line, id, message):
    good = b'{"id": 1, "prompt": "a"}'
    records = read(tmp_path, b"\n".join([good, line if isinstance(line, bytes) else line.encode(), good]))
    assert [r.prompt for r in records] == ["a", None, "a"]
    assert records[1].id == id
    assert message in records[1].error


def test_a_byte_order_mark_and_numbers_that_json_has_not_in_other_keys_are_no_errors(tmp_path):
    [record] = read(tmp_path, b'\xef\xbb\xbf{"id": 1, "prompt": "a", "score": NaN}')
    assert record == Record(1, "a")


def test_a_line_separator_inside_text_does_not_end_the_line(tmp_path):
    [record] = read(tmp_path, '{"id": 1, "prompt": "a\u2028b\x85d"}')
    assert record.prompt == "a\u2028b\x85d"


def test_a_missing_input_file_is_an_error(tmp_path):
    with pytest.raises(SchemaError, match="cannot be read"):
        read_records(tmp_path / "none.jsonl")


def test_output_lines_hold_what_the_format_says():
    completion = Completion("é\n", [3, 4], "stop", [1])
    line = completion_line(Record("x", "p"), completion)
    assert line.count("\n") == 1
    assert json.loads(line) == {"id": "x", "text": "é\n", "token_ids": [3, 4], "finish_reason": "stop"}
    assert json.loads(error_line(Record(5, error="why"))) == {"id": 5, "error": "why"}


def test_an_id_that_utf8_cannot_hold_comes_back_as_it_was_written(tmp_path):
    [record] = read(tmp_path, r'{"id": "\ud800é"}')
    line = error_line(record)
    assert json.loads(line.encode())["id"] == "\ud800é"


def test_the_output_appears_when_it_is_complete(tmp_path):
    path = tmp_path / "out.jsonl"
    with written_at_once(path) as file:
        file.write("a\n")
        assert not path.exists()
    assert path.read_text() == "a\n"
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_run_that_breaks_off_leaves_the_old_output_alone(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("old\n")
    with pytest.raises(RuntimeError), written_at_once(path) as file:
        file.write("new\n")
        raise RuntimeError
    assert path.read_text() == "old\n"
    assert (tmp_path / "out.jsonl.partial").read_text() == "new\n"


def test_an_output_folder_must_exist(tmp_path):
    with (
        pytest.raises(SchemaError, match="existing, writable folder"),
        written_at_once(tmp_path / "none" / "out.jsonl"),
    ):
        pass
