"""A model of transformers generates at TP: transformers' own eager, its own compiled decode, and graphfuse's, in turn.

    python benchmarks/transformers_generate.py --models qwen3-30b-a3b,qwen3-8b --tp 2 --output result.json
    torchrun --nproc-per-node 2 benchmarks/transformers_generate.py ...       # the same

    eager      model.generate(ids): a dynamic cache, nothing compiled
    compiled   model.generate(ids, cache_implementation="static"): torch.compile by transformers' default CompileConfig
    graphfuse  graphfuse.compile(model, tp_group).generate(ids)

All three run one set of random weights, sharded by transformers' plan, with the same prompts and greedy choice, in one
process a rank. Each is warmed up, then rounds take turns. tokens/s are those of the whole call, prompt included, and
those of a steady step of decoding (the median of the steps, between CUDA events on GPUs). Weights are drawn where they
are needed: no host or device ever holds a whole model.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from graphfuse.cli import launch
from graphfuse.probe import nccl_version, version_of
from graphfuse.tuning.generate_result import rounded
from graphfuse.tuning.measured import write_result
from graphfuse.tuning.transformers_bench import VARIANTS, Bench, Plan
from graphfuse.weights.random_transformers import random_transformers_model


def head_of(options: argparse.Namespace, device_type: str, num_ranks: int) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if device_type == "cuda" else "CPU"
    packages = ("transformers", "triton", "flashinfer-python")
    return {
        "schema": 1,
        "kind": "transformers_generate",
        "what": f"{options.new} tokens behind prompts of {options.prompt}, greedy, random weights",
        "host": f"{num_ranks}x {gpu}",
        "ranks": num_ranks,
        "dtype": "bfloat16" if device_type == "cuda" else "float32",
        "layers": options.layers,
        "versions": {
            "torch": str(torch.__version__),
            **{package: version_of(package) for package in packages},
            "nccl": nccl_version() if device_type == "cuda" else None,
        },
        "date": datetime.date.today().isoformat(),
        "method": (__doc__ or "").split("\n\n", 3)[3].replace("\n", " ").strip(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="qwen3-30b-a3b,qwen3-8b", help="shipped configs or folders, with commas")
    parser.add_argument("--tp", type=int, help="ranks; under torchrun as many as it started")
    parser.add_argument("--layers", type=int, help="only so many layers of each model")
    parser.add_argument("--batch", default="1,16", help="numbers of sequences, with commas between")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens that each prompt gets, at least 2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="with commas between")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--time-limit", type=float, help="seconds, after which nothing more is begun")
    parser.add_argument("--output", type=Path, help="the result as JSON, written as it grows")
    options = parser.parse_args(arguments)
    variants = options.variants.split(",")
    if options.new < 2 or options.rounds < 1 or not set(variants) <= set(VARIANTS):
        parser.error(f"--new takes 2 or more, --rounds 1 or more, --variants of {', '.join(VARIANTS)}")
    num_ranks = launch.check_ranks(options.tp)
    device_type = launch.pick_device(options.device, num_ranks)
    if num_ranks > 1 and not launch.is_rank():
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", __file__]
        raise SystemExit(subprocess.run([sys.executable, *start, *(arguments or sys.argv[1:])]).returncode)
    batches = [int(number) for number in options.batch.split(",")]
    plan = Plan(batches, options.prompt, options.new, options.rounds, variants, options.time_limit)
    is_first = launch.rank() == 0

    def say(text: str) -> None:
        if is_first:
            print(f"{time.perf_counter() - began:7.1f} s  {text}", file=sys.stderr, flush=True)

    with launch.joined(num_ranks, device_type) as (device, group):
        mesh = None if group is None else DeviceMesh.from_group(group, device.type, mesh_dim_names=("tp",))
        dtype = torch.bfloat16 if device_type == "cuda" else torch.float32
        done: list[Bench] = []
        head = head_of(options, device_type, num_ranks)

        def keep() -> None:
            grown: dict[str, Any] = {"ratios": {}, "graphfuse": {}, "notes": []}
            for bench in done:
                grown["ratios"] |= bench.ratios
                grown["graphfuse"] |= bench.reports
                grown["notes"] += bench.notes
            if is_first and options.output:
                write_result(options.output, rounded(head | grown), rounded([r for b in done for r in b.rows]))

        for name in options.models.split(","):
            loading = time.perf_counter()
            model = random_transformers_model(name, options.layers, mesh, dtype, device)
            say(f"{name}: weights in {time.perf_counter() - loading:.1f} s")
            bench = Bench(Path(name).name, model, group, plan, began, say)
            done.append(bench)
            bench.run(keep)
            keep()
            bench.release()
            del model
            gc.collect()
            if device_type == "cuda":
                torch.cuda.empty_cache()
    if is_first:
        print("\n".join(line for bench in done for line in bench.lines()))


if __name__ == "__main__":
    main()
