"""One process a rank: start them, or take part in those that torchrun started.

    graphfuse generate --tp 4 …   ─►  torch.distributed.run's agent in this process
                                        ├─ rank 0: the same command line, with RANK and WORLD_SIZE set
                                        └─ ranks 1 … 3: the same; what they print goes to files

When a rank fails the agent ends the others. Its own report, a page of traceback, is replaced by the message of the
lowest rank that left one (errors.py); if there is none, by the last lines of the rank that failed.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from graphfuse.cli.errors import INTERRUPTED, print_error
from graphfuse.errors import GroupError, brief
from graphfuse.last_words import RUN_ID_PREFIX, launcher, started_by_us

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_SECONDS_TO_END = "5"
_TAIL_LINES = 20


def is_rank() -> bool:
    """Whether torchrun, or `run_ranks`, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    return _number("RANK", 0)


def _number(variable: str, default: int) -> int:
    """What torchrun told this rank. Raises `GroupError` if it cannot have."""
    text = os.environ.get(variable, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise GroupError(f"{variable}={brief(text)} is not a number. Start the ranks with torchrun, or unset it.")
    return int(text)


def check_ranks(tp: int | None, *, replicas: bool = False) -> int:
    """The number of tensor-parallel ranks: `tp`, or what torchrun started. With `replicas` it may have started several
    times as many. Raises `GroupError` if the two do not fit."""
    started = _number("WORLD_SIZE", 1) if is_rank() else None
    wanted = tp if tp is not None else started or 1
    if wanted < 1:
        raise GroupError(f"--tp {wanted} is not a number of ranks. Use 1 or more.")
    if started is not None and (started % wanted if replicas and started else started != wanted):
        fit = "Start a multiple of it" if replicas else "Make them equal"
        raise GroupError(f"torchrun started {started} ranks but --tp is {wanted}. {fit}, or leave --tp out.")
    rank()  # raises if it is none
    return wanted


def place(tp: int) -> tuple[int, int]:
    """Which replica this process belongs to, and how many there are: `tp` ranks each, in the order of the ranks."""
    return (rank() // tp, _number("WORLD_SIZE", tp) // tp) if is_rank() else (0, 1)


def _ranks_here(num_ranks: int) -> int:
    """How many ranks share this host, of which all are on it unless torchrun says otherwise."""
    return _number("LOCAL_WORLD_SIZE", num_ranks) if is_rank() else num_ranks


def pick_device(name: str, num_ranks: int) -> str:
    """ "cuda" or "cpu" for `name`, which may be "auto". Raises `GroupError` when there are too few GPUs."""
    if name not in ("auto", "cpu", "cuda"):
        raise GroupError(f"--device {name} is not known. Use auto, cpu or cuda.")
    if name == "cpu":
        return name

    import torch

    num_gpus = torch.cuda.device_count()
    if name == "auto" and num_gpus == 0:
        return "cpu"
    num_ranks = _ranks_here(num_ranks)
    if num_gpus < num_ranks:
        raise GroupError(
            f"{num_ranks} ranks need {num_ranks} GPUs, and {num_gpus} can be seen. Lower --tp, or use --device cpu."
        )
    return "cuda"


def run_ranks(num_ranks: int, arguments: list[str]) -> int:
    """Run `graphfuse` with `arguments` on `num_ranks` new processes of this host; returns the exit code. None of them
    is left when this returns, also after Ctrl-C or a SIGTERM."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SECONDS_TO_END)
    # Each rank sets its number of threads itself; this is for the libraries that read it when they are loaded.
    os.environ.setdefault("OMP_NUM_THREADS", str(_threads_per_rank(num_ranks)))
    with tempfile.TemporaryDirectory(prefix="graphfuse-") as log_dir:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=f"{RUN_ID_PREFIX}{os.getpid()}-{uuid.uuid4().hex}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=log_dir, redirects=dict.fromkeys(range(1, num_ranks), Std.ALL)),
        )
        try:
            elastic_launch(config, sys.executable)("-u", "-m", "graphfuse.cli.main", *arguments)
        except ChildFailedError as error:
            failed, failure = error.get_first_failure()
            if not _print_message(log_dir):
                _print_tail(failed, failure.exitcode, log_dir)
            return failure.exitcode if failure.exitcode > 0 else 1
        except SignalException as stop:
            return 128 + stop.sigval
        except KeyboardInterrupt:
            return INTERRUPTED
    return 0


@contextmanager
def joined(num_ranks: int, device_type: str) -> Iterator[tuple[torch.device, dist.ProcessGroup | None]]:
    """This process as one of `num_ranks`, in a replica of them where torchrun started more: its device, and the group
    of its replica, `None` for a process that is alone."""
    import torch
    import torch.distributed as dist

    local_rank = _number("LOCAL_RANK", 0)
    replica, num_replicas = place(num_ranks)
    _end_with_the_launcher()
    if device_type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(_threads_per_rank(_ranks_here(num_ranks)))
    if num_ranks * num_replicas == 1:
        yield device, None
        return
    if device_type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    group = dist.group.WORLD
    if num_replicas > 1:
        members = [list(range(r * num_ranks, (r + 1) * num_ranks)) for r in range(num_replicas)]
        group = [dist.new_group(ranks) for ranks in members][replica]  # each is made by all ranks
    yield device, group
    dist.destroy_process_group()  # not after an error: the other ranks may be inside a collective, and it would wait


def everyone() -> dist.ProcessGroup | None:
    """The ranks of all replicas, `None` for a process that is alone. Inside `joined`."""
    import torch.distributed as dist

    return dist.group.WORLD if dist.is_initialized() else None


def _end_with_the_launcher() -> None:
    """A rank that `run_ranks` started ends with the process that did, though that be killed and end nobody itself."""
    if started_by_us() and sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != launcher():  # it has died already, while this process imported
            os.kill(os.getpid(), signal.SIGKILL)


def _threads_per_rank(num_ranks: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_ranks)


def _print_message(log_dir: str) -> bool:
    """Print the message of the lowest rank that left one; false if none did."""
    messages = {int(path.parent.name): path for path in Path(log_dir).rglob("error.json")}
    for rank, path in sorted(messages.items()):
        try:
            print_error(json.loads(path.read_text(encoding="utf-8"))["message"], rank)
        except ValueError:  # ended while it wrote
            continue
        return True
    return False


def _print_tail(failed: int, exitcode: int, log_dir: str) -> None:
    how = f"exit code {exitcode}" if exitcode >= 0 else signal.Signals(-exitcode).name
    killed = " If nobody killed it, the system ran out of memory: see dmesg." if exitcode == -signal.SIGKILL else ""
    print(f"graphfuse: rank {failed} ended with {how}.{killed}", file=sys.stderr)
    for log in sorted(Path(log_dir).rglob(f"{failed}/stderr.log")):
        print(*log.read_text(errors="replace").splitlines()[-_TAIL_LINES:], sep="\n", file=sys.stderr)
