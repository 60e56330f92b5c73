"""What the pictures of measurements have in common: panels of time over tokens, both on log scales, and their files.
Needs matplotlib, which is imported only to draw."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphfuse.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL_INCHES = (4.6, 4.2)
EMPHASIS: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 2.2}
"""Of lines that the comparison is about."""
PLAIN: dict[str, Any] = {"marker": ".", "linewidth": 1.1}
FLOOR: dict[str, Any] = {"linestyle": "--", "color": "gray"}


def check_plot(file: Path) -> None:
    """Raises `ConfigError` where `save` could not draw that file, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError('Plots need matplotlib, which is not installed: pip install "graphfuse[bench]" brings it.')
    if file.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"{file} does not name a picture. End it with .png, .svg or .pdf.")


def save(figure: Figure, file: Path) -> None:
    """Write a picture. Raises `ConfigError` where that cannot be."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=110)
    except OSError as error:
        raise ConfigError(f"The plot cannot be written: {error}. Give another file.") from error


def new_figure(rows: int, columns: int, **options: Any) -> tuple[Figure, list[Any]]:
    """A figure of rows x columns panels, and these row by row."""
    from matplotlib.figure import Figure  # without pyplot: no display is looked for, no state is kept

    figure = Figure(figsize=(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def time_over_tokens(panel: Any, title: str) -> None:
    """Axes of a panel."""
    panel.set(title=title, xlabel="tokens", yscale="log")
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.tick_params(axis="x", labelrotation=45)
    panel.grid(True, which="major", alpha=0.3)
