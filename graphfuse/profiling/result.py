"""What a profile found, as data and as JSON.

{"kind": "graphfuse profile", "schema": 1, "model", "device", "ranks", "batch", "input_len", "steps", "dtype",
 "executor", "timed": how the times were taken, "versions", "date", "all_reduces": {variant: totals of its report},
 "phases": {"prefill" | "step": {"unfused" | "fused": {
    "us": a call, "idle": µs of it, "unattributed", "attributed": 0 ... 1, "kernels": a call,
    "categories": {category: µs a call},
    "modules": [{"module", "layers": how many it stands for, "category", "op", "us": a call}]}}}}
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from graphfuse.profiling.attribution import Spent
from graphfuse.profiling.labels import CATEGORIES, NORM, REDUCTION, Label

KIND, SCHEMA = "graphfuse profile", 1
UNFUSED, FUSED = "unfused", "fused"
VARIANTS = (UNFUSED, FUSED)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Module:
    """Modules alike in all layers, such as layers.*.mlp.down_proj."""

    module: str
    layers: int
    category: str
    op: str
    us: float


@dataclass(frozen=True)
class Phase:
    """One phase of one variant; times in microseconds a call."""

    us: float
    idle: float
    unattributed: float
    attributed: float
    kernels: float
    categories: Mapping[str, float]
    modules: list[Module]

    @staticmethod
    def of(spent: Spent, calls: int) -> Phase:
        categories = dict.fromkeys(CATEGORIES, 0.0)
        for label, time in spent.by_label.items():
            categories[label.category] += time / calls
        return Phase(
            us=spent.window / calls,
            idle=spent.idle / calls,
            unattributed=spent.unattributed / calls,
            attributed=spent.attributed,
            kernels=spent.kernels / calls,
            categories=categories,
            modules=_modules(spent.by_label, calls),
        )

    @property
    def reductions_and_norms(self) -> float:
        """What fusion is about: a fused reduction holds the norm behind it."""
        return self.categories[REDUCTION] + self.categories[NORM]


def _modules(by_label: Mapping[Label, float], calls: int) -> list[Module]:
    paths: defaultdict[tuple[str, str, str], set[str]] = defaultdict(set)
    times: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for label, time in by_label.items():
        key = (_NUMBER.sub("*", label.path), label.category, label.op)
        paths[key].add(label.path)
        times[key] += time / calls
    found = [Module(key[0], len(paths[key]), key[1], key[2], us) for key, us in times.items()]
    return sorted(found, key=lambda module: -module.us)


@dataclass(frozen=True)
class Profile:
    """Of a model on a host, fused and unfused."""

    model: str
    device: str
    ranks: int
    batch: int
    input_len: int
    steps: int
    dtype: str
    executor: str
    timed: str
    date: str
    versions: Mapping[str, str]
    all_reduces: Mapping[str, Mapping[str, int]]
    phases: Mapping[str, Mapping[str, Phase]]
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"kind": KIND, "schema": SCHEMA, **asdict(self)}

    def dumps(self) -> str:
        return json.dumps(_rounded(self.to_json()), indent=1, ensure_ascii=False)

    def shape(self, phase: str) -> str:
        tokens = self.input_len if phase == "prefill" else 1
        return f"{phase} of [{self.batch}, {tokens}]"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
