"""A schema that could not be held to in full is refused, with the place and what to do."""

import json
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from graphfuse.errors import GenerationError
from graphfuse.generation.json_schema import checked_schema

OBJECT = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b"]}


def test_the_order_of_properties_is_kept():
    assert list(json.loads(checked_schema(OBJECT))["properties"]) == ["b", "a"]
    assert checked_schema(json.dumps(OBJECT, indent=2)) == checked_schema(OBJECT)


def test_schemas_of_pydantic_pass():
    class Cat(BaseModel):
        kind: Literal["cat"]
        lives: int = Field(ge=0, le=9)

    class Dog(BaseModel):
        kind: Literal["dog"]
        names: list[str] = Field(max_length=3)

    class Owner(BaseModel):
        model_config = ConfigDict(extra="forbid")
        name: str | None = Field(description="may be missing", min_length=1, max_length=20)
        pet: Cat | Dog = Field(discriminator="kind")
        friends: list["Owner"] = []
        size: tuple[float, float] = (0.0, 0.0)
        tags: dict[str, bool] = {}

    assert json.loads(checked_schema(Owner.model_json_schema())) == Owner.model_json_schema()


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (3, "an object"),
        ("[]", "not an object"),
        ('{"type": ', "not a JSON schema"),
        ({"const": float("nan")}, "not a JSON schema"),
        ('{"const": NaN}', "not a JSON schema"),
        ('{"a": 1, "a": 2}', "twice"),
        ({"type": object}, "not a JSON schema"),
        ({"type": "text"}, "unknown type 'text' at #"),
        ({"type": {}}, "unknown type"),
        ({"minimum": 3}, "without a type. Add the type"),
        ({"type": "integer", "minLength": 3}, "'minLength' at #, which is not enforced"),
        ({"type": "number", "multipleOf": 0.5}, "'multipleOf'"),
        ({"type": "array", "items": {}, "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "array", "items": {"type": "string", "not": {"const": "a"}}}, "'not' at #/items"),
        ({"type": "object", "properties": {"a": {"if": {}}}}, "'if' at #/properties/a"),
        ({"$defs": {"x": {"contains": {}}}, "type": "null"}, "at #/\\$defs/x"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {}}, "minimum": 5}, "beside '\\$ref'"),
        ({"anyOf": [{"type": "null"}], "minimum": 5}, "beside 'anyOf'"),
        ({"$ref": "#/$defs/y", "$defs": {"x": {}}}, "Define it under \\$defs"),
        ({"$ref": "https://example.org/schema"}, "Define it under \\$defs"),
        ({"$ref": "#"}, "Define it under \\$defs"),
        ({"enum": ["a", 1], "type": "string"}, "lists 1 at #"),
        ({"const": True, "type": "integer"}, "lists True at #"),
        ({"allOf": [{"type": "integer"}, {"type": "number"}]}, "Merge them"),
        ({"anyOf": []}, "at least one"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "Use 'anyOf'"),
        ({"oneOf": [{"const": 1}, {"enum": [1, 2]}]}, "Use 'anyOf'"),
        ({"type": "string", "pattern": "^a$", "maxLength": 3}, "Keep one"),
        ({"type": "string", "format": "date", "pattern": "^a$"}, "Keep one"),
        ({"type": "string", "format": "colour"}, "'colour'"),
        ({"type": "string", "pattern": '^"$'}, "inside a JSON string"),
        ({"type": "string", "pattern": r"^\x22$"}, "inside a JSON string"),
        ({"type": "string", "pattern": "^(?=a)a$"}, "inside a JSON string"),
        ({"type": "string", "pattern": "a^b"}, "inside a JSON string"),
        ({"type": "object", "required": ["z"]}, "'required'"),
        ({"type": "object", "properties": {"a": False}}, "allows nothing"),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, "not told apart"),
        ({"type": "object", "additionalProperties": {}, "minProperties": 2}, "not told apart"),
    ],
)
def test_what_would_not_be_enforced_is_refused(schema, says):
    with pytest.raises(GenerationError, match=says) as error:
        checked_schema(schema)
    assert str(error.value).startswith("json_schema ")


@pytest.mark.parametrize("pattern", ["^[a-z$^]{2,3}$", r"^\d+\.\d+$", "a|b", r"^\$\^$", "^(?:ab)*$", r"^[^\]a]$"])
def test_regular_patterns_pass(pattern):
    checked_schema({"type": "string", "pattern": pattern})


KEYWORDS = [
    *("type", "properties", "required", "items", "prefixItems", "anyOf", "oneOf", "allOf", "$ref", "$defs", "enum"),
    *("const", "pattern", "format", "minLength", "maxLength", "additionalProperties", "title"),
]
LEAVES = st.sampled_from(
    ["string", "object", "array", "integer", "#/$defs/a", "#", "^a$", "date", "a", 1, 2.5, None, True, False, "x"]
)
VALUES = st.recursive(
    LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from([*KEYWORDS, "a"]), v, max_size=4)
)


@given(st.dictionaries(st.sampled_from(KEYWORDS), VALUES, max_size=5))
def test_any_object_passes_or_is_refused(schema):
    try:
        assert json.loads(checked_schema(schema)) == schema
    except GenerationError as error:
        assert str(error).count(". ") >= 1
