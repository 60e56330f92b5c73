"""What the parsers under test have in common: the words of a document, where an error came up, what it says."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

from graphfuse.errors import GraphfuseError
from tests.documents import ROOT

OURS = tuple(str(ROOT / name) + "/" for name in ("graphfuse", "passes", "models"))


def keys_of(objects: Sequence[Any]) -> list[str]:
    """The keys in some documents: what a misspelt or misplaced key may be."""
    keys: dict[str, None] = {}
    waiting = list(objects)
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            keys |= dict.fromkeys(value)
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return list(keys)


def lines_of(error: BaseException | None) -> list[str]:
    """Where in our code an error came up."""
    if error is None:
        return []
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{frame.name}:{frame.lineno}" for frame in frames if frame.filename.startswith(OURS)][-3:]


def check_message(error: GraphfuseError) -> None:
    """What a user reads: one printable line of bounded length that ends a sentence."""
    text = str(error)
    assert text.isprintable(), repr(text)
    assert len(text) < 1500, len(text)
    assert text.endswith((".", ")")), text
