"""Every trial of a tuner in a CSV file, from which an interrupted run goes on.

    # {"workload": "E=128, N=384, ...", "device": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "kernels": ...}
    time,tokens,rounds,us,status,block_m,gate_up_n,gate_up_k,gate_up_group,...,down_n,...
    2026-11-30T18:20:05,1,2,27.13,ok,16,64,128,1,4,3,0,...

The first line says what was measured with. Times under other versions, kernels or devices are not comparable, so a
journal of others is refused. A line that was cut short by a crash is dropped.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from graphfuse.errors import ConfigError, SchemaError, brief
from graphfuse.jsonfile import parse_json
from graphfuse.tuning.moe_tiles import Tile, Tiles

OK = "ok"
_OF_A_TILE = ("n", "k", "group", "warps", "stages", "swap")
COLUMNS = (
    "time", "tokens", "rounds", "us", "status", "block_m",
    *(f"gate_up_{name}" for name in _OF_A_TILE),
    *(f"down_{name}" for name in _OF_A_TILE),
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One pair of tiles, timed or failed."""

    num_tokens: int
    tiles: Tiles
    rounds: int
    us: float
    """Infinity if it does not run."""

    status: str = OK
    """What went wrong, on one line."""


class Known:
    """Trials by what was tried.

    A time over just as many rounds is preferred, so that a search over what is known repeats itself exactly; else one
    over more rounds serves. A failure serves for any number.
    """

    def __init__(self) -> None:
        self._trials: dict[tuple[int, Tiles], dict[int, Trial]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._trials.values()))

    def add(self, trial: Trial) -> None:
        self._trials.setdefault((trial.num_tokens, trial.tiles), {})[trial.rounds] = trial

    def get(self, num_tokens: int, tiles: Tiles, rounds: int) -> Trial | None:
        of_tiles = self._trials.get((num_tokens, tiles), {})
        serving = [trial for trial in of_tiles.values() if trial.status != OK or trial.rounds >= rounds]
        return of_tiles.get(rounds) or min(serving, key=lambda trial: trial.rounds, default=None)


class Journal:
    """The file, open for further trials."""

    def __init__(self, file: Path, origin: Mapping[str, str]) -> None:
        """Reads what is there, and goes on behind it.

        Raises:
            ConfigError: it was measured under another `origin`, or cannot be written.
            SchemaError: a line is not one of a journal.
        """
        self.file, self.known = file, Known()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._stream: IO[str] = file.open("a+", encoding="utf-8", newline="")
            self._stream.seek(0)
            text = self._stream.read()
            whole = text[: text.rfind("\n") + 1]
            if whole != text:
                self._stream.seek(0)
                self._stream.truncate(len(whole.encode()))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be written: {brief(error)}. Give another --output.") from error
        try:
            self._read(whole, origin)
        except BaseException:
            self._stream.close()
            raise

    def add(self, trial: Trial) -> None:
        """Into the file, whatever happens next."""
        self.known.add(trial)
        time = datetime.datetime.now().isoformat(timespec="seconds")
        us = f"{trial.us:.3f}" if math.isfinite(trial.us) else ""
        gate_up, down = ([int(value) for value in astuple(tile)] for tile in (trial.tiles.gate_up, trial.tiles.down))
        self._line([time, trial.num_tokens, trial.rounds, us, trial.status, *gate_up, *down[1:]])

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def _line(self, values: list[object]) -> None:
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(values)
        self._stream.write(line.getvalue())
        self._stream.flush()

    def _read(self, text: str, origin: Mapping[str, str]) -> None:
        lines = text.splitlines()
        if not lines:
            self._stream.write(f"# {json.dumps(dict(origin), ensure_ascii=False)}\n")
            self._line(list(COLUMNS))
            return
        found = self._origin(lines[0])
        for key, value in origin.items():
            if found.get(key) != value:
                raise ConfigError(
                    f"{self.file} was measured with {key} {brief(found.get(key))}, and this is {value!r}. Move the "
                    "file away to measure anew, or give another --output."
                )
        if len(lines) == 1:
            self._line(list(COLUMNS))
        elif lines[1] != ",".join(COLUMNS):
            raise self._no_journal()
        for number, row in enumerate(lines[2:], start=3):
            try:
                self.known.add(_trial(next(csv.reader([row], strict=True), [])))
            except (ValueError, csv.Error) as error:
                raise SchemaError(
                    f"{self.file}, line {number}: {brief(row)} is no trial. Remove the line, or move the file away."
                ) from error

    def _origin(self, line: str) -> dict[str, object]:
        try:
            if not line.startswith("# "):
                raise ValueError("no comment")
            found = parse_json(line[2:].encode())
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise self._no_journal()
        return found

    def _no_journal(self) -> SchemaError:
        return SchemaError(
            f"{self.file} does not begin as a file of trials does. Move the file away, or give another --output."
        )


def journal_file(table_file: Path) -> Path:
    """Beside the table, under its name."""
    return table_file.with_name(f"{table_file.name.removesuffix('.json')}.trials.csv")


def _trial(values: list[str]) -> Trial:
    """Raises `ValueError` for what is no line of a journal."""
    if len(values) != len(COLUMNS):
        raise ValueError("another number of columns")
    _, num_tokens, rounds, us, status, block_m, *rest = values
    numbers = [_count(value) for value in rest]
    tiles = Tiles(*(_tile(_count(block_m), numbers[start : start + len(_OF_A_TILE)]) for start in (0, len(_OF_A_TILE))))
    if (status == OK) != bool(us):
        raise ValueError("a time without success, or the reverse")
    time = float(us) if us else math.inf
    if us and not 0 < time < math.inf:
        raise ValueError("no time")
    return Trial(_count(num_tokens), tiles, _count(rounds), time, status)


def _count(text: str) -> int:
    number = int(text)
    if not 0 <= number < 1 << 31:
        raise ValueError("no such number")
    return number


def _tile(block_m: int, numbers: list[int]) -> Tile:
    block_n, block_k, group, warps, stages, swap = numbers
    return Tile(block_m, block_n, block_k, group, warps, stages, bool(swap))
