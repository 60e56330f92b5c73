"""Where the message of a process that ends with an error goes: to stderr, or to whoever started the ranks.

Among ranks that `graphfuse` started itself, usually all fail alike. So none prints: each leaves its message in the file
that torchelastic names for it, and the process that started them prints one (`graphfuse.cli.launch`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

RUN_ID_PREFIX = "graphfuse-"
"""How a rank knows who started it: torchelastic hands the id of the run on to its ranks."""


def started_by_us() -> bool:
    """Whether the command line started this process as one of its ranks."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(RUN_ID_PREFIX)


def launcher() -> int:
    """The process that did."""
    return int(os.environ["TORCHELASTIC_RUN_ID"].removeprefix(RUN_ID_PREFIX).partition("-")[0])


def leave(message: str, rank: int) -> None:
    """Print the message, or leave it for the process that started this rank. Never raises, and takes no lock: the
    watch ends processes whose main thread is stuck anywhere."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    try:
        if error_file and started_by_us():
            unfinished = Path(error_file + ".partial")  # the agent may end this rank while it writes
            unfinished.write_text(json.dumps({"message": message}), encoding="utf-8")
            unfinished.replace(error_file)
        else:
            os.write(2, line(message, rank).encode())
    except OSError:
        pass  # nowhere to say it


def line(message: str, rank: int) -> str:
    return f"graphfuse{f' (rank {rank})' if rank else ''}: {message}\n"
