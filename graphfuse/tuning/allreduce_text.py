"""Measurements of the fused all-reduce as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from graphfuse.tuning.allreduce_candidates import DISPATCHED, ELIGIBLE, UNFUSED
from graphfuse.tuning.allreduce_measure import LINK
from graphfuse.tuning.allreduce_result import Result, Row


class Columns:
    """A table that grows row by row: microseconds by candidate, then GB/s and ratio of the one that serves."""

    def __init__(self, candidates: Sequence[str], itemsize: int) -> None:
        self._names = (*candidates, LINK)
        self._itemsize = itemsize

    def header(self) -> str:
        names = " ".join(f"{name:>{_width(name)}}" for name in self._names)
        return f"{'tokens':>6} {'hidden':>6} {names}   GB/s  ratio  served by     (µs a call; ratio: unfused to served)"

    def line(self, row: Row) -> str:
        cells = " ".join(f"{_number(row.us.get(name)):>{_width(name)}}" for name in self._names)
        served, time = _served(row)
        if time is None:
            return f"{row.tokens:>6} {row.hidden:>6} {cells}"
        rate = row.tokens * row.hidden * self._itemsize / time / 1e3
        ratio = f"{row.us[UNFUSED] / time:.2f}x" if UNFUSED in row.us else "-"
        return f"{row.tokens:>6} {row.hidden:>6} {cells} {rate:>6.1f} {ratio:>6}  {served}"


def absent_lines(absent: dict[str, str]) -> list[str]:
    return [f"not measured, or not everywhere: {name}: {reason}" for name, reason in absent.items()]


def summary_lines(result: Result) -> list[str]:
    """The summary in words."""
    lines = []
    summary = result.summary()
    for name, ratios in summary["against"].items():
        worst = ratios["worst"]
        means = ", ".join(f"{v:.2f}x {k.replace('_', ' ')}" for k, v in ratios.items() if k != "worst")
        at = f"{worst['tokens']} tokens of hidden size {worst['hidden']}"
        lines.append(f"dispatched against {name}: {means} (geometric means); worst {worst['ratio']:.2f}x at {at}")
    if summary["over_link"]:
        each = ", ".join(f"{ratio:.2f} at hidden size {hidden}" for hidden, ratio in summary["over_link"].items())
        lines.append(f"dispatched over the link's floor, worst from 8192 tokens: {each}")
    return lines


def _served(row: Row) -> tuple[str | None, float | None]:
    """What graphfuse takes, else the fastest that a size table could give it."""
    if DISPATCHED in row.us:
        return row.dispatched, row.us[DISPATCHED]
    eligible = {name: row.us[name] for name in ELIGIBLE if name in row.us}
    best = min(eligible, key=lambda name: eligible[name], default=None)
    return best, None if best is None else eligible[best]


def _width(name: str) -> int:
    return max(len(name), 7)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
