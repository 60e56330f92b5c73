"""Made-up results of `graphfuse bench moe`."""

from __future__ import annotations

from graphfuse.tuning.moe_peers import Peers
from graphfuse.tuning.moe_result import BenchedShape, Result, Row

QWEN = BenchedShape("qwen", 128, 384, 2048, 8, "bf16", "E=128,N=384.json", ("a note",), {"flashinfer": "not installed"})
DEEPSEEK = BenchedShape("deepseek", 256, 256, 7168, 8, "fp8_block", "heuristic")


def row(tokens: int, shape: str = "qwen", floor: float = 10.0, experts_touched: float = 8.0, **us: float) -> Row:
    noise, errors = dict.fromkeys(us, 0.01), dict.fromkeys(us, 0.004)
    return Row(shape, tokens, us, noise, errors, experts_touched, floor, "E=128,N=384.json")


def result(*rows: Row, shapes: tuple[BenchedShape, ...] = (QWEN,)) -> Result:
    return Result("what", "1x GPU", "GPU", "uniform", {"torch": "2", "triton": None}, "today", "how", shapes, rows)


def peers(*figures: tuple[BenchedShape, int, float]) -> Peers:
    return Peers("peer 1.0", {(shape.key, tokens): us for shape, tokens, us in figures})
