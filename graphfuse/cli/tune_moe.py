"""`graphfuse tune moe`: launch parameters for the experts of MoE layers, measured on this host's GPUs."""

from __future__ import annotations

import math
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphfuse.cli.errors import plain_errors
from graphfuse.cli.measuring import sizes
from graphfuse.errors import ConfigError

if TYPE_CHECKING:
    from graphfuse.tuning.moe_shapes import Workload
    from graphfuse.tuning.moe_tune import Host, Outcome

_EFFORTS = ("quick", "full")


def tune_moe(
    model: Annotated[
        str | None, typer.Option(help="A checkpoint's folder, or the name of a known model (see docs/moe.md).")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Instead of --model: experts, intermediate size on a rank, hidden size, experts for each token; as in "
            "128,384,2048,8."
        ),
    ] = None,
    tp: Annotated[int, typer.Option(help="Ranks that share each expert. One GPU is enough to tune for any.")] = 1,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="bf16, fp8 or fp8_block; may be repeated. Default: what the model comes in."),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Token counts, with commas between. Default: 19 of them from 1 to 8192.")
    ] = None,
    effort: Annotated[str, typer.Option(help="quick: about a minute for a shape; full: up to ten.")] = "full",
    output: Annotated[Path, typer.Option(help="Folder for the configs and the trials.")] = Path("."),
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds after which nothing more is measured. Start again to go on.")
    ] = None,
) -> None:
    """Choose tiles for both products of an MoE layer at each token count, on every GPU of this host.

    Writes a config under the ecosystem's name. A CSV file of trials beside it lets the next run go on."""
    with plain_errors():
        # Everything that can be wrong on the command line is found here, before anything is measured.
        if effort not in _EFFORTS:
            raise ConfigError(f"--effort {effort} is not known. Use {' or '.join(_EFFORTS)}.")
        if time_limit is not None and not 0 < time_limit < math.inf:
            raise ConfigError(f"--time-limit {time_limit} is no time to measure in. Give seconds above 0.")
        counts = sizes("--tokens", tokens) if tokens is not None else None
        workloads = _workloads(model, shape, tp, dtype or [])

        from graphfuse.tuning.moe_tune import Host

        _tune(workloads, counts, effort, output, time_limit, Host.here())


def _workloads(model: str | None, shape: str | None, tp: int, dtypes: list[str]) -> list[Workload]:
    from graphfuse.tuning.moe_shapes import workloads_of_model, workloads_of_shape

    if (model is None) == (shape is None):
        given = "Neither --model nor --shape is" if model is None else "Both --model and --shape are"
        raise ConfigError(f"{given} given. Give one of them.")
    if model is not None:
        return workloads_of_model(model, tp, dtypes)
    if tp != 1:
        raise ConfigError("--tp does not go with --shape, whose numbers are those of a rank. Leave it out.")
    assert shape is not None
    return workloads_of_shape(shape, dtypes)


def _tune(
    workloads: list[Workload],
    counts: tuple[int, ...] | None,
    effort: str,
    output: Path,
    time_limit: float | None,
    host: Host,
) -> None:
    from graphfuse.tuning.moe_progress import Progress
    from graphfuse.tuning.moe_search import EFFORTS
    from graphfuse.tuning.moe_tune import TOKENS, Plan, tune

    deadline = math.inf if time_limit is None else time.time() + time_limit
    command = shlex.join(["graphfuse", *sys.argv[1:]])
    for workload in workloads:
        plan = Plan(workload, counts or TOKENS, EFFORTS[effort], output, command, deadline)
        with Progress(workload.title, len(plan.token_counts)) as progress:
            outcome = tune(plan, host, each=progress.take)
        _say(outcome)


def _say(outcome: Outcome) -> None:
    if outcome.done:
        print(f"{outcome.file} is written, for {len(outcome.done)} token counts; all trials are in {outcome.journal}.")
    if outcome.missing:
        missing = ", ".join(map(str, outcome.missing))
        print(f"There was no time for {missing} tokens. Start the same command again to go on.")
