"""What a measurement of MoE experts found, as data: shapes, a row for each shape and number of tokens, and the file.

    {
      "schema": 1, "kind": "moe", "what", "host", "device_name", "routing", "versions", "date", "method",
      "shapes": [{"name", "experts", "intermediate_size", "hidden_size", "top_k", "form", "table", "notes",
                  "absent": {candidate: why}}],
      "summary": {shape: {"against": {candidate: {"up_to_512_tokens", "above_512_tokens", "worst"}}, "over_floor"}},
      "rows": [{"shape", "tokens", "us": {candidate: µs}, "spread": {candidate: share}, "error": {candidate: share},
                "experts_touched", "floor_us", "tuned_by"}]
    }

`us` is a median over rounds and `spread` half the interquartile range over them, as a share of it. `error` is that of
some rows against the plain reference, as a share of their norm. `tuned_by` is the config file that served as "tuned",
or "heuristic". `against` says how many times as fast as that candidate "tuned" is.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from graphfuse.errors import brief
from graphfuse.jsonfile import JsonObject
from graphfuse.tuning.measured import geometric_mean, write_result
from graphfuse.tuning.moe_tiles import MoeShape

SCHEMA, KIND = 1, "moe"
TUNED, HEURISTIC, GROUPED, FLASHINFER = "tuned", "heuristic", "grouped_mm", "flashinfer"
CANDIDATES = (TUNED, HEURISTIC, GROUPED, FLASHINFER)
SMALL_TOKENS = 512


@dataclass(frozen=True)
class BenchedShape:
    """One shape: what it is called, what it is, and what served it."""

    name: str
    experts: int
    intermediate_size: int
    hidden_size: int
    top_k: int
    form: str
    """How weights are stored, by `moe_inputs.FORMS`."""

    table: str
    """The config file that was found, or "heuristic"."""

    notes: tuple[str, ...] = ()
    absent: dict[str, str] = field(default_factory=dict)
    """Why a candidate is missing; the first reason, where numbers of tokens have different ones."""

    @property
    def key(self) -> tuple[int, int, int, int, str]:
        """What two measurements of one shape have in common."""
        return self.experts, self.intermediate_size, self.hidden_size, self.top_k, self.form

    @property
    def sizes(self) -> MoeShape:
        """Its four numbers, for the arithmetic of `moe_floor`."""
        return MoeShape(self.experts, self.intermediate_size, self.hidden_size, self.top_k)


@dataclass(frozen=True)
class Row:
    """One number of tokens of a shape."""

    shape: str
    tokens: int
    us: dict[str, float]
    spread: dict[str, float]
    error: dict[str, float]
    experts_touched: float
    floor_us: float
    tuned_by: str


@dataclass(frozen=True)
class Result:
    """A result file."""

    what: str
    host: str
    device_name: str
    routing: str
    versions: dict[str, str | None]
    date: str
    method: str
    shapes: tuple[BenchedShape, ...]
    rows: tuple[Row, ...]

    @classmethod
    def of(
        cls,
        shapes: Sequence[BenchedShape],
        rows: Sequence[Row],
        *,
        device_name: str,
        routing: str,
        rounds: int,
        versions: dict[str, str | None],
    ) -> Result:
        """The result of a run that ends now."""
        return cls(
            what="routed experts of an MoE layer on one GPU: sort, both products, activation, weighted sum; "
            "microseconds per call",
            host=f"1x {device_name}",
            device_name=device_name,
            routing=routing,
            versions=versions,
            date=datetime.date.today().isoformat(),
            method="CUDA-graph replays of 2 to 16 calls, each on other tokens and routings, so that weights are not in "
            f"L2; candidates interleaved, median of {rounds} rounds",
            shapes=tuple(shapes),
            rows=tuple(rows),
        )

    @classmethod
    def read(cls, file: str | Path) -> Result:
        """A result from its file. Raises `SchemaError` naming the file and the key."""
        obj = JsonObject.read(file)
        obj.only("schema", "kind", *cls.__dataclass_fields__, "summary")
        if obj.get("kind", str) != KIND:
            raise obj.error("kind", f"is {brief(obj.data['kind'])}, not {KIND!r}")
        if obj.get("schema", int) != SCHEMA:
            raise obj.error("schema", f"is {obj.data['schema']}; this version of graphfuse reads {SCHEMA}")
        shapes = tuple(_read_shape(each) for each in obj.objects("shapes"))
        names = {shape.name for shape in shapes}
        rows = tuple(_read_row(each, names) for each in obj.objects("rows"))
        versions = obj.object("versions")
        for name in versions.data:
            versions.get(name, str | None)
        texts = ("what", "host", "device_name", "routing", "date", "method")
        return cls(**{key: obj.get(key, str) for key in texts}, versions=versions.data, shapes=shapes, rows=rows)

    def write(self, file: Path) -> None:
        """Write the file, one line a row. Raises `ConfigError` where that cannot be."""
        data = {"schema": SCHEMA, "kind": KIND, **asdict(self), "summary": self.summary()}
        rows = data.pop("rows")
        write_result(file, data, rows)

    def of_shape(self, name: str) -> list[Row]:
        """The rows of a shape, by rising tokens."""
        return sorted((row for row in self.rows if row.shape == name), key=lambda row: row.tokens)

    def summary(self) -> dict[str, Any]:
        """What "tuned" comes to, by shape: ratios to each other candidate, and the mean over the floor."""
        return {shape.name: self._summary(self.of_shape(shape.name)) for shape in self.shapes}

    def _summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        against = {name: _against(rows, name) for name in CANDIDATES if name != TUNED}
        over_floor = [row.us[TUNED] / row.floor_us for row in rows if TUNED in row.us]
        return {
            "against": {name: ratios for name, ratios in against.items() if ratios},
            "over_floor": round(geometric_mean(over_floor), 3) if over_floor else None,
        }


def _against(rows: Sequence[Row], name: str) -> dict[str, Any]:
    ratios = [(row.tokens, row.us[name] / row.us[TUNED]) for row in rows if {name, TUNED} <= set(row.us)]
    if not ratios:
        return {}
    means = {
        f"up_to_{SMALL_TOKENS}_tokens": [ratio for tokens, ratio in ratios if tokens <= SMALL_TOKENS],
        f"above_{SMALL_TOKENS}_tokens": [ratio for tokens, ratio in ratios if tokens > SMALL_TOKENS],
    }
    tokens, worst = min(ratios, key=lambda pair: pair[1])
    return {
        **{key: round(geometric_mean(each), 3) for key, each in means.items() if each},
        "worst": {"tokens": tokens, "ratio": round(worst, 3)},
    }


def _read_shape(obj: JsonObject) -> BenchedShape:
    obj.only(*BenchedShape.__dataclass_fields__)
    numbers = {key: obj.positive(key) for key in ("experts", "intermediate_size", "hidden_size", "top_k")}
    texts = {key: obj.get(key, str) for key in ("name", "form", "table")}
    notes = obj.get("notes", list)
    for index, note in enumerate(notes):
        if not isinstance(note, str):
            raise obj.error(f"notes[{index}]", "is not a string")
    absent = obj.object("absent")
    for name in absent.data:
        absent.get(name, str)
    return BenchedShape(**texts, **numbers, notes=tuple(notes), absent=absent.data)


def _read_row(obj: JsonObject, shapes: set[str]) -> Row:
    obj.only(*Row.__dataclass_fields__)
    if obj.get("shape", str) not in shapes:
        raise obj.error("shape", "is none of the shapes")
    us, others = obj.object("us"), (obj.object("spread"), obj.object("error"))
    for name in us.data:
        read_us(us, name)
    for other in others:
        for name in other.data:
            other.get(name, int | float)
    return Row(
        shape=obj.data["shape"],
        tokens=obj.positive("tokens"),
        us=us.data,
        spread=others[0].data,
        error=others[1].data,
        experts_touched=obj.positive("experts_touched", int | float),
        floor_us=read_us(obj, "floor_us"),
        tuned_by=obj.get("tuned_by", str),
    )


def read_us(obj: JsonObject, key: str) -> float:
    """Microseconds under a required key. Raises `SchemaError` for what no call takes: ratios of it would overflow."""
    us = obj.positive(key, int | float)
    if not 1e-6 <= us <= 1e12:
        raise obj.error(key, f"is {us!r}, which is no time of a call in microseconds")
    return us
