"""A measurement of the fused all-reduce as a picture: time over tokens, a panel for each hidden size, a line for each
candidate, the link's floor dashed. Needs matplotlib, which only this file imports."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphfuse.errors import ConfigError
from graphfuse.tuning.allreduce_candidates import BENCHED, DISPATCHED, UNFUSED
from graphfuse.tuning.allreduce_measure import LINK
from graphfuse.tuning.allreduce_result import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL_INCHES = (4.6, 4.2)
# Thicker: what the comparison is about.
EMPHASISED = {UNFUSED: "black", DISPATCHED: "tab:red"}
OTHERS = [name for name in BENCHED if name not in EMPHASISED]
COLOURS = ("tab:blue", "tab:cyan", "tab:orange", "tab:green", "tab:olive", "tab:gray", "tab:purple", "tab:brown")
COLOUR_OF = {**dict(zip(OTHERS, COLOURS, strict=False)), **EMPHASISED}


def check_plot(file: Path) -> None:
    """Raises `ConfigError` where `plot` could not draw that file, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError('Plots need matplotlib, which is not installed: pip install "graphfuse[bench]" brings it.')
    if file.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"{file} does not name a picture. End it with .png, .svg or .pdf.")


def plot(result: Result, file: Path) -> None:
    """Draw a result into a file. Raises `ConfigError` where that cannot be."""
    check_plot(file)
    figure = draw(result)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=110)
    except OSError as error:
        raise ConfigError(f"The plot cannot be written: {error}. Give another file.") from error


def draw(result: Result) -> Figure:
    """The picture of a result."""
    from matplotlib.figure import Figure  # without pyplot: no display is looked for, no state is kept

    hidden_sizes = sorted({row.hidden for row in result.rows})
    size = (PANEL_INCHES[0] * len(hidden_sizes), PANEL_INCHES[1])
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(hidden_sizes), sharey=True, squeeze=False)[0]
    for panel, hidden in zip(panels, hidden_sizes, strict=True):
        rows = sorted((row for row in result.rows if row.hidden == hidden), key=lambda row: row.tokens)
        for name in (*OTHERS, *EMPHASISED, LINK):  # the last ones lie on top
            points = [(row.tokens, row.us[name]) for row in rows if name in row.us]
            if not points:
                continue
            style: dict[str, Any] = {"marker": ".", "linewidth": 1.1, "color": COLOUR_OF.get(name), "label": name}
            if name == LINK:
                style = {"linestyle": "--", "color": "gray", "label": "link's floor"}
            elif name in EMPHASISED:
                style |= {"marker": "o", "markersize": 4, "linewidth": 2.2}
            panel.plot(*zip(*points, strict=True), **style)
        panel.set(title=f"hidden size {hidden:,}", xlabel="tokens", yscale="log")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.tick_params(axis="x", labelrotation=45)
        panel.grid(True, which="major", alpha=0.3)
    # The floor of few tokens is next to nothing and would press the rest together.
    times = [time for row in result.rows for name, time in row.us.items() if name != LINK]
    panels[0].set_ylim(min(times) / 1.3, max(times) * 1.3)
    panels[0].yaxis.set_major_formatter("{x:,.0f}")
    panels[0].set_ylabel("µs a call")
    panels[0].legend(fontsize="small")
    figure.suptitle(f"{result.what.split(', microseconds')[0]} on {result.host.split(',')[0]}", fontsize="medium")
    return figure
