"""`graphfuse bench generate`: how fast a model generates, fused beside unfused."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphfuse.cli import launch
from graphfuse.cli.errors import plain_errors
from graphfuse.cli.measuring import sizes
from graphfuse.errors import ConfigError, brief

if TYPE_CHECKING:
    from graphfuse.tuning.generate_plan import OfflineLoad

_DTYPES = ("float32", "bfloat16", "float16")


def bench_generate(
    model: Annotated[
        str, typer.Option(help="Checkpoint folder or hub id; with --random-weights also a shipped config's name.")
    ],
    tp: Annotated[
        int | None, typer.Option(help="Tensor-parallel ranks. Under torchrun: as many as it started.")
    ] = None,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 1024,
    output_len: Annotated[int, typer.Option(help="Tokens that each prompt gets.")] = 128,
    batch: Annotated[str, typer.Option(help="Numbers of sequences, with commas between.")] = "1,8,32,128",
    offline: Annotated[
        str | None, typer.Option(help="PROMPTS:IN:OUT: so many prompts at once, and their tokens; 256:512:256, say.")
    ] = None,
    no_fusion: Annotated[
        bool, typer.Option("--no-fusion", help="Without the rules that fuse or merge reductions; the rest as usual.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Fused and unfused in turn, in one process, on the same weights.")
    ] = False,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Read the config only.")] = False,
    layers: Annotated[int | None, typer.Option(help="Only so many layers; with --random-weights.")] = None,
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(_DTYPES)}. Default: the config's.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    executor: Annotated[str, typer.Option(help="auto, inductor or eager.")] = "auto",
    allreduce: Annotated[str, typer.Option(help="auto, flashinfer, symm_mem or reference.")] = "auto",
    moe_config_dir: Annotated[str | None, typer.Option(help="Folder of tuned MoE kernel configs.")] = None,
    max_step_tokens: Annotated[
        int | None, typer.Option(help="Most tokens that a step computes. Default: 16384 on GPUs, else 2048.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Rounds of each load.")] = 3,
    bandwidth: Annotated[float, typer.Option(help="TB/s of a GPU's memory, for the roofline.")] = 4.3,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds from the start of the ranks, after which nothing more is begun.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="The result as JSON, written as it grows.")] = None,
    plot: Annotated[Path | None, typer.Option(help="A picture to draw: .png, .svg or .pdf.")] = None,
) -> None:
    """Generation: time to the first token, time of a step at each batch size beside its roofline, an offline load, and
    the cold start in its parts."""
    started = time.perf_counter()
    with plain_errors():
        # Everything that can be wrong on the command line is found here, before any process is started.
        for option, value, least in (
            ("--input-len", input_len, 1),
            ("--output-len", output_len, 2),
            ("--repeats", repeats, 1),
        ):
            if value < least:
                raise ConfigError(f"{option} {value} leaves nothing to measure. Use {least} or more.")
        if dtype not in (None, *_DTYPES):
            raise ConfigError(f"--dtype {dtype} is not known. Use {', '.join(_DTYPES)}.")
        if no_fusion and compare:
            raise ConfigError("--compare measures with and without fusion. Leave --no-fusion out.")
        if layers is not None and not random_weights:
            raise ConfigError("--layers leaves out a part of a checkpoint. Use it with --random-weights.")
        if not bandwidth > 0:
            raise ConfigError(f"--bandwidth {bandwidth:g} is no rate of a memory. Give TB/s.")
        num_ranks = launch.check_ranks(tp)
        device_type = launch.pick_device(device, num_ranks)
        if plot is not None:
            from graphfuse.tuning.plotting import check_plot

            check_plot(plot)

        from graphfuse.config import FuseConfig
        from graphfuse.generation.step_tokens import default_step_tokens
        from graphfuse.tuning.generate_plan import FUSED, UNFUSED, Plan

        config = FuseConfig(executor=executor, allreduce=allreduce, moe_config_dir=moe_config_dir)
        plan = Plan(
            batches=sizes("--batch", batch),
            input_len=input_len,
            output_len=output_len,
            variants=(FUSED, UNFUSED) if compare else (UNFUSED,) if no_fusion else (FUSED,),
            offline=_offline(offline),
            repeats=repeats,
            max_step_tokens=default_step_tokens(device_type) if max_step_tokens is None else max_step_tokens,
            bandwidth=bandwidth,
            time_limit=time_limit,
        )
        if num_ranks > 1 and not launch.is_rank():
            raise SystemExit(launch.run_ranks(num_ranks, sys.argv[1:]))

        import torch

        from graphfuse.profiling.calls import config_name
        from graphfuse.tuning.generate_bench import measure
        from graphfuse.tuning.generate_result import Result
        from graphfuse.weights.load import load
        from graphfuse.weights.random_weights import random_model

        is_first = launch.rank() == 0

        def say(text: str) -> None:
            if is_first:
                print(f"{time.perf_counter() - started:7.1f} s  {text}", file=sys.stderr, flush=True)

        def keep(result: Result) -> None:
            if is_first and output is not None:
                result.write(output)

        with launch.joined(num_ranks, device_type) as (rank_device, group):
            began = time.perf_counter()
            chosen = getattr(torch, dtype) if dtype else None
            made: Any
            if random_weights:
                made = random_model(model, group, chosen, rank_device, num_layers=layers)
            else:
                made = load(model, group, dtype=chosen, device=rank_device, implementation="graphfuse")
            if device_type == "cuda":
                torch.cuda.synchronize()
            load_s = time.perf_counter() - began
            name = config_name(model) + (f", {layers} layers" if layers is not None else "")
            say(f"{name}: weights in {load_s:.1f} s")
            weights = "random" if random_weights else "checkpoint"
            found = measure(
                made.requires_grad_(False), group, plan, config,
                name=name, weights=weights, load_s=load_s, say=say, each=keep,
            )  # fmt: skip
        if not is_first:
            return
        keep(found)
        from graphfuse.tuning.generate_text import show

        show(found)
        if plot is not None:
            from graphfuse.tuning.generate_plot import plot as draw

            draw(found, plot)


def _offline(text: str | None) -> OfflineLoad | None:
    from graphfuse.tuning.generate_plan import OfflineLoad

    if text is None:
        return None
    parts = text.split(":")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and 0 < int(part) < 1 << 24 for part in parts):
        raise ConfigError(
            f"--offline {brief(text)[1:-1]} is not PROMPTS:IN:OUT. Give three numbers, as in 256:512:256."
        )
    return OfflineLoad(*map(int, parts))
