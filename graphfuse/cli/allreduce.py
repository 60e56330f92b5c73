"""`graphfuse bench allreduce` and `tune allreduce`: how fast the fused all-reduce is on this host."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphfuse.cli import launch
from graphfuse.cli.errors import plain_errors
from graphfuse.cli.measuring import sizes
from graphfuse.errors import ConfigError, GroupError

if TYPE_CHECKING:
    from graphfuse.tuning.allreduce_result import Result

_DTYPES = ("bfloat16", "float16", "float32")
_HIDDEN = "2048,4096,7168"
_TOKENS = ",".join(str(1 << power) for power in range(15))

Tp = Annotated[int | None, typer.Option(help="Ranks, one GPU each. Under torchrun: as many as it started.")]
Hidden = Annotated[str, typer.Option(help="Hidden sizes, with commas between.")]
Tokens = Annotated[str, typer.Option(help="Token counts, with commas between.")]
Dtype = Annotated[str, typer.Option(help=f"{', '.join(_DTYPES)}.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Plot = Annotated[Path | None, typer.Option(help="A picture to draw: .png, .svg or .pdf.")]


def bench_allreduce(
    tp: Tp = None,
    hidden: Hidden = _HIDDEN,
    tokens: Tokens = _TOKENS,
    dtype: Dtype = "bfloat16",
    device: Device = "auto",
    candidates: Annotated[str | None, typer.Option(help="Only these, with commas between. Default: all.")] = None,
    output: Annotated[Path | None, typer.Option(help="The result as JSON.")] = None,
    plot: Plot = None,
) -> None:
    """All-reduce + residual add + RMSNorm: unfused, torch's symmetric-memory kernels, FlashInfer, graphfuse's own, what
    graphfuse chooses, and the link's floor."""
    with plain_errors():
        _measure(tp, hidden, tokens, dtype, device, output, plot, wanted=candidates)


def tune_allreduce(
    tp: Tp = None,
    hidden: Hidden = _HIDDEN,
    tokens: Tokens = _TOKENS,
    dtype: Dtype = "bfloat16",
    device: Device = "auto",
    output: Annotated[Path, typer.Option(help="Folder for the table, under its own name; or a .json file.")] = Path(
        "."
    ),
    plot: Plot = None,
    measured: Annotated[
        Path | None, typer.Option("--from", help="Measure nothing; make the table of a result of bench allreduce.")
    ] = None,
    stands_in_for: Annotated[
        list[str] | None, typer.Option(help="Another GPU, by torch's name, that may use the table; may be repeated.")
    ] = None,
) -> None:
    """Choose a comm backend for each message size: measures all that can run here, and writes the size table."""
    with plain_errors():
        if measured is not None:
            from graphfuse.tuning.allreduce_result import Result

            result: Result | None = Result.read(measured)
            source = f"graphfuse tune allreduce --from {measured.name}"
        else:
            result = _measure(tp, hidden, tokens, dtype, device, None, plot, tuning=True)
            source = shlex.join(["graphfuse", *sys.argv[1:]])
        if result is not None:
            _write_table(result, source, output, stands_in_for or ())


def _measure(
    tp: int | None,
    hidden: str,
    tokens: str,
    dtype: str,
    device: str,
    output: Path | None,
    plot_file: Path | None,
    *,
    wanted: str | None = None,
    tuning: bool = False,
) -> Result | None:
    """Start the ranks, or measure as one of them. The result on rank 0, None on the others."""
    # Everything that can be wrong on the command line is found here, before any process is started.
    hidden_sizes, token_counts = sizes("--hidden", hidden), sizes("--tokens", tokens)
    if dtype not in _DTYPES:
        raise ConfigError(f"--dtype {dtype} is not known. Use {', '.join(_DTYPES)}.")
    num_ranks = launch.check_ranks(tp)
    if num_ranks < 2:
        raise GroupError("One rank has nothing to reduce. Give --tp 2 or more.")
    device_type = launch.pick_device(device, num_ranks)
    if plot_file is not None:
        from graphfuse.tuning.plotting import check_plot

        check_plot(plot_file)

    from graphfuse.tuning.allreduce_candidates import BENCHED, TUNED

    candidates = tuple(wanted.split(",")) if wanted else TUNED if tuning else BENCHED
    unknown = [name for name in candidates if name not in BENCHED]
    if unknown:
        raise ConfigError(f"--candidates {unknown[0]} is not known. Use {', '.join(BENCHED)}.")
    if not launch.is_rank():
        raise SystemExit(launch.run_ranks(num_ranks, sys.argv[1:]))

    import torch

    from graphfuse.probe import load_nvml, nvml_links, uuid_of
    from graphfuse.tuning import allreduce_text
    from graphfuse.tuning.allreduce_measure import Plan, measure
    from graphfuse.tuning.allreduce_result import Result

    plan = Plan(candidates, hidden_sizes, token_counts, getattr(torch, dtype))
    columns = allreduce_text.Columns(candidates, plan.dtype.itemsize)
    is_first = launch.rank() == 0
    with launch.joined(num_ranks, device_type) as (rank_device, group):
        assert group is not None
        say = print if is_first else _say_nothing
        measured = measure(
            group,
            rank_device,
            plan,
            begin=lambda _: say(columns.header(), flush=True),
            each=lambda row: say(columns.line(row), flush=True),
        )
        num_nvlinks = None
        if device_type == "cuda":
            uuid = uuid_of(torch.cuda.get_device_properties(rank_device))
            num_nvlinks = nvml_links(uuid, load_nvml()).num_nvlinks
    if not is_first:
        return None
    result = Result.of(measured, plan, num_nvlinks)
    for line in (*allreduce_text.absent_lines(result.absent), *allreduce_text.summary_lines(result)):
        print(line, flush=True)
    if output is not None:
        result.write(output)
    if plot_file is not None:
        from graphfuse.tuning.allreduce_plot import plot

        plot(result, plot_file)
    return result


def _write_table(result: Result, source: str, output: Path, stands_in_for: list[str] | tuple[str, ...]) -> None:
    from graphfuse.comm.table import TABLE_FOLDER_VARIABLE
    from graphfuse.tuning.allreduce_table import make_table

    table = make_table(result, source=source, stands_in_for=stands_in_for)
    file = table.write(output)
    for up_to, ranges in table.classes:
        served = ", ".join(r.label if r.max_bytes is None else f"{r.label} ≤ {r.max_bytes >> 10} KiB" for r in ranges)
        print(f"hidden size {'beyond' if up_to is None else f'≤ {up_to}'}: {served}")
    print(f"{file} is written; {TABLE_FOLDER_VARIABLE}={file.parent} makes graphfuse use it.")


def _say_nothing(*_: object, flush: bool = False) -> None:
    """What ranks other than the first print."""
