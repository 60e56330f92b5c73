"""Whether a result of `graphfuse bench moe` keeps to the bounds that graphfuse's MoE kernels are held to.

    python benchmarks/moe_acceptance.py result.json [--peers benchmarks/peers/moe_vllm_0_22_h200.json]

Prints a line for each shape and number of tokens, with `+` for each bound that holds, `!` for each that does not and
`.` for what a bound says nothing of; then a line for each bound. The exit code is 1 where a bound does not hold, or
where nothing tuned was timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphfuse.tuning.moe_peers import Peers
from graphfuse.tuning.moe_result import GROUPED, TUNED, BenchedShape, Result, Row
from graphfuse.tuning.moe_text import HEADER, line, rates

PEERS = Path(__file__).parent / "peers" / "moe_vllm_0_22_h200.json"


@dataclass(frozen=True)
class Point:
    """One row with what it is compared with."""

    row: Row
    shape: BenchedShape
    peer_us: float | None

    @property
    def us(self) -> float:
        return self.row.us[TUNED]


@dataclass(frozen=True)
class Bound:
    """`share` says how much of what is allowed a point takes (1 is just enough); None: the bound is not about it."""

    text: str
    share: Callable[[Point], float | None]


def few_tokens(point: Point) -> float | None:
    if point.row.tokens > 8:
        return None
    return _share_of_larger(point, 1.15 * point.row.floor_us + 4, 1.3)


def some_tokens(point: Point) -> float | None:
    if not 16 <= point.row.tokens <= 512:
        return None
    return _share_of_larger(point, 1.08 * point.row.floor_us, 1.0)


def many_tokens(point: Point) -> float | None:
    if point.row.tokens < 1024 or point.peer_us is None:
        return None
    return point.us / (point.peer_us / 1.1)


def no_alternative_is_faster(point: Point) -> float | None:
    others = [us for name, us in point.row.us.items() if name != TUNED]
    return point.us / (1.03 * min(others)) if others else None


def grouped_products(point: Point) -> float | None:
    if point.row.tokens != 8192 or not point.shape.form.startswith("bf16") or GROUPED not in point.row.us:
        return None
    return point.us / (point.row.us[GROUPED] / 1.1)


def block_fp8(point: Point) -> float | None:
    if point.row.tokens != 8192 or point.shape.form != "fp8_block":
        return None
    return 450 / rates(point.row, point.shape)[0]


BOUNDS = (
    Bound("up to 8 tokens: time ≤ max(peer / 1.3, 1.15 floor + 4 µs)", few_tokens),
    Bound("16 to 512 tokens: time ≤ max(peer, 1.08 floor)", some_tokens),
    Bound("from 1024 tokens: time ≤ peer / 1.1", many_tokens),
    Bound("never more than 3 % behind an alternative of the same run", no_alternative_is_faster),
    Bound("bf16 at 8192 tokens: at least 1.1 times as fast as grouped_mm", grouped_products),
    Bound("block FP8 at 8192 tokens: at least 450 TFLOP/s", block_fp8),
)


def points_of(result: Result, peers: Peers) -> list[Point]:
    """What was measured, shape by shape."""
    return [
        Point(row, shape, peers.us.get((shape.key, row.tokens)))
        for shape in result.shapes
        for row in result.of_shape(shape.name)
        if TUNED in row.us
    ]


def missing(result: Result) -> list[str]:
    """Lines about rows without what the bounds are about: kernels that fail or are wrong keep to none."""
    return [
        f"{shape.name} at {row.tokens} tokens: nothing tuned was timed: {shape.absent.get(TUNED, 'no reason is known')}"
        for shape in result.shapes
        for row in result.of_shape(shape.name)
        if TUNED not in row.us
    ]


def report(points: Sequence[Point]) -> tuple[list[str], bool]:
    """Lines of text, and whether every bound holds."""
    lines = [f"bounds  {'peer':>7} {HEADER}"]
    name = None
    for point in points:
        if point.shape.name != name:
            name = point.shape.name
            lines.append(name)
        marks = "".join(_mark(bound.share(point)) for bound in BOUNDS)
        peer = "-" if point.peer_us is None else f"{point.peer_us:.1f}"
        lines.append(f"{marks:<7} {peer:>7} {line(point.row, point.shape)}")
    fine = True
    for number, bound in enumerate(BOUNDS, 1):
        shares = [(point, share) for point in points if (share := bound.share(point)) is not None]
        broken = [(point, share) for point, share in shares if share > 1]
        fine = fine and not broken
        lines.append(f"{number}. {bound.text}: {len(shares) - len(broken)} of {len(shares)} hold")
        lines += [
            f"     {point.shape.name} at {point.row.tokens} tokens: {100 * (share - 1):.1f} % beyond"
            for point, share in broken
        ]
    return lines, fine


def _share_of_larger(point: Point, floor_bound: float, peer_factor: float) -> float | None:
    """Without a recorded peer, keeping to the floor's bound is enough, but not needed."""
    if point.peer_us is not None:
        return point.us / max(floor_bound, point.peer_us / peer_factor)
    return point.us / floor_bound if point.us <= floor_bound else None


def _mark(share: float | None) -> str:
    return "." if share is None else "+" if share <= 1 else "!"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--peers", type=Path, default=PEERS)
    options = parser.parse_args(arguments)
    result = Result.read(options.result)
    lines, fine = report(points_of(result, Peers.read(options.peers)))
    absent = missing(result)
    print("\n".join([*lines, *absent]))
    return 0 if fine and not absent else 1


if __name__ == "__main__":
    sys.exit(main())
