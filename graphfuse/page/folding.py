"""Fold a sequence of layers: 46 alike become one, and so do 12 repeats of "three of these, one of those"."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

MAX_PERIOD = 8


@dataclass(frozen=True)
class Fold:
    """`period` items from `start` on, `repeats` times over."""

    start: int
    period: int
    repeats: int


def fold(signatures: Sequence[Hashable]) -> list[Fold]:
    """Folds that cover a sequence in order. At each place the one that saves most is taken, of those the shortest."""
    folds: list[Fold] = []
    start = 0
    while start < len(signatures):
        periods = range(1, min(MAX_PERIOD, (len(signatures) - start) // 2) + 1)
        candidates = [Fold(start, period, _repeats(signatures, start, period)) for period in periods]
        best = max(candidates, key=lambda f: ((f.repeats - 1) * f.period, -f.period), default=Fold(start, 1, 1))
        if best.repeats == 1:
            best = Fold(start, 1, 1)
        folds.append(best)
        start += best.period * best.repeats
    return folds


def _repeats(signatures: Sequence[Hashable], start: int, period: int) -> int:
    """How often the items from `start` on come again without a gap."""
    block, repeats = signatures[start : start + period], 1
    while signatures[start + repeats * period : start + (repeats + 1) * period] == block:
        repeats += 1
    return repeats
