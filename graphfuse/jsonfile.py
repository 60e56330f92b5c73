"""Data files checked key by key, so that a wrong one is an error that names the file and the key.

`parse_json` is also how everything else here reads JSON that others wrote: stricter than `json.loads`, and with one
kind of error. A key that stands twice is refused, since readers differ in which of the two they take.
"""

from __future__ import annotations

import json
import math
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphfuse.errors import SchemaError, brief

MAX_DEPTH = 64
"""Objects and lists inside each other. Configs have about ten; what follows values with functions that call themselves,
as transformers does, must not run out of stack."""

MAX_BYTES = 64 << 20
"""Far above any config or table; below what a device file or the wrong file would fill memory with."""


def parse_json(data: bytes) -> Any:
    """The value that UTF-8 bytes stand for, which may begin with a byte order mark.

    Raises:
        ValueError: not UTF-8, not JSON, a key twice in one object, more than `MAX_DEPTH` levels, or an integer of more
            digits than Python converts. Its message is one line.
    """
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep") from None
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return value
    raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def read_json(file: Path) -> Any:
    """`parse_json` of a file. Raises `ValueError`, or `OSError` where it cannot be read."""
    with file.open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB")
    return parse_json(data)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {brief(twice)} stands twice in one object")
    return found


@dataclass(frozen=True)
class JsonObject:
    """One JSON object of a file, with the file and the path to it for error messages."""

    data: dict[str, Any]
    file: str
    path: str = ""

    @classmethod
    def read(cls, file: str | Path) -> JsonObject:
        """The object a file holds. Raises `SchemaError` when it cannot be read or is not a JSON object."""
        try:
            data = read_json(Path(file))
            json.dumps(data, ensure_ascii=False).encode()  # half a surrogate pair, which cannot be printed
        except (OSError, ValueError) as error:
            raise SchemaError(
                f"{file} cannot be read as JSON: {brief(error)}. Check the file or give another one."
            ) from error
        if not isinstance(data, dict):
            raise SchemaError(f"{file} holds a {type(data).__name__}, not a JSON object. Check the file.")
        return cls(data, str(file))

    def only(self, *known: str) -> None:
        """Raises `SchemaError` for keys other than `known`: a misspelt key must not pass as a missing optional one."""
        for key in self.data:
            if key not in known:
                raise self.error(key, f"is not known; known keys are {', '.join(known)}")

    def get(self, key: str, kind: type | types.UnionType | tuple[type, ...]) -> Any:
        """The value of a required key, of the given type (bool does not pass as int). Raises `SchemaError`.

        Integers fit 64 bits and numbers are finite, so that arithmetic on them cannot fail; text can be printed.
        """
        if key not in self.data:
            raise self.error(key, "is missing")
        value = self.data[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and not _accepts_bool(kind)):
            raise self.error(key, f"is {brief(value)}, which is not {_describe(kind)}")
        if isinstance(value, str) and not value.replace("\n", "").replace("\t", "").isprintable():
            raise self.error(key, f"is {brief(value)}, which has characters that cannot be shown")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise self.error(key, f"is {brief(value)}, which does not fit 64 bits")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(key, f"is {value!r}, which is not a finite number")
        return value

    def positive(self, key: str, kind: type | types.UnionType = int) -> Any:
        """A required number above zero."""
        value = self.get(key, kind)
        if not value > 0:
            raise self.error(key, f"is {value!r}, which is not above zero")
        return value

    def object(self, key: str) -> JsonObject:
        """The object under a required key."""
        return JsonObject(self.get(key, dict), self.file, f"{self.path}{key}.")

    def objects(self, key: str) -> list[JsonObject]:
        """The non-empty list of objects under a required key."""
        values = self.get(key, list)
        if not values:
            raise self.error(key, "is an empty list")
        for index, value in enumerate(values):
            if not isinstance(value, dict):
                raise self.error(f"{key}[{index}]", f"is {brief(value)}, which is not an object")
        return [JsonObject(v, self.file, f"{self.path}{key}[{i}].") for i, v in enumerate(values)]

    def error(self, key: str, problem: str) -> SchemaError:
        """A `SchemaError` for `key`, to be raised by the caller."""
        path = f"{self.path}{key}"
        name = path if path.isprintable() and len(path) <= 120 else brief(path)
        return SchemaError(f"{self.file}: the key {name} {problem}. Correct the file.")


def _accepts_bool(kind: Any) -> bool:
    if kind in (bool, dict, list):
        return kind is bool
    members = kind if isinstance(kind, tuple) else getattr(kind, "__args__", (kind,))
    return bool in members


def _describe(kind: Any) -> str:
    members = kind if isinstance(kind, tuple) else getattr(kind, "__args__", (kind,))
    names = {str: "a string", int: "an integer", float: "a number", bool: "true or false", dict: "an object"}
    return " or ".join("null" if m is type(None) else names.get(m, "a list") for m in members)
