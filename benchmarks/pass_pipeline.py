"""How long the passes take on flat graphs, and how start-up grows with depth.

    python benchmarks/pass_pipeline.py --output result.json

Two tables. "flat": the pass pipeline over a graph of 10, 30 and 100 layers traced without regions. "start-up": a fresh
process traces and rewrites a tiny Llama of 4 and of 32 layers, layers traced as regions. Nothing needs a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

REPEATS = 3


def model_of(num_layers: int, group, device: str = "meta"):
    from transformers import LlamaConfig

    from graphfuse.models import registry

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
    )
    return registry.build(config, group, torch.bfloat16, device).requires_grad_(False)


def startup(num_layers: int) -> dict:
    """In this process: seconds of the first call of a compiled model, which traces, rewrites and (tiny) runs it."""
    import graphfuse
    from graphfuse.testing import fake_tp

    with fake_tp(2) as group:
        compiled = graphfuse.compile(model_of(num_layers, group, "cpu"), group)
        ids = torch.zeros(1, 8, dtype=torch.long)
        started = time.perf_counter()
        compiled(ids)
        seconds = time.perf_counter() - started
    return {
        "layers": num_layers,
        "seconds": round(seconds, 2),
        **compiled.report.totals,
        "notes": compiled.report.notes,
    }


def flat_passes(num_layers: int) -> dict:
    """Seconds of the passes alone, over one graph that holds every layer."""
    from graphfuse.testing import fake_tp, trace

    with fake_tp(2) as group:
        seconds = []
        for _ in range(REPEATS):
            result = trace(model_of(num_layers, group), torch.zeros(1, 8, dtype=torch.long, device="meta"), group)
            seconds.append(result.report.seconds["passes"])
    nodes = len(result.before.graph.nodes)
    return {
        "layers": num_layers,
        "nodes": nodes,
        "seconds": round(statistics.median(seconds), 3),
        **result.report.totals,
    }


def in_fresh_process(what: str, num_layers: int) -> dict:
    command = [sys.executable, __file__, "--only", what, "--layers", str(num_layers)]
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ).stdout
    return json.loads(out.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", choices=["startup", "flat"])
    parser.add_argument("--layers", type=int)
    options = parser.parse_args()
    if options.only:
        print(json.dumps({"startup": startup, "flat": flat_passes}[options.only](options.layers)))
        return
    flat = [in_fresh_process("flat", n) for n in (10, 30, 100)]
    rounds = [{n: in_fresh_process("startup", n) for n in (4, 32)} for _ in range(REPEATS)]
    ratio = statistics.median(r[32]["seconds"] / r[4]["seconds"] for r in rounds)
    result = {
        "what": "pass pipeline over flat graphs; start-up (trace + passes) in fresh processes, layers as regions",
        "date": datetime.date.today().isoformat(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "cores": os.cpu_count(),
        "flat": flat,
        "startup": rounds,
        "ratio_32_to_4_layers": round(ratio, 2),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
