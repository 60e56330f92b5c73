"""A profile as a picture: a bar for each variant of each phase, cut by kind of work. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphfuse.profiling.labels import ATTENTION, DENSE, EXPERTS, NORM, OTHER, REDUCTION, SAMPLING
from graphfuse.profiling.result import VARIANTS, Phase, Profile
from graphfuse.tuning.plotting import check_plot, new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    REDUCTION: "tab:red",
    NORM: "tab:orange",
    ATTENTION: "tab:blue",
    EXPERTS: "tab:green",
    DENSE: "tab:purple",
    SAMPLING: "tab:olive",
    OTHER: "tab:brown",
    "not attributed": "black",
    "idle gaps": "lightgray",
}


def plot(profile: Profile, file: Path) -> None:
    """Draw a profile into a file. Raises `ConfigError` where that cannot be."""
    check_plot(file)
    save(draw(profile), file)


def draw(profile: Profile) -> Figure:
    figure, panels = new_figure(1, len(profile.phases))
    for panel, (phase, variants) in zip(panels, profile.phases.items(), strict=True):
        below = dict.fromkeys(VARIANTS, 0.0)
        for name, colour in COLOURS.items():
            heights = [parts(variants[variant])[name] for variant in VARIANTS]
            if any(heights):
                panel.bar(VARIANTS, heights, 0.6, bottom=list(below.values()), color=colour, label=name)
            below = {variant: below[variant] + height for variant, height in zip(VARIANTS, heights, strict=True)}
        panel.set(title=profile.shape(phase), ylabel="µs a call")
        panel.yaxis.set_major_formatter("{x:,.0f}")
        panel.grid(True, axis="y", alpha=0.3)
        panel.set_axisbelow(True)
    handles: dict[str, Any] = {}
    for panel in panels:
        handles |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), list(handles), loc="outside right center", fontsize="small")
    figure.suptitle(f"{profile.model} in {profile.dtype} on {profile.ranks} × {profile.device}", fontsize="medium")
    return figure


def parts(phase: Phase) -> dict[str, float]:
    """What a bar is made of, from below."""
    return {**phase.categories, "not attributed": phase.unattributed, "idle gaps": phase.idle}
