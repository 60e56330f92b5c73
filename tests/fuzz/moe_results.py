"""Results of `graphfuse bench moe`, and recorded figures beside them, as something to feed bytes to."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.moe_acceptance import PEERS, points_of, report
from graphfuse.tuning.moe_peers import Peers
from graphfuse.tuning.moe_result import CANDIDATES, Result
from graphfuse.tuning.moe_text import absent_lines, shape_line, summary_lines
from tests.tuning.moe_results import DEEPSEEK, QWEN, result, row

_RESULT = result(
    row(1, tuned=21.0, heuristic=24.0, grouped_mm=50.0), row(8192, tuned=700.0, grouped_mm=900.0),
    row(8192, "deepseek", tuned=1500.0), shapes=(QWEN, DEEPSEEK),
)  # fmt: skip
RESULTS = [json.loads(json.dumps({"schema": 1, "kind": "moe", **asdict(_RESULT), "summary": _RESULT.summary()}))]
RESULT_WORDS = [
    *RESULTS[0],
    *RESULTS[0]["shapes"][0],
    *RESULTS[0]["rows"][0],
    *CANDIDATES,
    "moe",
    8,
    1024,
    1e-320,
    1e308,
]

FIGURES = [json.loads(PEERS.read_text())]
FIGURES[0]["rows"] = FIGURES[0]["rows"][:2]
FIGURE_WORDS = [*FIGURES[0], *FIGURES[0]["rows"][0], "bf16", "fp8_block", 8, 1e-320, 1e308]


def read_result(folder: Path, data: bytes) -> None:
    file = folder / "result.json"
    file.write_bytes(data)
    read = Result.read(file)
    for lines in (map(shape_line, read.shapes), absent_lines(read), summary_lines(read)):
        "\n".join(lines).encode()
    "\n".join(report(points_of(read, Peers("peer", {(QWEN.key, 1): 27.0})))[0]).encode()
    read.write(file)
    assert Result.read(file) == read


def read_figures(folder: Path, data: bytes) -> None:
    file = folder / "peers.json"
    file.write_bytes(data)
    report(points_of(_RESULT, Peers.read(file)))
