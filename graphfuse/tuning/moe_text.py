"""Measurements of MoE experts as lines of text."""

from __future__ import annotations

from graphfuse.tuning.moe_floor import flop, min_bytes
from graphfuse.tuning.moe_result import CANDIDATES, TUNED, BenchedShape, Result, Row

HEADER = (
    f"{'tokens':>6} {'experts':>7} {' '.join(f'{name:>10}' for name in CANDIDATES)} {'floor':>8} {'TFLOP/s':>8} "
    f"{'GB/s':>6}  tuned by     (µs a call; experts: touched)"
)


def shape_line(shape: BenchedShape) -> str:
    numbers = f"E={shape.experts}, N={shape.intermediate_size}, H={shape.hidden_size}, top-{shape.top_k}, {shape.form}"
    return f"{shape.name}: {numbers}, served by {shape.table}"


def line(row: Row, shape: BenchedShape) -> str:
    """A row, with the rates that "tuned" reaches."""
    cells = " ".join(f"{_number(row.us.get(name)):>10}" for name in CANDIDATES)
    head = f"{row.tokens:>6} {row.experts_touched:>7.1f} {cells} {row.floor_us:>8.1f}"
    if TUNED not in row.us:
        return head
    tera, giga = rates(row, shape)
    return f"{head} {tera:>8.1f} {giga:>6.0f}  {row.tuned_by}"


def rates(row: Row, shape: BenchedShape) -> tuple[float, float]:
    """TFLOP/s and GB/s that "tuned" reaches."""
    num_bytes = min_bytes(shape.sizes, row.tokens, row.experts_touched, shape.form)
    return flop(shape.sizes, row.tokens) / row.us[TUNED] / 1e6, num_bytes / row.us[TUNED] / 1e3


def absent_lines(result: Result) -> list[str]:
    """Each reason once, with the shapes that it holds for."""
    shapes: dict[tuple[str, str], list[str]] = {}
    for shape in result.shapes:
        for name, reason in shape.absent.items():
            shapes.setdefault((name, reason), []).append(shape.name)
    return [
        f"not measured, or not everywhere: {name} of {', '.join(names)}: {reason}"
        for (name, reason), names in shapes.items()
    ]


def summary_lines(result: Result) -> list[str]:
    """The summary in words."""
    lines = []
    for shape, found in result.summary().items():
        parts = []
        for name, ratios in found["against"].items():
            means = ", ".join(f"{v:.2f}x {k.replace('_', ' ')}" for k, v in ratios.items() if k != "worst")
            worst = ratios["worst"]
            parts.append(f"against {name} {means}, worst {worst['ratio']:.2f}x at {worst['tokens']} tokens")
        if found["over_floor"] is not None:
            parts.append(f"{found['over_floor']:.2f} times the floor")
        if parts:
            lines.append(f"{shape}: tuned {'; '.join(parts)} (geometric means)")
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
