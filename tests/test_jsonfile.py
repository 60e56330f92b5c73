"""JSON that others wrote: what `json.loads` would let through, or raise, and a user must not meet."""

from __future__ import annotations

import re

import pytest

from graphfuse.errors import SchemaError, brief
from graphfuse.jsonfile import MAX_BYTES, MAX_DEPTH, JsonObject, parse_json, read_json


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"{} {}", "Extra data"),
        (b"\xff", "can't decode byte 0xff"),
        (b'"\xed\xa0\x80"', "can't decode"),
        ("{}".encode("utf-16"), "can't decode"),
        (b"[" * 100_000, "nested more than 64 levels"),
        (b"[" * 100_000 + b"]" * 100_000, "nested more than 64 levels"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, "nested more than 64 levels"),
        (b"9" * 5000, "digits"),
        (b'{"a": 1, "b": 2, "a": 1}', "the key 'a' stands twice"),
        (b'[{"b": {"\\u001b": 1, "\\u001b": 2}}]', r"the key '\x1b' stands twice"),
    ],
    ids=str,
)
def test_what_is_no_json_is_one_kind_of_error(data, problem):
    with pytest.raises(ValueError, match=re.escape(problem)) as error:
        parse_json(data)
    assert str(error.value).isprintable()


def test_nesting_up_to_the_limit_and_a_byte_order_mark_are_read():
    assert parse_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    assert parse_json(b'\xef\xbb\xbf{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}


def test_a_file_that_fills_memory_is_not_read(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ValueError, match="larger than 64 MiB"):
        read_json(tmp_path / "large")


def test_a_file_that_cannot_be_read_says_so(tmp_path):
    for name in (tmp_path, tmp_path / "none", tmp_path / ("x" * 5000), tmp_path / "a\0b"):
        with pytest.raises(SchemaError, match="cannot be read as JSON"):
            JsonObject.read(name)
    (tmp_path / "half").write_text(r'{"gpu": "\ud800"}')
    with pytest.raises(SchemaError, match="surrogates not allowed"):
        JsonObject.read(tmp_path / "half")


@pytest.mark.parametrize(
    ("value", "kind", "problem"),
    [
        (True, int, "is True, which is not an integer"),
        (2**63, int, "which does not fit 64 bits"),
        (-(10**400), int | float, "which does not fit 64 bits"),
        (float("nan"), float, "is nan, which is not a finite number"),
        (float("inf"), int | float, "is inf, which is not a finite number"),
        ("\x1b[31m", str, "characters that cannot be shown"),
        (["x" * 10_000], str, "x…, which is not a string"),
    ],
    ids=["bool", "large", "larger", "nan", "inf", "escape", "long"],
)
def test_a_value_that_arithmetic_or_a_terminal_cannot_take_is_named(value, kind, problem):
    with pytest.raises(SchemaError) as error:
        JsonObject({"key": value}, "file").get("key", kind)
    assert str(error.value).startswith("file: the key key is ") and problem in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("value", [0, -1, -0.5])
def test_a_number_that_is_divided_by_is_above_zero(value):
    with pytest.raises(SchemaError, match="which is not above zero"):
        JsonObject({"key": value}, "file").positive("key", int | float)


def test_a_key_is_shown_as_it_is_unless_it_cannot_be():
    with pytest.raises(SchemaError, match=r"the key a\.b/c is not known"):
        JsonObject({"b/c": 1}, "file", "a.").only("x")
    with pytest.raises(SchemaError, match=r"the key 'a\.\\x1b' is not known"):
        JsonObject({"\x1b": 1}, "file", "a.").only("x")


def test_brief_is_one_printable_line_of_whatever_value():
    assert brief("a") == "'a'" and brief(ValueError("two\nlines")) == "two lines"
    assert brief(10**5000) == "a int" and brief(ValueError("\ud800\x1b")) == r"\ud800\x1b"
    assert len(brief("x" * 500)) == 121
