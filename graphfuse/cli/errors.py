"""What a user sees of an error: one line and an exit code, no traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from graphfuse.errors import GraphfuseError

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells expect it: 128 + SIGINT."""


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turns a `GraphfuseError` into its message and exit code 1. Others are faults of ours and keep their traceback."""
    try:
        yield
    except GraphfuseError as error:
        rank = os.environ.get("RANK", "0")
        print(f"graphfuse{'' if rank == '0' else f' (rank {rank})'}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
