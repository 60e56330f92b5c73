"""A measurement of generation as a picture: time of a step over batch sizes, and tokens a second, fused and unfused,
with the roofline dashed. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphfuse.tuning.generate_plan import FUSED, UNFUSED
from graphfuse.tuning.generate_result import Result
from graphfuse.tuning.plotting import EMPHASIS, FLOOR, PLAIN, check_plot, new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES: dict[str, dict[str, Any]] = {UNFUSED: PLAIN | {"color": "black"}, FUSED: EMPHASIS | {"color": "tab:red"}}


def plot(result: Result, file: Path) -> None:
    """Draw a result into a file. Raises `ConfigError` where that cannot be."""
    check_plot(file)
    save(draw(result), file)


def draw(result: Result) -> Figure:
    figure, (times, rates) = new_figure(1, 2)
    floor: dict[int, float] = {}
    for variant, style in STYLES.items():
        rows = [row for row in result.rows if row.variant == variant]
        if rows:
            batches = [row.batch for row in rows]
            times.plot(batches, [row.tpot_ms for row in rows], **style, label=variant)
            rates.plot(batches, [row.tokens_per_s for row in rows], **style, label=variant)
            floor = {row.batch: row.roofline_ms for row in rows}
    if floor:
        times.plot(list(floor), list(floor.values()), **FLOOR, label="roofline")
        rates.plot(list(floor), [1e3 * batch / ms for batch, ms in floor.items()], **FLOOR, label="roofline")
        times.legend(fontsize="small")
    for panel, what in ((times, "ms a step"), (rates, "tokens/s")):
        panel.set(title=f"{what}, behind prompts of {result.input_len}", xlabel="sequences", ylabel=what, yscale="log")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.yaxis.set_major_formatter("{x:,g}")
        panel.grid(True, which="major", alpha=0.3)
    figure.suptitle(f"{result.model} in {result.dtype} on {result.host}", fontsize="medium")
    return figure
