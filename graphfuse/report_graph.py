"""What stands around a reduction, as a small graph for people: before the passes, and after them.

A dozen ops at most, recorded for every reduction while the passes run (`passes/surroundings.py`). Most sites of a model
look alike, and equal pictures are one object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Box:
    """One op, or several like it with the same input."""

    label: str
    shape: str = ""
    role: str = "other"
    """"reduction", "add", "norm", "fused" or "other"."""

    count: int = 1


@dataclass(frozen=True)
class SmallGraph:
    """Boxes in graph order, and edges (from, to, what the value is, or ""). `start` is the box that it is about."""

    boxes: tuple[Box, ...]
    edges: tuple[tuple[int, int, str], ...]
    start: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "boxes": [{"label": b.label, "shape": b.shape, "role": b.role, "count": b.count} for b in self.boxes],
            "edges": [list(edge) for edge in self.edges],
            "start": self.start,
        }


@dataclass(frozen=True)
class Surroundings:
    """`before` and `after` are None where nothing was recorded; `after` also where the reduction stayed as it was."""

    dtype: str
    """Of the reduced value, such as "bfloat16"."""

    shape: str
    """Of the reduced value: "[T, 4096]", with T for dimensions that vary."""

    before: SmallGraph | None = None
    after: SmallGraph | None = None
