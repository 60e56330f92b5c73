"""A measurement of the fused all-reduce as a picture: time over tokens, a panel for each hidden size, a line for each
candidate, the link's floor dashed. Needs matplotlib, which only this file imports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphfuse.tuning.allreduce_candidates import BENCHED, DISPATCHED, UNFUSED
from graphfuse.tuning.allreduce_measure import LINK
from graphfuse.tuning.allreduce_result import Result
from graphfuse.tuning.plotting import EMPHASIS, FLOOR, PLAIN, check_plot, new_figure, save, time_over_tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Thicker: what the comparison is about.
EMPHASISED = {UNFUSED: "black", DISPATCHED: "tab:red"}
OTHERS = [name for name in BENCHED if name not in EMPHASISED]
COLOURS = ("tab:blue", "tab:cyan", "tab:orange", "tab:green", "tab:olive", "tab:gray", "tab:purple", "tab:brown")
COLOUR_OF = {**dict(zip(OTHERS, COLOURS, strict=False)), **EMPHASISED}


def plot(result: Result, file: Path) -> None:
    """Draw a result into a file. Raises `ConfigError` where that cannot be."""
    check_plot(file)
    save(draw(result), file)


def draw(result: Result) -> Figure:
    """The picture of a result."""
    hidden_sizes = sorted({row.hidden for row in result.rows})
    figure, panels = new_figure(1, len(hidden_sizes), sharey=True)
    for panel, hidden in zip(panels, hidden_sizes, strict=True):
        rows = sorted((row for row in result.rows if row.hidden == hidden), key=lambda row: row.tokens)
        for name in (*OTHERS, *EMPHASISED, LINK):  # the last ones lie on top
            points = [(row.tokens, row.us[name]) for row in rows if name in row.us]
            if not points:
                continue
            style: dict[str, Any] = PLAIN | {"color": COLOUR_OF.get(name), "label": name}
            if name == LINK:
                style = FLOOR | {"label": "link's floor"}
            elif name in EMPHASISED:
                style |= EMPHASIS
            panel.plot(*zip(*points, strict=True), **style)
        time_over_tokens(panel, f"hidden size {hidden:,}")
    # The floor of few tokens is next to nothing and would press the rest together.
    times = [time for row in result.rows for name, time in row.us.items() if name != LINK]
    panels[0].set_ylim(min(times) / 1.3, max(times) * 1.3)
    panels[0].set_ylabel("µs a call")
    panels[0].legend(fontsize="small")
    figure.suptitle(f"{result.what.split(', microseconds')[0]} on {result.host.split(',')[0]}", fontsize="medium")
    return figure
