"""Successive halving over the tiles of a layer, for one number of tokens.

    cost model: 2 or 3 block_size_m, the likeliest cores of either product
      ─► gate_up: all with few rounds, the best quarter with more           beside a fixed down tile
      ─► down: the same, beside the best gate_up tile
      ─► neighbours of the best pair, one product after the other
      ─► final: the best few, what the neighbouring number of tokens has, and the heuristic, with all rounds

A pair of tiles is always timed as the whole layer. Every decision follows from the times alone, so that a search that
is run again on recorded times takes the same path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphfuse.errors import BackendUnavailableError
from graphfuse.tuning.moe_cost import Device
from graphfuse.tuning.moe_space import neighbours, ranked, ranked_blocks_m
from graphfuse.tuning.moe_tiles import MoeShape, Tile, Tiles

Measure = Callable[[Sequence[Tiles], int], list[float]]
"""Microseconds of each candidate over a number of rounds; infinity for one that does not run."""

TIE = 0.01
"""Times closer than this are one: the tile of the neighbouring number of tokens stays, so that tables are smooth."""

KEPT = 4
"""One in so many goes into the next round."""

FINALISTS = 4
HOPELESS_BEFORE_DOWN, HOPELESS_AFTER_DOWN = 1.3, 1.08
"""A block_size_m so much slower than the best is given up, before and after its down tile is chosen."""


@dataclass(frozen=True)
class Effort:
    """How much a search tries."""

    name: str
    num_blocks_m: int
    num_gate_up: int
    num_down: int
    """Cores of either product, for each block_size_m."""

    passes: int
    """Times that the neighbours of the best pair are tried."""

    varies_blocks: bool
    """Whether block sizes are among what neighbours differ in."""

    rounds: tuple[int, int, int]
    """Few, more, all."""


EFFORTS = {
    "quick": Effort("quick", 2, 5, 4, 1, False, (2, 4, 7)),
    "full": Effort("full", 3, 16, 12, 2, True, (3, 5, 11)),
}


@dataclass(frozen=True)
class Best:
    """What a search found."""

    tiles: Tiles
    us: float


@dataclass(frozen=True)
class Opening:
    """What is tried for one block_size_m, whatever the times say. The first of each is the fixed one."""

    gate_up: tuple[Tile, ...]
    down: tuple[Tile, ...]

    def candidates(self) -> list[Tiles]:
        """All pairs that can be foreseen."""
        return [
            *(Tiles(tile, self.down[0]) for tile in self.gate_up),
            *(Tiles(self.gate_up[0], tile) for tile in self.down[1:]),
        ]


def openings(
    shape: MoeShape, num_tokens: int, device: Device, effort: Effort, seeds: Sequence[Tiles] = ()
) -> dict[int, Opening]:
    """What a search begins with, by block_size_m: what the cost model finds likely, and the tiles of the seeds."""
    sizes = ranked_blocks_m(shape, num_tokens, device)[: effort.num_blocks_m]
    found = {}
    for size in dict.fromkeys([*sizes, *(seed.gate_up.block_size_m for seed in seeds)]):
        of_size = [seed for seed in seeds if seed.gate_up.block_size_m == size]
        gate_up = ranked(shape, num_tokens, "gate_up", size, device)[: effort.num_gate_up]
        down = ranked(shape, num_tokens, "down", size, device)[: effort.num_down]
        if size not in sizes:  # the model thinks little of it: the seeds speak for themselves
            gate_up, down = [], []
        found[size] = Opening(
            tuple(dict.fromkeys([*(seed.gate_up for seed in of_size), *gate_up])),
            tuple(dict.fromkeys([*(seed.down for seed in of_size), *down])),
        )
    return found


def search(
    shape: MoeShape,
    num_tokens: int,
    measure: Measure,
    *,
    device: Device,
    effort: Effort,
    neighbour: Tiles | None = None,
    others: Sequence[Tiles] = (),
) -> Best:
    """The fastest tiles for a number of tokens.

    Args:
        neighbour: what is best for the neighbouring number of tokens. Nothing is taken instead for less than `TIE`.
        others: further pairs to begin with, such as the heuristic's.

    Raises:
        BackendUnavailableError: no candidate runs.
    """
    seeds = [*([neighbour] if neighbour else []), *others]
    few, more, most = effort.rounds
    opening = openings(shape, num_tokens, device, effort, seeds)

    def halve(groups: dict[int, list[Tiles]]) -> dict[int, list[tuple[float, Tiles]]]:
        """Each group from its fastest on; all of them are timed together, so that groups can be compared."""
        alive = {size: list(dict.fromkeys(group)) for size, group in groups.items()}
        for rounds in (few, more):
            together = [tiles for group in alive.values() for tiles in group]
            times = dict(zip(together, measure(together, rounds), strict=True))
            order = {size: sorted(group, key=times.__getitem__) for size, group in alive.items()}
            alive = {
                size: [tiles for tiles in group if math.isfinite(times[tiles])][: max(2, math.ceil(len(group) / KEPT))]
                for size, group in order.items()
            }
        return {size: [(times[tiles], tiles) for tiles in group] for size, group in alive.items() if group}

    # A down tile that does not run takes every gate_up tile with it, so the seeds' pairs stand beside.
    first = {size: [Tiles(tile, o.down[0]) for tile in o.gate_up] for size, o in opening.items()}
    for seed in seeds:
        first[seed.gate_up.block_size_m].append(seed)
    fastest = _hopeful(halve(first), HOPELESS_BEFORE_DOWN)
    fastest = _hopeful(
        halve(
            {
                size: [group[0][1], *(Tiles(group[0][1].gate_up, tile) for tile in opening[size].down)]
                for size, group in fastest.items()
            }
        ),
        HOPELESS_AFTER_DOWN,
    )
    finalists = [pair for group in fastest.values() for pair in group]
    for _ in range(effort.passes):
        before = {size: group[0][1] for size, group in fastest.items()}
        for name in ("gate_up", "down"):
            fastest = halve(
                {
                    size: [group[0][1], *_varied(group[0][1], name, shape, device, effort)]
                    for size, group in fastest.items()
                }
            )
            finalists += [pair for group in fastest.values() for pair in group]
        fastest = _hopeful(fastest, HOPELESS_AFTER_DOWN)
        if before.items() >= {size: group[0][1] for size, group in fastest.items()}.items():
            break

    finalists.sort(key=lambda pair: pair[0])
    last = list(dict.fromkeys([*seeds, *dict.fromkeys(tiles for _, tiles in finalists)]))[: len(seeds) + FINALISTS]
    times = dict(zip(last, measure(last, most), strict=True))
    return _decide(num_tokens, times, neighbour)


def _hopeful(groups: dict[int, list[tuple[float, Tiles]]], limit: float) -> dict[int, list[tuple[float, Tiles]]]:
    """The groups whose best is not much slower than the best of all."""
    best = min((group[0][0] for group in groups.values()), default=0.0)
    return {size: group for size, group in groups.items() if group[0][0] <= limit * best}


def _varied(tiles: Tiles, name: str, shape: MoeShape, device: Device, effort: Effort) -> list[Tiles]:
    if name == "gate_up":
        varied = neighbours(tiles.gate_up, shape, name, device, blocks=effort.varies_blocks)
        return [Tiles(tile, tiles.down) for tile in varied]
    varied = neighbours(tiles.down, shape, name, device, blocks=effort.varies_blocks)
    return [Tiles(tiles.gate_up, tile) for tile in varied]


def _decide(num_tokens: int, times: dict[Tiles, float], neighbour: Tiles | None) -> Best:
    if not times or not math.isfinite(min(times.values())):
        raise BackendUnavailableError(
            f"None of the tiles runs for {num_tokens} tokens on this GPU. The CSV file of trials says why of each."
        )
    best = min(times, key=times.__getitem__)
    if neighbour is not None and times[neighbour] <= times[best] * (1 + TIE):
        best = neighbour
    return Best(best, times[best])
