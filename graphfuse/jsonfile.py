"""Data files checked key by key, so that a wrong one is an error that names the file and the key."""

from __future__ import annotations

import json
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphfuse.errors import SchemaError


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
            data = json.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SchemaError(f"{file} cannot be read as JSON: {error}. Check the file or give another one.") from error
        if not isinstance(data, dict):
            raise SchemaError(f"{file} holds a {type(data).__name__}, not a JSON object. Check the file.")
        return cls(data, str(file))

    def only(self, *known: str) -> None:
        """Raises `SchemaError` for keys other than `known`: a misspelt key must not pass as a missing optional one."""
        for key in self.data:
            if key not in known:
                raise self.error(key, f"is not known; known keys are {', '.join(known)}")

    def get(self, key: str, kind: type | types.UnionType | tuple[type, ...]) -> Any:
        """The value of a required key, of the given type (bool does not pass as int). Raises `SchemaError`."""
        if key not in self.data:
            raise self.error(key, "is missing")
        value = self.data[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and not _accepts_bool(kind)):
            raise self.error(key, f"is {value!r}, which is not {_describe(kind)}")
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
                raise self.error(f"{key}[{index}]", f"is {value!r}, which is not an object")
        return [JsonObject(v, self.file, f"{self.path}{key}[{i}].") for i, v in enumerate(values)]

    def error(self, key: str, problem: str) -> SchemaError:
        """A `SchemaError` for `key`, to be raised by the caller."""
        return SchemaError(f"{self.file}: the key {self.path}{key} {problem}. Correct the file.")


def _accepts_bool(kind: Any) -> bool:
    if kind in (bool, dict, list):
        return kind is bool
    members = kind if isinstance(kind, tuple) else getattr(kind, "__args__", (kind,))
    return bool in members


def _describe(kind: Any) -> str:
    members = kind if isinstance(kind, tuple) else getattr(kind, "__args__", (kind,))
    names = {str: "a string", int: "an integer", float: "a number", bool: "true or false", dict: "an object"}
    return " or ".join("null" if m is type(None) else names.get(m, "a list") for m in members)
