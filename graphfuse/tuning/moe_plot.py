"""A measurement of MoE experts as a picture: time over tokens, a panel for each shape, a line for each candidate, the
floor dashed, and recorded figures of a peer as crosses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphfuse.tuning.moe_peers import Peers
from graphfuse.tuning.moe_result import FLASHINFER, GROUPED, HEURISTIC, TUNED, Result
from graphfuse.tuning.plotting import EMPHASIS, FLOOR, PLAIN, check_plot, new_figure, save, time_over_tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOUR_OF = {GROUPED: "black", FLASHINFER: "tab:green", HEURISTIC: "tab:orange", TUNED: "tab:red"}
MAX_COLUMNS = 4


def plot(result: Result, file: Path, peers: Peers | None = None) -> None:
    """Draw a result into a file. Raises `ConfigError` where that cannot be."""
    check_plot(file)
    save(draw(result, peers), file)


def draw(result: Result, peers: Peers | None = None) -> Figure:
    """The picture of a result."""
    columns = min(MAX_COLUMNS, len(result.shapes))
    figure, panels = new_figure(-(-len(result.shapes) // columns), columns)
    for panel in panels[len(result.shapes) :]:
        panel.set_visible(False)
    for panel, shape in zip(panels, result.shapes, strict=False):
        rows = result.of_shape(shape.name)
        for name, colour in COLOUR_OF.items():  # the last ones lie on top
            style: dict[str, Any] = PLAIN | (EMPHASIS if name == TUNED else {}) | {"color": colour, "label": name}
            _line(panel, [(row.tokens, row.us[name]) for row in rows if name in row.us], style)
        _line(panel, [(row.tokens, row.floor_us) for row in rows], FLOOR | {"label": "floor"})
        if peers is not None:
            recorded = [(row.tokens, peers.us.get((shape.key, row.tokens))) for row in rows]
            style = {"linestyle": "", "marker": "x", "color": "tab:blue", "label": f"{peers.peer}, recorded"}
            _line(panel, [(tokens, us) for tokens, us in recorded if us is not None], style)
        time_over_tokens(panel, shape.name)
    panels[0].set_ylabel("µs a call")
    labelled = {text: line for panel in panels for line, text in zip(*panel.get_legend_handles_labels(), strict=True)}
    panels[0].legend(labelled.values(), labelled.keys(), fontsize="small")
    figure.suptitle(f"Routed experts of MoE layers on {result.host}, {result.routing} routing", fontsize="medium")
    return figure


def _line(panel: Any, points: list[tuple[int, float]], style: dict[str, Any]) -> None:
    if points:
        panel.plot(*zip(*points, strict=True), **style)
