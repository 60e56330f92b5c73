"""The JSON schemas that guided generation holds to: what the text will satisfy to the letter, and nothing else.

The grammar compiler ignores some keywords of JSON Schema and some combinations, with no more than a warning. A
completion must not look checked where it was not, so a schema that uses them is refused here, before anything runs. The
rules below are those of xgrammar 0.2.9; what they leave are the schemas that pydantic and its like write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from graphfuse.errors import GenerationError, brief
from graphfuse.jsonfile import parse_json

_ANNOTATIONS = {
    *("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples"),
    *("deprecated", "readOnly", "writeOnly", "discriminator"),
}
_KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": set[str](),
    "null": set[str](),
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
}
_SOLE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")  # beside one of these nothing else is looked at
_FORMATS = {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
_PYTHON_TYPES = {"string": str, "boolean": bool, "null": type(None), "object": dict, "array": list}


def checked_schema(schema: object) -> str:
    """The schema as JSON text, with its properties in the order given, which is the order they are generated in.

    Raises:
        GenerationError: it is neither an object nor the text of one, or the text could not be held to all of it.
    """
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        value = parse_json(text.encode())
        if not isinstance(value, dict):
            raise ValueError(f"it is {brief(value)}, not an object")
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise GenerationError(
            f"json_schema is not a JSON schema: {brief(error)}. Give an object, as a dictionary or as JSON text."
        ) from error
    problem = next(_problems(value, value, "#"), None)
    if problem is not None:
        raise GenerationError(f"json_schema {problem}, or validate the text afterwards.")
    return text


def _problems(schema: Any, root: dict[str, Any], path: str) -> Iterator[str]:
    """What the generated text would not be held to: each a sentence that lacks its end."""
    if schema is True:
        return
    if not isinstance(schema, dict):
        yield f"has {brief(schema)} at {path}, which allows nothing. Give a schema there"
        return
    for name in ("$defs", "definitions"):
        defined = schema.get(name, {})
        for key, child in defined.items() if isinstance(defined, dict) else ():
            yield from _problems(child, root, f"{path}/{name}/{key}")
    keys = set(schema) - _ANNOTATIONS
    sole = next((name for name in _SOLE if name in schema), None)
    types = _types(schema)
    if sole is not None:
        known = {sole, "type"} if sole in ("enum", "const") else {sole}
    else:
        known = {"type"}.union(*(_KEYWORDS.get(name, ()) for name in types))
    for key in sorted(keys - known):
        if sole is not None:
            yield f"has {brief(key)} beside {sole!r} at {path}, which is not enforced. Leave it out"
        elif not types:
            yield f"has {brief(key)} at {path} without a type. Add the type"
        else:
            yield f"has {brief(key)} at {path}, which is not enforced. Leave it out"
    if unknown := [name for name in types if name not in _KEYWORDS]:
        yield f"has the unknown type {brief(unknown[0])} at {path}. Use one of {', '.join(_KEYWORDS)}"
    yield from _alternatives(schema, root, path, types)
    yield from _string(schema, path)
    yield from _array_or_object(schema, root, path)


def _alternatives(schema: dict[str, Any], root: dict[str, Any], path: str, types: list[str]) -> Iterator[str]:
    if "$ref" in schema and _resolved(schema, root) is None:
        yield f"refers to {brief(schema['$ref'])} at {path}, which it does not hold. Define it under $defs"
    for value in (_constants(schema) or ()) if types else ():
        if not any(_is_of_type(value, name) for name in types):
            yield f"lists {brief(value)} at {path}, which is not of the type given there. Take one of them out"
    for name in ("anyOf", "oneOf", "allOf"):
        members = schema.get(name, [])
        if not isinstance(members, list) or (name in schema and not members):
            yield f"has {name!r} at {path} that is no list of schemas. Give at least one"
            return
        for i, member in enumerate(members):
            yield from _problems(member, root, f"{path}/{name}/{i}")
    if len(schema.get("allOf", ())) > 1:
        yield f"has several schemas under 'allOf' at {path}, which are not enforced together. Merge them into one"
    if not all(_are_disjoint(a, b, root) for a, b in combinations(schema.get("oneOf", ()), 2)):
        yield f"has 'oneOf' at {path} whose schemas may hold at once. Use 'anyOf'"


def _string(schema: dict[str, Any], path: str) -> Iterator[str]:
    limits = [name for name in ("format", "pattern", "minLength", "maxLength") if name in schema]
    if len(limits) > 1 and limits != ["minLength", "maxLength"]:
        yield f"has {limits[0]!r} beside {limits[1]!r} at {path}, of which only the first is enforced. Keep one"
    if "format" in schema and str(schema["format"]) not in _FORMATS:
        yield f"has the format {brief(schema['format'])} at {path}, which is not enforced. Leave it out"
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and not _is_regular(pattern):
        yield f"has the pattern {brief(pattern)} at {path}, which cannot be enforced inside a JSON string. Simplify it"


def _array_or_object(schema: dict[str, Any], root: dict[str, Any], path: str) -> Iterator[str]:
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        yield f"has 'properties' at {path} that are no object. Give a schema for each name"
        return
    for name, child in properties.items():
        yield from _problems(child, root, f"{path}/properties/{name}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(n, str) and n in properties for n in required):
        yield f"has 'required' at {path} that names more than its properties. Give a schema for each of them"
    others = schema.get("additionalProperties", False)
    if others is not False:
        # A name has several spellings ("\\u0061"), so that another property could be a second value for a known one.
        for name in ("properties", "minProperties", "maxProperties"):
            if name in schema:
                yield f"allows additionalProperties beside {name!r} at {path}, which are not told apart. Leave one out"
        yield from _problems(others, root, f"{path}/additionalProperties")
    if schema.get("items", False) is not False:
        yield from _problems(schema["items"], root, f"{path}/items")
    first = schema.get("prefixItems", [])
    for i, child in enumerate(first if isinstance(first, list) else ()):
        yield from _problems(child, root, f"{path}/prefixItems/{i}")


def _types(schema: dict[str, Any]) -> list[str]:
    types = schema.get("type", [])
    return [t if isinstance(t, str) else brief(t) for t in (types if isinstance(types, list) else [types])]


def _is_of_type(value: Any, name: str) -> bool:
    if name in ("integer", "number"):
        return isinstance(value, int | float if name == "number" else int) and not isinstance(value, bool)
    return isinstance(value, _PYTHON_TYPES.get(name, ()))


def _is_regular(pattern: str) -> bool:
    """Whether it has neither lookaround, nor anchors but at its ends, nor a quote, which would end the JSON string."""
    plain = re.sub(r"\\.", lambda m: m[0] if m[0] in (r"\x", r"\u", r"\c") else ".", pattern)
    if any(text in plain for text in ('"', r"\x", r"\u", r"\c", "(?=", "(?!", "(?<")):
        return False
    inside = re.sub(r"\[\^?\]?[^\]]*\]", ".", plain).removeprefix("^").removesuffix("$")
    return "^" not in inside and "$" not in inside


def _resolved(schema: Any, root: dict[str, Any]) -> Any:
    """What a schema refers to, or itself. `None` where nothing is there, or references go round in a circle."""
    for _ in range(64):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        reference = schema["$ref"]
        if not isinstance(reference, str) or reference.split("/")[0] != "#":
            return None
        schema = root
        for part in reference.split("/")[1:]:
            schema = schema.get(part) if isinstance(schema, dict) else None
    return None


def _are_disjoint(first: Any, second: Any, root: dict[str, Any]) -> bool:
    """Whether it is plain that no value satisfies both: other types, or a required constant that differs."""
    a, b = _resolved(first, root), _resolved(second, root)
    if not isinstance(a, dict) or not isinstance(b, dict):
        return False
    kinds = [{"number" if name == "integer" else str(name) for name in _types(schema)} for schema in (a, b)]
    if all(kinds) and not kinds[0] & kinds[1]:
        return True
    values, others = _constants(a), _constants(b)
    if values is not None and others is not None:
        return not any(value in others for value in values)
    if kinds != [{"object"}, {"object"}]:
        return False
    shared = [name for name in _required(a) if name in _required(b)]
    return any(_are_disjoint(_property(a, name), _property(b, name), root) for name in shared)


def _required(schema: dict[str, Any]) -> list[Any]:
    required = schema.get("required")
    return required if isinstance(required, list) else []


def _property(schema: dict[str, Any], name: Any) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, dict) and isinstance(name, str) else None


def _constants(schema: dict[str, Any]) -> list[Any] | None:
    """The only values it allows, if it lists them."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None
