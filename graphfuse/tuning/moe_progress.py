"""A tuning run as a person sees it: a line for each number of tokens on stdout, a progress bar on stderr."""

from __future__ import annotations

import sys
from types import TracebackType

import rich.progress
from rich.console import Console

from graphfuse.tuning.moe_journal import OK, Trial
from graphfuse.tuning.moe_share import Event
from graphfuse.tuning.moe_tiles import Tile


class Progress:
    """Shows events as they come. In a pipe or file there are the lines only."""

    def __init__(self, title: str, num_token_counts: int) -> None:
        console = Console(stderr=True)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            redirect_stdout=sys.stdout.isatty(),  # lines go above the bar; a file stays a file
            redirect_stderr=False,
        )
        self._task = self._bar.add_task(title, total=num_token_counts)
        self._title = title
        self._num_trials, self._num_failed = 0, 0

    def take(self, event: Event) -> None:
        if isinstance(event, Trial):
            self._num_trials += 1
            self._num_failed += event.status != OK
            failed = f", {self._num_failed} do not run" if self._num_failed else ""
            self._bar.update(
                self._task,
                description=f"{self._title}: {event.num_tokens} tokens, trial {self._num_trials}{failed}",
            )
            return
        self._bar.advance(self._task)
        tiles = event.best.tiles
        print(
            f"{event.num_tokens:>6} tokens {event.best.us:>9.1f} µs   gate_up {_text(tiles.gate_up)}   "
            f"down {_text(tiles.down)}",
            flush=True,
        )

    def __enter__(self) -> Progress:
        print(self._title, flush=True)
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def _text(tile: Tile) -> str:
    block = f"{tile.block_size_m}x{tile.block_size_n}x{tile.block_size_k}"
    swapped = ", swapped" if tile.swap_ab else ""
    return f"{block} (group {tile.group_size_m}, {tile.num_warps} warps, {tile.num_stages} stages{swapped})"
