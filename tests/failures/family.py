"""Ranks that may die: started for one test, and looked at afterwards.

    def body(scene):                  # at the top of a module: it is sent by its name
        if scene.rank == 1:
            scene.now("killed")       # from here the seconds count
            os.kill(os.getpid(), signal.SIGKILL)
        ...

    first, second = run(2, body)      # how each ended: `Ended`

Each rank is a process of its own whose group is gloo (or NCCL, on the GPU of its number), with stderr in a file. A rank
that is left when the time is up is killed, and counts as hung.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.pool import PRELOAD


@dataclass(frozen=True)
class Scene:
    """What a rank knows."""

    rank: int
    size: int
    folder: Path
    group: Any = None

    def now(self, what: str) -> None:
        """The failure happens now; the last one counts. Its time is compared with when the other ranks end."""
        (self.folder / f"failure.{self.rank}").write_text(json.dumps([what, time.monotonic()]))

    def mark(self, name: str) -> None:
        """Let the other ranks know that this one has come so far."""
        (self.folder / f"{name}.{self.rank}").touch()

    def wait_for(self, name: str, rank: int) -> None:
        while not (self.folder / f"{name}.{rank}").exists():
            time.sleep(0.01)


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    exit_code: int | None
    """None: it was still there when the time was up."""
    result: Any
    error: str
    """"ClassName: message" of the exception that left the body; "" for none."""
    stderr: str
    seconds: float
    """From the failure to this rank's error or end."""

    @property
    def said(self) -> str:
        """What the user sees."""
        return self.error or self.stderr


def run(
    size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout: float = 30.0,
    store_on_rank_0: bool = False,
    backend: str = "gloo",
) -> list[Ended]:
    """`body(scene, *args)` on `size` ranks, to the end of all of them."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = None
    if store_on_rank_0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
    with tempfile.TemporaryDirectory(prefix="failure-") as name:
        folder = Path(name)
        processes = [
            context.Process(target=_rank, args=(rank, size, port, store_on_rank_0, backend, name, body, args))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + timeout
        ended_at: dict[int, float] = {}
        pending = {process.sentinel: rank for rank, process in enumerate(processes)}
        while pending and time.monotonic() < end:
            for sentinel in wait(list(pending), timeout=max(0.0, end - time.monotonic())):
                ended_at[pending.pop(sentinel)] = time.monotonic()
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        failed_at = max((json.loads(_read(path))[1] for path in folder.glob("failure.*")), default=0.0)
        return [
            _ended(folder, rank, process.exitcode, ended_at.get(rank), failed_at)
            for rank, process in enumerate(processes)
        ]


def _ended(folder: Path, rank: int, exit_code: int | None, ended_at: float | None, failed_at: float) -> Ended:
    outcome = json.loads(_read(folder / f"{rank}.json") or "{}")
    at = outcome.get("at", ended_at)
    return Ended(
        exit_code if ended_at is not None else None,
        outcome.get("result"),
        outcome.get("error", ""),
        _read(folder / f"{rank}.err"),
        float("inf") if at is None else at - failed_at,
    )


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _rank(
    rank: int,
    size: int,
    port: int,
    store_on_rank_0: bool,
    backend: str,
    folder: str,
    body: Callable,
    args: tuple[Any, ...],
) -> None:
    """Body of a process."""
    os.dup2(os.open(f"{folder}/{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = None
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=store_on_rank_0 and rank == 0, wait_for_workers=False)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(minutes=5), device_id=device
    )
    outcome: dict[str, Any] = {}
    try:
        outcome["result"] = body(Scene(rank, size, Path(folder), dist.group.WORLD), *args)
    except BaseException as error:
        outcome["error"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    path = Path(folder) / f"{rank}.json"
    path.with_suffix(".partial").write_text(json.dumps({**outcome, "at": time.monotonic()}))
    path.with_suffix(".partial").replace(path)
