"""A tuned table for the experts of a layer: launch parameters by number of tokens.

Between two tuned numbers the nearer one on a log scale serves. Outside the tuned span, and where neighbours lie further
apart than 4x, the built-in heuristic does: a tile tuned for 96 tokens is a poor one for decoding.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import astuple, dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from graphfuse.errors import ArgumentError, brief
from graphfuse.tuning.moe_shared_memory import Limits, fit
from graphfuse.tuning.moe_tiles import MoeShape, Tile, Tiles

HEURISTIC = "heuristic"

MAX_GAP = 4
"""Neighbouring numbers of tokens further apart than this have a hole between them."""


@dataclass(frozen=True)
class MoeTable:
    """Tables are equal if they launch alike: notes and measurements are for people."""

    shape: MoeShape

    entries: tuple[tuple[int, Tiles], ...] = ()
    """By number of tokens, rising. None at all: the heuristic serves everything."""

    source: str = HEURISTIC
    """The file's name."""

    notes: tuple[str, ...] = field(default=(), compare=False)
    """What whoever reads the report should know: what stood in, was ignored, or was made smaller."""

    limits: Limits | None = None
    """What tiles are made to fit to, those of the heuristic too. None: they are taken as they are."""

    measured_us: tuple[tuple[int, float], ...] = field(default=(), compare=False)
    """Microseconds that a layer's call took, by number of tokens, where the file says so."""

    def tiles(self, num_tokens: int) -> Tiles:
        """Launch parameters for a number of tokens."""
        tiles = self._chosen.get(num_tokens)
        if tiles is None:
            tiles = self.tuned(num_tokens) or self._heuristic(num_tokens)
            if self.limits:
                tiles = fit(tiles, self.limits)
            self._chosen[num_tokens] = tiles
        return tiles

    @cached_property
    def _chosen(self) -> dict[int, Tiles]:
        return {}

    def tuned(self, num_tokens: int) -> Tiles | None:
        """What an entry says for this number of tokens; None where the heuristic serves it."""
        at = bisect_left(self.entries, num_tokens, key=lambda entry: entry[0])
        if at == len(self.entries):
            return None
        more, tiles = self.entries[at]
        if more == num_tokens:
            return tiles
        if at == 0:
            return None
        fewer, tiles_of_fewer = self.entries[at - 1]
        if more > MAX_GAP * fewer:
            return None
        return tiles_of_fewer if num_tokens**2 <= fewer * more else tiles

    def _heuristic(self, num_tokens: int) -> Tiles:
        from graphfuse.tuning.moe_heuristic import heuristic

        return heuristic(self.shape, max(1, num_tokens))

    def to_text(self) -> str:
        """Compact JSON of all that is needed to launch: the form in which a table stands in a graph."""
        data = {
            "shape": astuple(self.shape),
            "source": self.source,
            "limits": astuple(self.limits) if self.limits else None,
            "entries": [[num_tokens, *_numbers(tiles)] for num_tokens, tiles in self.entries],
        }
        return json.dumps(data, separators=(",", ":"))

    @staticmethod
    @lru_cache(maxsize=256)
    def from_text(text: str) -> MoeTable:
        """The table that `to_text` wrote.

        Raises:
            ArgumentError: it is no such text.
        """
        try:
            data = json.loads(text)
            return MoeTable(
                MoeShape(*_with_pair(data["shape"])),
                tuple((tokens, Tiles(Tile(*gate_up), Tile(*down))) for tokens, gate_up, down in data["entries"]),
                data["source"],
                limits=Limits(*_with_pair(data["limits"])) if data["limits"] else None,
            )
        except (KeyError, TypeError, ValueError, RecursionError, AssertionError) as error:
            raise ArgumentError(
                f"launch={brief(text)} describes no launch parameters. Pass what MoeTable.to_text() returned, or ''."
            ) from error


def _numbers(tiles: Tiles) -> tuple[Any, Any]:
    return astuple(tiles.gate_up), astuple(tiles.down)


def _with_pair(values: list[Any]) -> list[Any]:
    """A block shape, which stands last, is a tuple again."""
    return [*values[:-1], tuple(values[-1]) if values[-1] else None]
