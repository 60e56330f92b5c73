"""How long a linear layer of few rows takes on one GPU: our kernel and torch's, on the layers of a rank.

    python benchmarks/skinny_product.py --output result.json [--search]

A line for each layer and number of rows: microseconds of a call, and what share of 4.3 TB/s (a copy on an H200) the
weights are read with. Calls are replayed as one CUDA graph, each with weights of its own, since a model's layers find
none in the L2 cache. `--search` tries other tiles too and names the best.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from graphfuse.kernels.skinny_product import SkinnyTile, in_registers, skinny_product, tile_for
from graphfuse.tuning.moe_timing import time_candidates

BANDWIDTH = 4.3e12
L2_BYTES = 60 << 20
MOST_CALLS = 64
ROWS = (1, 2, 4, 8, 16, 32)
OURS, TORCH = "graphfuse", "torch"

# Outputs and inputs at TP2.
LAYERS = {
    "30B-A3B qkv": (2560, 2048),
    "30B-A3B o": (2048, 2048),
    "30B-A3B router": (128, 2048),
    "8B qkv": (3072, 4096),
    "8B o": (4096, 2048),
    "8B gate_up": (12288, 4096),
    "8B down": (4096, 6144),
    "Next qkvz": (6144, 2048),
    "Next ba": (32, 2048),
    "Next router": (512, 2048),
    "Next shared": (512, 2048),
    "Next shared down": (2048, 256),
}
IN_REGISTERS = [SkinnyTile(n, 0, w, 1) for n in (1, 2, 4, 8) for w in (4, 8)]
ALONG_INPUTS = [
    SkinnyTile(16, 256, 2, 4), SkinnyTile(16, 256, 4, 4), SkinnyTile(16, 512, 4, 3), SkinnyTile(16, 128, 1, 6),
    SkinnyTile(32, 256, 4, 3), SkinnyTile(32, 128, 4, 4), SkinnyTile(64, 128, 4, 4), SkinnyTile(64, 256, 8, 3),
]  # fmt: skip


def measure(layer: str, rows: int, search: bool) -> dict[str, Any]:
    """One line of the result."""
    outputs, inputs = LAYERS[layer]
    num_bytes = outputs * inputs * 2
    num_calls = max(8, min(MOST_CALLS, 4 * L2_BYTES // num_bytes))
    weights = [torch.randn(outputs, inputs, device="cuda").bfloat16() / inputs**0.5 for _ in range(num_calls)]
    x = torch.randn(rows, inputs, device="cuda").bfloat16()
    error = (skinny_product(x, weights[0]).float() - F.linear(x.float(), weights[0].float())).abs().max()
    assert error < 0.03, error
    tile = tile_for(rows, outputs, inputs)
    tiles = {OURS: tile}
    if search:
        whole = in_registers(rows, inputs)
        tried = [t._replace(block_k=tile.block_k) for t in IN_REGISTERS] if whole else ALONG_INPUTS
        tiles.update({str(tuple(each)): each for each in tried if each != tile})
    candidates: dict[str, Any] = {TORCH: [partial(F.linear, x, weight) for weight in weights]}
    for name, each in tiles.items():
        candidates[name] = [partial(skinny_product, x, weight, None, each) for weight in weights]
    times = time_candidates(candidates)
    best = min((name for name in times if name != TORCH), key=times.__getitem__)
    return {
        "layer": layer,
        "outputs": outputs,
        "inputs": inputs,
        "rows": rows,
        "microseconds": {name: round(each, 2) for name, each in times.items()},
        "share_of_bandwidth": round(num_bytes / BANDWIDTH * 1e6 / times[OURS], 3),
        **({"best": best} if search else {}),
    }


def text_of(row: dict[str, Any]) -> str:
    times = row["microseconds"]
    start = f"{row['layer']:<18} {row['rows']:>4} {times[OURS]:8.2f} {row['share_of_bandwidth']:>5.0%}"
    best = f"  {row['best']} {times[row['best']]:.2f}" if "best" in row else ""
    return f"{start} {times[TORCH]:8.2f} {times[TORCH] / times[OURS]:6.2f}x{best}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the result, as JSON")
    parser.add_argument("--search", action="store_true", help="try other tiles too")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers of rows, with commas between")
    parser.add_argument("--layers", help="only layers whose names hold one of these, with commas between")
    options = parser.parse_args()
    rows_found: list[dict[str, Any]] = []
    result = {
        "what": "linear layers of few rows: microseconds a call, CUDA-graph replays, weights not in L2",
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "rows": rows_found,
    }
    wanted = options.layers.split(",") if options.layers else [""]
    for layer in (name for name in LAYERS if any(part in name for part in wanted)):
        for rows in map(int, options.rows.split(",")):
            rows_found.append(measure(layer, rows, options.search))
            print(text_of(rows_found[-1]), flush=True)
        torch.cuda.empty_cache()
        if options.output:
            options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
