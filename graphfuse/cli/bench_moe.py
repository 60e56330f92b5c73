"""`graphfuse bench moe`: how fast the experts of MoE layers are on one GPU, beside their alternatives."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphfuse.cli.errors import plain_errors
from graphfuse.cli.measuring import sizes
from graphfuse.errors import ConfigError

if TYPE_CHECKING:
    from graphfuse.tuning.moe_result import Result
    from graphfuse.tuning.moe_shapes import Workload

_TOKENS = ",".join(str(1 << power) for power in range(14))


def bench_moe(
    shape: Annotated[
        list[str] | None, typer.Option(help="One of the shapes that are measured otherwise; may be repeated.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A checkpoint's folder, or a model's name; its shapes on a rank of --tp.")
    ] = None,
    tp: Annotated[int, typer.Option(help="Ranks that --model is spread over. One GPU is measured.")] = 1,
    tokens: Annotated[str, typer.Option(help="Token counts, with commas between.")] = _TOKENS,
    routing: Annotated[str, typer.Option(help="uniform or skewed.")] = "uniform",
    moe_config_dir: Annotated[
        Path | None, typer.Option(help="Folder of tuned configs to look in before the shipped ones.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="The result as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="A picture to draw: .png, .svg or .pdf.")] = None,
) -> None:
    """The experts of MoE layers: with tuned configs, with the built-in heuristic, by torch's grouped products, by
    FlashInfer where its kernels are compiled, and the floor that memory and arithmetic set."""
    with plain_errors():
        workloads = workloads_of(shape or [], model, tp)
        counts = sizes("--tokens", tokens)
        if moe_config_dir is not None and not moe_config_dir.is_dir():
            raise ConfigError(
                f"--moe-config-dir {moe_config_dir} is not a folder. Give an existing one, or leave it out."
            )
        if plot is not None:
            from graphfuse.tuning.plotting import check_plot

            check_plot(plot)
        result = _measure(workloads, counts, routing, moe_config_dir)
        if output is not None:
            result.write(output)
        if plot is not None:
            from graphfuse.tuning import moe_plot

            moe_plot.plot(result, plot)


def workloads_of(names: list[str], model: str | None, tp: int) -> dict[str, Workload]:
    """What to measure, by name. Raises `ConfigError`."""
    from graphfuse.tuning.moe_bench import benched_shapes
    from graphfuse.tuning.moe_shapes import workloads_of_model

    if model is not None:
        if names:
            raise ConfigError("--shape and --model both say what to measure. Give one of them.")
        found = workloads_of_model(model, tp)
        return {f"{Path(model).resolve().name}-tp{tp}-{workload.form}": workload for workload in found}
    if tp != 1:
        raise ConfigError("--tp says how a --model is spread, and none is given. Give --model too, or leave --tp out.")
    known = benched_shapes()
    for name in names:
        if name not in known:
            raise ConfigError(f"--shape {name} is not known. Use {', '.join(known)}, or --model.")
    return {name: known[name] for name in names or known}


def _measure(workloads: dict[str, Workload], tokens: tuple[int, ...], routing: str, configs: Path | None) -> Result:
    from graphfuse.tuning.moe_bench import Plan, measure
    from graphfuse.tuning.moe_inputs import check_routing
    from graphfuse.tuning.moe_result import BenchedShape, Result
    from graphfuse.tuning.moe_text import HEADER, absent_lines, line, shape_line, summary_lines
    from graphfuse.tuning.moe_timing import check_gpu

    check_routing(routing)
    check_gpu()

    import torch

    from graphfuse.probe import version_of

    shapes: dict[str, BenchedShape] = {}

    def begin(shape: BenchedShape) -> None:
        shapes[shape.name] = shape
        print(shape_line(shape), flush=True)

    print(HEADER)
    plan = Plan(tuple(workloads.items()), tokens, routing, configs)
    measured = measure(plan, begin=begin, each=lambda row: print(line(row, shapes[row.shape]), flush=True))
    result = Result.of(
        measured.shapes,
        measured.rows,
        device_name=torch.cuda.get_device_name(),
        routing=routing,
        rounds=plan.rounds,
        versions={"torch": torch.__version__, **{name: version_of(name) for name in ("triton", "flashinfer-python")}},
    )
    for text in (*absent_lines(result), *summary_lines(result)):
        print(text, flush=True)
    return result
