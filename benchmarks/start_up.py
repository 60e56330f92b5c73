"""How long a compiled model takes to its first result: cold and warm, of few and of many layers, on GPUs or the CPU.

    python benchmarks/start_up.py --model qwen3-30b-a3b --layers 8,48 --tp 2 --output result.json

Each measurement is a group of fresh processes. "cold" starts with empty caches of Inductor and Triton, "warm" with what
a cold start left there. What counts is the first forward less a steady one: weights (random) are on the device and
everything is imported before. No CUDA graph is captured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

NUM_TOKENS = 128


def first_forward(model_name: str, num_layers: int, tp: int, device_type: str) -> dict[str, Any]:
    """On this rank: seconds of the first forward less a steady one, and where they went."""
    import graphfuse
    from graphfuse.cli.launch import joined
    from graphfuse.weights.random_weights import random_model

    with joined(tp, device_type) as (device, group):
        dtype = torch.bfloat16 if device_type == "cuda" else torch.float32
        model = random_model(model_name, group, dtype, device, num_layers=num_layers).requires_grad_(False)
        from torch._dynamo.utils import counters

        with graphfuse.compile(model, group) as compiled, torch.no_grad():
            ids = torch.arange(NUM_TOKENS, device=device)[None] % model.config.vocab_size
            seconds = []
            for _ in range(3):
                _settle(device, group)
                began = time.perf_counter()
                compiled(ids)
                _settle(device)
                seconds.append(time.perf_counter() - began)
            report = compiled.report
            return {
                "layers": num_layers,
                "seconds": round(seconds[0] - seconds[-1], 2),
                **{f"{stage}_s": round(report.seconds.get(stage, 0.0), 2) for stage in ("trace", "passes", "compile")},
                "inductor_cache_misses": counters["inductor"]["fxgraph_cache_miss"],
                "all_reduces": report.totals,
                "notes": list(report.notes),
            }


def _settle(device: torch.device, group: Any = None) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if group is not None:
        torch.distributed.barrier(group)


def on_fresh_ranks(options: argparse.Namespace, num_layers: int, caches: str) -> dict[str, Any]:
    """What rank 0 of new processes measured, which find their compiled code in the folder `caches`."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
        "TRITON_CACHE_DIR": f"{caches}/triton",
    }
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found.json")
        arguments = [__file__, "--model", options.model, "--layers", str(num_layers), "--tp", str(options.tp)]
        arguments += ["--device", options.device, "--rank-result", str(found)]
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.tp}"]
        subprocess.run([sys.executable, *ranks, *arguments], check=True, env=environment)
        return json.loads(found.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-30b-a3b", help="a shipped config's name, or a folder with one")
    parser.add_argument("--layers", default="8,48", help="numbers of layers, with commas between")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank-result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    layers = [int(number) for number in options.layers.split(",")]
    if options.rank_result:
        found = first_forward(options.model, layers[0], options.tp, options.device)
        if os.environ["RANK"] == "0":
            options.rank_result.write_text(json.dumps(found))
        return
    result: dict[str, Any] = {
        "what": f"first forward of {NUM_TOKENS} tokens less a steady one, seconds",
        "model": options.model,
        "ranks": options.tp,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "date": datetime.date.today().isoformat(),
        "cold": [],
        "warm": [],
    }
    for num_layers in layers:
        with tempfile.TemporaryDirectory() as caches:
            for kind in ("cold", "warm"):
                result[kind].append(on_fresh_ranks(options, num_layers, caches))
                if options.output:
                    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    for kind in ("cold", "warm"):
        rows = result[kind]
        print(f"{kind}: " + ", ".join(f"{row['layers']} layers {row['seconds']:.1f} s" for row in rows))


if __name__ == "__main__":
    main()
