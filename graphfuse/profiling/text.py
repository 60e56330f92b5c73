"""A profile as a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphfuse.profiling.labels import CATEGORIES, NORM, REDUCTION
from graphfuse.profiling.result import FUSED, UNFUSED, VARIANTS, Module, Phase, Profile

MOST_MODULES = 16


def show(profile: Profile) -> None:
    """Print a profile to stdout, as wide as the terminal, or as it likes into a file or pipe."""
    console = Console()
    if not console.is_terminal:
        console.width = 160
    for table in tables(profile):
        console.print(table)
    for line in footnotes(profile):
        console.print(escape(line), highlight=False)


def tables(profile: Profile) -> Iterator[Table]:
    for phase, variants in profile.phases.items():
        yield _by_category(f"{profile.shape(phase)}, µs a call", variants[UNFUSED], variants[FUSED])
        yield _by_module(f"{profile.shape(phase)} by module, µs a call", variants[UNFUSED], variants[FUSED])


def _by_category(title: str, unfused: Phase, fused: Phase) -> Table:
    table = Table("where time goes", title=title, title_justify="left")
    for column in (UNFUSED, "%", FUSED, "%", "saved"):
        table.add_column(column, justify="right")
    rows = [(name, unfused.categories[name], fused.categories[name]) for name in CATEGORIES]
    rows += [("not attributed", unfused.unattributed, fused.unattributed), ("idle gaps", unfused.idle, fused.idle)]
    for name, before, after in rows:
        if before or after:
            table.add_row(name, *_pair(before, after, unfused.us, fused.us))
    table.add_section()
    both = (unfused.reductions_and_norms, fused.reductions_and_norms)
    table.add_row(f"{REDUCTION} + {NORM}", *_pair(*both, unfused.us, fused.us))
    table.add_row("all", *_pair(unfused.us, fused.us, unfused.us, fused.us))
    return table


def _by_module(title: str, unfused: Phase, fused: Phase) -> Table:
    """The modules that take longest in either, and their kind of work."""
    table = Table("module", "work", title=title, title_justify="left")
    for column in (UNFUSED, FUSED):
        table.add_column(column, justify="right")
    before, after = _by_place(unfused.modules), _by_place(fused.modules)
    places = sorted({*before, *after}, key=lambda place: -max(before.get(place, 0.0), after.get(place, 0.0)))
    for place in places[:MOST_MODULES]:
        cells = [f"{times[place]:,.1f}" if place in times else "" for times in (before, after)]
        table.add_row(escape(place[0]), place[1], *cells)
    if len(places) > MOST_MODULES:
        rest = places[MOST_MODULES:]
        table.add_row("… others", "", *(f"{sum(times.get(p, 0.0) for p in rest):,.1f}" for times in (before, after)))
    return table


def _by_place(modules: list[Module]) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for module in modules:
        place = (module.module, module.category)
        found[place] = found.get(place, 0.0) + module.us
    return found


def _pair(before: float, after: float, all_before: float, all_after: float) -> tuple[str, ...]:
    shares = [
        f"{100 * part / whole:.1f}" if whole else "" for part, whole in ((before, all_before), (after, all_after))
    ]
    return f"{before:,.1f}", shares[0], f"{after:,.1f}", shares[1], f"{before - after:,.1f}"


def footnotes(profile: Profile) -> Iterator[str]:
    yield (
        f"{profile.model} in {profile.dtype} on {profile.ranks} x {profile.device}, {profile.executor}; "
        f"means of {profile.steps} steps, {profile.timed}"
    )
    for variant in VARIANTS:
        totals = profile.all_reduces[variant]
        shares = [f"{100 * phases[variant].attributed:.1f} % of {phase}" for phase, phases in profile.phases.items()]
        yield (
            f"{variant}: {totals['all_reduce']} all-reduces, {totals['fused']} fused, {totals['merged']} merged; "
            f"attributed: {', '.join(shares)}"
        )
    yield "A fused reduction holds the add and the norm behind it; a reduction also waits for the slowest rank."
    yield from profile.notes
