"""Hostile files: valid ones with a few values, keys and bytes changed.

Each generator takes `Choices`: hypothesis makes them where a failure is to be shrunk, a plain random generator where as
many inputs as possible are to be tried. The first choice is the plainest, which is where hypothesis shrinks to.

JSON is written here rather than by `json.dumps`, which refuses what others may send: doubled keys, numbers that are
none or too long, nesting without end, half surrogate pairs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hypothesis import strategies as st


class Choices(Protocol):
    def below(self, n: int) -> int:
        """One of 0 … n - 1."""


class Drawn:
    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw

    def below(self, n: int) -> int:
        return self.draw(st.integers(0, n - 1))


class Random:
    def __init__(self, seed: int | None = None) -> None:
        self.below = random.Random(seed).randrange


Generator = Callable[[Choices], bytes]


def one_of(choices: Choices, values: Sequence[Any]) -> Any:
    return values[choices.below(len(values))]


@dataclass(frozen=True)
class Raw:
    """Text that stands in a document as it is."""

    text: str


@dataclass(frozen=True)
class Pairs:
    """An object whose keys may repeat."""

    items: tuple[tuple[str, Any], ...]


PLAIN: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], 0, 1, -1, 2, 3, 0.5, 0.0, -0.0)
NUMBERS = (7, 255, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, -(10**30), 10**400, 1e-308, 1e308)
RAW = [
    Raw(text)
    for text in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "01", "'x'", '"\\ud800"', '"\\udc00 "')
]
DEEP = [Raw("[" * depth + "]" * depth) for depth in (60, 70, 3000, 9000)] + [Raw('{"a":' * 900 + "1" + "}" * 900)]
TEXTS = (
    "", " ", "x", "-1", "²", "é", "🙂", "\0", "\x1b[31m", "\n", "\u2028", "x" * 300, "x" * 5000, "nan", "{}", "%s",
    ".", "..", "/", "../outside/secret.json", "../outside/secret.safetensors", "@outside/secret.json", "@outside",
    "/etc/hostname", "a\\b", "~", "C:x", "con", "https://localhost/x", "code.Canary", "code--code.Canary", "__class__",
    "__proto__", "None",
)  # fmt: skip


def value(choices: Choices, words: Sequence[Any], depth: int = 0) -> Any:
    """Anything that may stand in a place of a document; likely one of `words`, which the parser knows."""
    kind = choices.below(12 if depth < 3 else 10)
    if kind < 9:
        return one_of(choices, (PLAIN, words, words, NUMBERS, TEXTS, TEXTS, RAW, NUMBERS, DEEP)[kind])
    if kind == 9:
        number = choices.below(2**66) - 2**65
        return number >> choices.below(66)
    inner = [value(choices, words, depth + 1) for _ in range(choices.below(4))]
    return inner if kind == 10 else {key(choices, words): each for each in inner}


def key(choices: Choices, words: Sequence[Any]) -> str:
    name = one_of(choices, words if choices.below(3) else TEXTS)
    return name if isinstance(name, str) else "x"


def to_text(value: Any) -> str:
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, Pairs | dict):
        items = value.items if isinstance(value, Pairs) else value.items()
        return "{" + ",".join(f"{json.dumps(key)}:{to_text(inner)}" for key, inner in items) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(to_text, value)) + "]"
    return json.dumps(value)


def _change(choices: Choices, document: Any, words: Sequence[Any]) -> Any:
    """The document with one place changed: another value, no value, one more, a key twice."""
    if not isinstance(document, list | dict) or not document:
        return value(choices, words)
    keys = list(document) if isinstance(document, dict) else range(len(document))
    place = one_of(choices, keys)
    inner = document[place]
    if isinstance(inner, list | dict) and inner and choices.below(4):
        new = _change(choices, inner, words)
        if isinstance(document, list):
            return [*document[:place], new, *document[place + 1 :]]
        return {**document, place: new}
    how = one_of(choices, ("remove", "replace", "replace", "replace", "add", "double"))
    new = value(choices, words)
    if isinstance(document, list):
        middle = {"remove": [], "replace": [new]}.get(how, [inner, new])
        return [*document[:place], *middle, *document[place + 1 :]]
    if how == "double":
        return Pairs((*document.items(), (place, new)))
    if how == "add":
        return {**document, key(choices, words): new}
    return {k: new if k == place else v for k, v in document.items() if k != place or how == "replace"}


def json_text(choices: Choices, seeds: Sequence[Any], words: Sequence[Any]) -> bytes:
    """A seed in which up to four places were changed."""
    document = one_of(choices, seeds)
    for _ in range(choices.below(5)):
        document = _change(choices, document, words)
    return to_text(document).encode()


EDITS = ("none",) * 6 + ("cut", "put in", "replace", "replace", "twice", "mark", "utf-16")
BYTES = (b"\xff", b"\0", b"\r", b"\n", b'"', b"{", b"}", b",", b"9", b"\xed\xa0\x80", b"\xc0\xaf", b" " * 8)


def edit(choices: Choices, data: bytes) -> bytes:
    """Bytes, as often as not as they are; else cut, with some put in or replaced, twice, or with a byte order mark."""
    how = one_of(choices, EDITS)
    if how in ("cut", "put in", "replace"):
        at = choices.below(len(data) + 1)
        if how == "cut":
            return data[:at]
        new = one_of(choices, BYTES) if choices.below(2) else bytes([choices.below(256)])
        return data[:at] + new + data[at + (len(new) if how == "replace" else 0) :]
    if how == "twice":
        return data + data
    if how == "mark":
        return b"\xef\xbb\xbf" + data
    return data.decode("utf-8", "replace").encode("utf-16") if how == "utf-16" else data


def json_files(seeds: Sequence[Any], words: Sequence[Any]) -> Generator:
    return lambda choices: edit(choices, json_text(choices, seeds, words))


def json_lines(seeds: Sequence[Any], words: Sequence[Any]) -> Generator:
    line = json_files(seeds, words)
    return lambda choices: b"\n".join(line(choices) for _ in range(1 + choices.below(3)))


def safetensors_files(headers: Sequence[Any], words: Sequence[Any], data_size: int) -> Generator:
    """Files with a changed header, its size told right or wrong, and more or fewer bytes behind it."""

    def generate(choices: Choices) -> bytes:
        header = json_text(choices, headers, words) + b" " * one_of(choices, (0, 0, 0, 1, 8))
        wrong = (0, 1, max(0, len(header) - 1), len(header) + 1, 2**31, 2**63, 2**64 - 1, 100 << 20)
        length = len(header) if choices.below(4) else one_of(choices, wrong)
        size = data_size if choices.below(4) else one_of(choices, (0, data_size - 1, data_size + 1))
        return edit(choices, length.to_bytes(8, "little") + header + bytes(size))

    return generate


def strategy(generator: Generator) -> st.SearchStrategy[bytes]:
    """The inputs of a generator, for hypothesis."""
    return st.composite(lambda draw: generator(Drawn(draw)))()
