"""What a user sees of an error: one line and an exit code, no traceback.

Among ranks that `graphfuse` started itself, usually all fail alike. So none prints: each leaves its message in the file
that torchelastic names for it, and the process that started them prints one (launch.py).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graphfuse.errors import GraphfuseError

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells expect it: 128 + SIGINT."""

RUN_ID_PREFIX = "graphfuse-"
"""How a rank knows who started it: torchelastic hands the id of the run on to its ranks."""


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turns a `GraphfuseError` into its message and exit code 1. Others are faults of ours and keep their traceback."""
    try:
        yield
    except GraphfuseError as error:
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if error_file and os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(RUN_ID_PREFIX):
            unfinished = Path(error_file + ".partial")  # the agent may end this rank while it writes
            unfinished.write_text(json.dumps({"message": str(error)}), encoding="utf-8")
            unfinished.replace(error_file)
        else:
            print_error(str(error), int(os.environ.get("RANK", "0")))
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def print_error(message: str, rank: int) -> None:
    print(f"graphfuse{f' (rank {rank})' if rank else ''}: {message}", file=sys.stderr, flush=True)
