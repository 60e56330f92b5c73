"""The output of a run: lines are only ever added, each by one write. A run that is killed loses the last one at most.

    answers.jsonl                         of one replica
    answers-00001-of-00004.jsonl          of replica 1 of 4

All files of an output are its family. A record is answered once in the whole of it, so that a run may go on with
another number of replicas. Each replica writes to its own file only.
"""

from __future__ import annotations

import fcntl
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from graphfuse.errors import SchemaError, brief
from graphfuse.generation.answers import BEGINNING, Known, read_answer

SAMPLE = 100
"""Answers whose prompts are compared with the input's."""

_PATIENCE = 10.0
_BLOCK = 1 << 20


def replica_path(output: Path, replica: int, num_replicas: int) -> Path:
    """The file of one replica."""
    if num_replicas == 1:
        return output
    return output.with_name(f"{output.stem}-{replica:05}-of-{num_replicas:05}{output.suffix}")


def family(output: Path) -> list[Path]:
    """Every file that holds answers of `output`, of any number of replicas, as far as they exist."""
    name = re.compile(re.escape(output.stem) + r"-\d{5}-of-\d{5}" + re.escape(output.suffix))
    folder = output.parent
    found = sorted(path for path in folder.iterdir() if name.fullmatch(path.name)) if folder.is_dir() else []
    return ([output] if output.exists() else []) + found


@dataclass
class Answered:
    """Which records have their answer."""

    keys: set[bytes] = field(default_factory=set)
    num_errors: int = 0
    num_ids: int = 0
    """How many of the keys stand for ids, not lines."""

    sample: dict[bytes, int] = field(default_factory=dict)
    """Numbers of prompt tokens of the first few."""

    def add(self, known: Known) -> None:
        if known.key in self.keys:
            return
        self.keys.add(known.key)
        self.num_errors += known.is_error
        self.num_ids += known.id is not None
        if known.num_prompt_tokens is not None and len(self.sample) < SAMPLE:
            self.sample[known.key] = known.num_prompt_tokens

    def digest(self) -> str:
        """Equal for the same keys in any order."""
        total = 0
        for key in self.keys:
            total ^= int.from_bytes(key, "big")
        return f"{total:032x}"


def read_answered(paths: Iterable[Path]) -> Answered:
    """The answers in these files. A last line that was cut short is none.

    Raises:
        SchemaError: a file cannot be read, or holds something else.
    """
    answered = Answered()
    for path in paths:
        for known, _ in _lines(path):
            if known is not None:
                answered.add(known)
    return answered


def _lines(path: Path) -> Iterator[tuple[Known | None, bytes]]:
    """Each line, and what it says: nothing where it is blank, or the last one and cut short."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    known = read_answer(line)
                except ValueError as error:
                    if not _is_part(line):
                        raise _no_answer(path, number, error) from None
                    known = None
                yield known, line
    except OSError as error:
        raise SchemaError(f"{path} cannot be read ({brief(error)}). Give another --output.") from error


def _is_part(line: bytes) -> bool:
    """Whether a line that is no answer may be left of one. A crash of the system can leave zeros."""
    if line.endswith(b"\n"):
        return not line.strip()
    return line.startswith(BEGINNING[: len(line)]) or not line.strip(b"\0 ")


def _no_answer(path: Path, number: int, error: ValueError) -> SchemaError:
    return SchemaError(
        f"Line {number} of {path} is no answer of a run ({brief(error)}). Give another --output, or --overwrite if "
        "nothing in it is needed."
    )


class AnswerFile:
    """A file to add lines to. No other process can have it open so."""

    def __init__(self, path: Path) -> None:
        """Open or make the file, without changing it.

        Raises:
            SchemaError: it cannot be written, or another run writes to it.
        """
        self.path = path
        if path.exists() and not path.is_file():
            raise SchemaError(f"{path} is no regular file, and answers are read again to go on. Give another --output.")
        try:
            self._file = path.open("ab", buffering=0)
        except (OSError, ValueError) as error:
            raise SchemaError(
                f"{path} cannot be written ({brief(error)}). Give an output path in an existing, writable folder."
            ) from error
        try:
            self._lock()
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        """A run that is being killed may hold the file for a moment longer."""
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > end:
                    raise SchemaError(
                        f"{self.path} is being written by another run. Wait for its end, or give another --output."
                    ) from None
                time.sleep(0.1)
            except OSError:  # a file system without locks
                return

    def repair(self) -> None:
        """Make an end of the last line: a whole answer gets its line break, part of one is dropped.

        Raises:
            SchemaError: the file holds something else than answers. It is left as it is.
        """
        size = 0
        for known, line in _lines(self.path):
            size += len(line)
            if line.endswith(b"\n"):
                continue
            if known is None:
                self._file.truncate(size - len(line))
            else:
                self._write(b"\n")

    def clear(self) -> None:
        """Drop everything that it holds."""
        self._file.truncate(0)

    def write(self, line: bytes) -> None:
        """Add a line, which the file holds when this returns.

        Raises:
            SchemaError: the disk is full, or the like.
        """
        try:
            self._write(line)
        except OSError as error:
            raise SchemaError(
                f"{self.path} cannot be written any more ({brief(error)}). Make room, and run the same command again: "
                "it goes on where it was."
            ) from error

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) or 0 :]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
