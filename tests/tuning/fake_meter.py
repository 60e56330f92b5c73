"""A GPU that is a formula: times of tiles with a planted optimum, and candidates that do not run."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from graphfuse.tuning.moe_cost import Device, row_blocks
from graphfuse.tuning.moe_journal import Trial
from graphfuse.tuning.moe_shapes import Workload
from graphfuse.tuning.moe_share import BrokenGpu
from graphfuse.tuning.moe_tiles import MoeShape, Tile, Tiles
from graphfuse.tuning.moe_tune import Host

SHAPE = MoeShape(128, 384, 2048, 8)
WORKLOAD = Workload(SHAPE, "bf16")
H200 = Device()
OUT_OF_RESOURCES = 'OutOfResources: out of "shared memory", Required: 3, limit: 2.'
VERSIONS = {"torch": "2.11.0", "graphfuse": "0.1.0", "triton": "3.6.0", "kernels": "0123456789ab"}


def planted(num_tokens: int) -> Tiles:
    """The optimum: not what the cost model or the heuristic would take."""
    block_m = 16 if num_tokens <= 256 else 64 if num_tokens <= 1024 else 128
    warps = 8 if block_m == 128 else 4
    return Tiles(
        Tile(block_m, 128, 64 if block_m > 16 else 128, 32, warps, 3, block_m == 16),
        Tile(block_m, 64, 128, 16, 4, 4, False),
    )


def surface(num_tokens: int, tiles: Tiles) -> float:
    """Microseconds: a product is the slower, the more parameters are off, and the further."""
    best = planted(num_tokens)
    base = 20 + num_tokens / 10
    padding = row_blocks(num_tokens * 8 / 128, tiles.gate_up.block_size_m) * tiles.gate_up.block_size_m
    ideal = row_blocks(num_tokens * 8 / 128, best.gate_up.block_size_m) * best.gate_up.block_size_m
    rows = (
        1
        + 0.1 * abs(math.log2(padding / ideal))
        + 0.1 * abs(math.log2(tiles.gate_up.block_size_m / best.gate_up.block_size_m))
    )
    return base * rows * (0.6 * _off(tiles.gate_up, best.gate_up) + 0.4 * _off(tiles.down, best.down))


def _off(tile: Tile, best: Tile) -> float:
    steps = {
        "block_size_n": 0.09,
        "block_size_k": 0.05,
        "group_size_m": 0.01,
        "num_warps": 0.06,
    }
    factor = 1 + 0.04 * abs(tile.num_stages - best.num_stages) + 0.07 * (tile.swap_ab != best.swap_ab)
    for name, step in steps.items():
        factor += step * abs(math.log2(getattr(tile, name) / getattr(best, name)))
    return factor


@dataclass
class FakeMeter:
    """Measures the surface, and remembers what it was asked."""

    broken: frozenset[Tiles] = frozenset()
    breaks_gpu: Tiles | None = None
    fails: int | None = None
    """Calls of `measure` after which it raises KeyboardInterrupt, as Ctrl-C does."""

    asked: list[Trial] = field(default_factory=list)
    prepared: set[tuple[int, Tiles]] = field(default_factory=set)
    is_closed: bool = False

    def prepare(self, num_tokens, candidates):
        self.prepared |= {(num_tokens, tiles) for tiles in candidates}

    def measure(self, num_tokens, candidates, rounds):
        if self.fails is not None:
            self.fails -= 1
            if self.fails < 0:
                raise KeyboardInterrupt
        trials = []
        for tiles in candidates:
            if tiles == self.breaks_gpu:
                raise BrokenGpu(tiles, "an illegal memory access")
            if tiles in self.broken or tiles.gate_up.num_stages == 5:
                trials.append(Trial(num_tokens, tiles, rounds, math.inf, OUT_OF_RESOURCES))
            else:
                trials.append(Trial(num_tokens, tiles, rounds, round(surface(num_tokens, tiles), 3)))
        self.asked += trials
        return trials

    def close(self):
        self.is_closed = True


def host(meter: FakeMeter, **changes: Any) -> Host:
    """An H200 host with this meter."""

    def make(workload: Workload, gpu: int, num_gpus: int) -> FakeMeter:
        return meter

    return replace(Host("NVIDIA H200", (0,), H200, VERSIONS, make), **changes)
