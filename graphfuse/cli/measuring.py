"""`graphfuse bench plot`, and what the commands of `graphfuse bench` and `graphfuse tune` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphfuse.cli.errors import plain_errors
from graphfuse.errors import ConfigError


def bench_plot(
    result: Annotated[Path, typer.Argument(help="What bench allreduce or bench moe wrote as --output.")],
    output: Annotated[Path, typer.Option(help="The picture to draw: .png, .svg or .pdf.")],
    peers: Annotated[
        Path | None, typer.Option(help="Recorded figures to draw beside those of bench moe, as in benchmarks/peers.")
    ] = None,
) -> None:
    """Draw a result: time over tokens, a panel for each hidden size or shape."""
    with plain_errors():
        from graphfuse.jsonfile import JsonObject
        from graphfuse.tuning import moe_result

        if JsonObject.read(result).data.get("kind") == moe_result.KIND:
            from graphfuse.tuning import moe_plot
            from graphfuse.tuning.moe_peers import Peers

            moe_plot.plot(moe_result.Result.read(result), output, Peers.read(peers) if peers else None)
            return
        if peers is not None:
            raise ConfigError("--peers holds figures of MoE layers, and the result is of another kind. Leave it out.")
        from graphfuse.tuning import allreduce_plot, allreduce_result

        allreduce_plot.plot(allreduce_result.Result.read(result), output)


def sizes(option: str, text: str) -> tuple[int, ...]:
    """Rising numbers from "1,2,4". Raises `ConfigError`."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise ConfigError(f"{option} {text} is not a list of sizes. Give numbers from 1 with commas between.")
    return tuple(found)
