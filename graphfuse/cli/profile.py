"""`graphfuse profile`: where a model's time goes, fused beside unfused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from graphfuse.cli import launch
from graphfuse.cli.errors import plain_errors
from graphfuse.errors import ConfigError, brief

_DTYPES = ("float32", "bfloat16", "float16")


def profile(
    model: Annotated[str, typer.Option(help="Checkpoint folder or hub id.")],
    tp: Annotated[
        int | None, typer.Option(help="Tensor-parallel ranks. Under torchrun: as many as it started.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences in a call.")] = 1,
    input_len: Annotated[int, typer.Option(help="Tokens of each sequence in the prefill.")] = 128,
    steps: Annotated[int, typer.Option(help="Steps of one token for each sequence.")] = 8,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Read the config only. Experts are chosen at random then.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(_DTYPES)}. Default: the checkpoint's.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    executor: Annotated[str, typer.Option(help="auto, inductor or eager.")] = "auto",
    allreduce: Annotated[str, typer.Option(help="auto, flashinfer, symm_mem or reference.")] = "auto",
    moe_config_dir: Annotated[str | None, typer.Option(help="Folder of tuned MoE kernel configs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write rank 0's traces for Perfetto: FILE.unfused.json and FILE.fused.json.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="A picture to draw: .png, .svg or .pdf.")] = None,
) -> None:
    """Profile a prefill and a few steps of a model, fused and unfused, by module and kind of work."""
    with plain_errors():
        # Everything that can be wrong on the command line is found here, before any process is started.
        for option, value in (("--batch", batch), ("--input-len", input_len), ("--steps", steps)):
            if value < 1:
                raise ConfigError(f"{option} {value} leaves nothing to run. Use 1 or more.")
        if dtype not in (None, *_DTYPES):
            raise ConfigError(f"--dtype {dtype} is not known. Use {', '.join(_DTYPES)}.")
        num_ranks = launch.check_ranks(tp)
        device_type = launch.pick_device(device, num_ranks)
        if plot is not None:
            from graphfuse.tuning.plotting import check_plot

            check_plot(plot)
        if trace is not None and not trace.parent.is_dir():
            raise ConfigError(f"--trace {brief(str(trace))} is in no folder. Make the folder, or give another file.")

        from graphfuse.config import FuseConfig

        config = FuseConfig(executor=executor, allreduce=allreduce, moe_config_dir=moe_config_dir)
        if num_ranks > 1 and not launch.is_rank():
            raise SystemExit(launch.run_ranks(num_ranks, sys.argv[1:]))

        import torch

        from graphfuse.profiling.calls import config_name, model_for
        from graphfuse.profiling.measure import Plan, measure

        with launch.joined(num_ranks, device_type) as (rank_device, group):
            made = model_for(
                model, group, getattr(torch, dtype) if dtype else None, rank_device, random_weights=random_weights
            )
            plan = Plan(batch, input_len, steps)
            found, traces = measure(made, config_name(model), group, rank_device, plan, config)
        if launch.rank() != 0:
            return
        if as_json:
            print(found.dumps())
        else:
            from graphfuse.profiling.text import show

            show(found)
        if trace is not None:
            for variant, events in traces.items():
                file = trace.with_name(f"{trace.name.removesuffix('.json')}.{variant}.json")
                file.write_text(json.dumps(events), encoding="utf-8")
                print(f"Trace: {file}", file=sys.stderr)
        if plot is not None:
            from graphfuse.profiling.plot import plot as draw

            draw(found, plot)
