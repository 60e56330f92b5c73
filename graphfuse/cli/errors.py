"""What a user sees of an error: one line and an exit code, no traceback.

Where the line goes among several ranks: `graphfuse.last_words`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from graphfuse import last_words
from graphfuse.errors import GraphfuseError

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells expect it: 128 + SIGINT."""


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turns a `GraphfuseError` into its message and exit code 1. Others are faults of ours and keep their traceback."""
    try:
        yield
    except GraphfuseError as error:
        sys.stdout.flush()
        rank = os.environ.get("RANK", "")
        last_words.leave(str(error), int(rank) if rank.isdecimal() else 0)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def print_error(message: str, rank: int) -> None:
    print(last_words.line(message, rank), end="", file=sys.stderr, flush=True)
