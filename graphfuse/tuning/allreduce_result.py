"""What a measurement of the fused all-reduce found, as data: rows, what they come to, and the file that holds them.

    {
      "schema": 1, "what", "host", "device_name", "world_size", "dtype", "link", "link_gbps", "versions", "date",
      "method",
      "absent": {candidate: why},
      "rows": [{"tokens", "hidden", "us": {candidate: µs}, "spread": {candidate: share}, "dispatched": candidate}],
      "summary": {"against": {"unfused": {"up_to_1024_tokens", "above_1024_tokens", "worst"}, ...}, "over_link": {...}}
    }

`us` is a median over rounds; `spread` is half the interquartile range over those rounds, as a share of it. "link" is no
candidate but a floor: the bytes over the rate of a copy between two GPUs. `against` says how many times as fast as that
candidate `dispatched` is.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphfuse.jsonfile import JsonObject
from graphfuse.tuning.measured import geometric_mean, write_result

if TYPE_CHECKING:
    from graphfuse.tuning.allreduce_measure import Measured, Plan

SCHEMA = 1
SMALL_TOKENS = 1024
LARGE_TOKENS = 8192
BASELINES = {
    "unfused": ("unfused",),
    "flashinfer": ("flashinfer/oneshot",),
    "torch": ("torch/one_shot", "torch/two_shot"),
    "sequence_parallel": ("sequence_parallel",),
}


@dataclass(frozen=True)
class Row:
    """One size: microseconds a call by candidate, how far they spread, and which candidate `dispatched` was."""

    tokens: int
    hidden: int
    us: dict[str, float]
    spread: dict[str, float] = field(default_factory=dict)
    dispatched: str | None = None


@dataclass(frozen=True)
class Result:
    """A result file."""

    what: str
    host: str
    device_name: str
    world_size: int
    dtype: str
    link: str
    link_gbps: float | None
    versions: dict[str, str | None]
    date: str
    method: str
    absent: dict[str, str]
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, measured: Measured, plan: Plan, num_nvlinks: int | None) -> Result:
        """The result of a run that ends now."""
        facts, gpu = measured.facts, measured.facts.device_type == "cuda"
        dtype = str(plan.dtype).removeprefix("torch.")
        forbidden = f", multicast forbidden by {facts.multicast_forbidden_by}" if facts.multicast_forbidden_by else ""
        method = "CUDA-graph replays of up to 20 calls on several sets of inputs in turn" if gpu else "wall clock, gloo"
        return cls(
            what=f"all-reduce + residual add + RMSNorm, TP{facts.world_size}, {dtype}, microseconds per call",
            host=f"{facts.world_size}x {facts.gpu or facts.device_type}{forbidden}",
            device_name=facts.gpu or facts.device_type,
            world_size=facts.world_size,
            dtype=dtype,
            link=_link(num_nvlinks, measured.link_gbps),
            link_gbps=None if measured.link_gbps is None else round(measured.link_gbps, 1),
            versions={
                "torch": facts.torch,
                "triton": facts.triton,
                "flashinfer-python": facts.flashinfer,
                "nccl": facts.nccl,
            },
            date=datetime.date.today().isoformat(),
            method=f"{method}; candidates interleaved, median of {plan.timed} rounds, maximum over ranks",
            absent=dict(measured.absent),
            rows=tuple(measured.rows),
        )

    @classmethod
    def read(cls, file: str | Path) -> Result:
        """A result from its file. Raises `SchemaError` naming the file and the key."""
        obj = JsonObject.read(file)
        obj.only("schema", *cls.__dataclass_fields__, "summary")
        if obj.get("schema", int) != SCHEMA:
            raise obj.error("schema", f"is {obj.data['schema']}; this version of graphfuse reads {SCHEMA}")
        rows = []
        for row in obj.objects("rows"):
            row.only(*Row.__dataclass_fields__)
            us, spreads = row.object("us"), row.object("spread")
            for name in us.data:
                us.positive(name, int | float)
            for name in spreads.data:
                spreads.get(name, int | float)
            values = {key: row.positive(key) for key in ("tokens", "hidden")}
            rows.append(
                Row(
                    **values, us=row.data["us"], spread=row.data["spread"], dispatched=row.get("dispatched", str | None)
                )
            )
        for of_names in (versions := obj.object("versions"), absent := obj.object("absent")):
            for name in of_names.data:
                of_names.get(name, str | None)
        texts = {key: obj.get(key, str) for key in ("what", "host", "device_name", "dtype", "link", "date", "method")}
        return cls(
            **texts,
            world_size=obj.positive("world_size"),
            link_gbps=obj.get("link_gbps", int | float | None),
            versions=versions.data,
            absent=absent.data,
            rows=tuple(rows),
        )

    def write(self, file: Path) -> None:
        """Write the file, one line a row. Raises `ConfigError` where that cannot be."""
        data = {"schema": SCHEMA, **asdict(self), "summary": self.summary()}
        rows = data.pop("rows")
        write_result(file, data, rows)

    def summary(self) -> dict[str, Any]:
        """What `dispatched` comes to: geometric means of ratios to each baseline, the worst points, and the link."""
        against = {name: self._against(names) for name, names in BASELINES.items()}
        return {
            "against": {name: ratios for name, ratios in against.items() if ratios},
            "over_link": self._over_link(),
        }

    def ratios(self, names: Sequence[str]) -> list[tuple[Row, float]]:
        """For each row, how many times as fast as the fastest of `names` `dispatched` is."""
        found = []
        for row in self.rows:
            others = [row.us[name] for name in names if name in row.us]
            if others and "dispatched" in row.us:
                found.append((row, min(others) / row.us["dispatched"]))
        return found

    def _against(self, names: Sequence[str]) -> dict[str, Any]:
        ratios = self.ratios(names)
        small = [ratio for row, ratio in ratios if row.tokens <= SMALL_TOKENS]
        large = [ratio for row, ratio in ratios if row.tokens > SMALL_TOKENS]
        means = {f"up_to_{SMALL_TOKENS}_tokens": small, f"above_{SMALL_TOKENS}_tokens": large}
        if not ratios:
            return {}
        return {
            **{name: round(geometric_mean(each), 3) for name, each in means.items() if each},
            "worst": _point(min(ratios, key=lambda pair: pair[1])),
        }

    def _over_link(self) -> dict[str, Any]:
        """Time over the link's floor, worst by hidden size at large messages, where nothing else counts."""
        worst: dict[str, Any] = {}
        for row in self.rows:
            if row.tokens >= LARGE_TOKENS and {"dispatched", "link"} <= set(row.us):
                ratio = round(row.us["dispatched"] / row.us["link"], 3)
                worst[str(row.hidden)] = max(worst.get(str(row.hidden), 0.0), ratio)
        return worst


def _point(pair: tuple[Row, float]) -> dict[str, Any]:
    row, ratio = pair
    return {"hidden": row.hidden, "tokens": row.tokens, "ratio": round(ratio, 3)}


def _link(num_nvlinks: int | None, gbps: float | None) -> str:
    links = "links unknown" if num_nvlinks is None else f"{num_nvlinks} NVLinks a GPU" if num_nvlinks else "no NVLink"
    return links if gbps is None else f"{links}, a peer copy reaches {gbps:.0f} GB/s"
