"""Four gloo ranks that serve a whole test run.

    def logits(group, path):                       # at the top of a module: it is sent by its name
        return graphfuse.load(path, group)(...)

    def test_something(ranks, path):
        first, second = ranks.run(2, logits, path)  # one result a rank, in the order of ranks

`ranks` (tests/conftest.py) is one pool for the session; its processes start at the first `run`. The first `tp` ranks
execute the function with their group of size `tp` (1, 2, 3 or 4; 4 is the group of all processes), the others wait.
Arguments and results are pickled. An exception on a rank is raised here as `RankError` with every failed rank's
traceback. A task that takes longer than its timeout is killed, and its stacks are printed. After an error or a
timeout the ranks may stand in different collectives, so the next `run` starts fresh processes: let expected errors be
caught inside the function.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing as mp
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

WORLD_SIZE = 4
GLOO_TIMEOUT = timedelta(seconds=30)
START_TIMEOUT = 120.0
PRELOAD = ["torch.distributed", "torch._dynamo", "transformers.modeling_utils", "graphfuse.generation"]


class RankError(Exception):
    """A task failed on at least one rank; the message holds the tracebacks."""


class RankPool:
    """Starts when first used; `close` ends it."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []
        self._store: dist.TCPStore | None = None

    def run(self, tp: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """`function(group, *args)` on the first `tp` ranks.

        Raises:
            RankError: an exception on a rank, a rank that died, or a timeout (in seconds).
        """
        if not 1 <= tp <= WORLD_SIZE:
            raise ValueError(f"tp is {tp}; the pool has {WORLD_SIZE} ranks")
        if not self._workers:
            self._start()
        task = pickle.dumps((tp, function, args, timeout))
        try:
            for _, connection in self._workers[:tp]:
                connection.send_bytes(task)
            answers = self._answers(tp, timeout)
        except BaseException:
            self.close()
            raise
        failed = [f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(answers) if not good]
        if failed:
            self.close()
            raise RankError(f"{getattr(function, '__qualname__', function)} at TP {tp}\n" + "\n".join(failed))
        return [result for _, result in answers]

    def close(self) -> None:
        """End the processes; a later `run` starts new ones."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers, self._store = [], None

    def _start(self) -> None:
        # The store lives here and picks its own port, so no other process can take it in between.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # One process imports the heavy modules, the ranks are forked from it (it has no threads and no CUDA context).
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        for rank in range(WORLD_SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        try:
            self._answers(WORLD_SIZE, START_TIMEOUT)
        except BaseException:
            self.close()
            raise

    def _answers(self, count: int, timeout: float) -> list[tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        pending = {self._workers[rank][1]: rank for rank in range(count)}
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankError(f"no answer within {timeout} s from ranks {sorted(pending.values())}")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    answers[rank] = (False, "the process ended")
                if not answers[rank][0]:
                    # The others may wait for the failed rank in a collective: give them a moment, not the timeout.
                    deadline = min(deadline, time.monotonic() + 2.0)
            if pending and not wait(list(pending), timeout=max(0.0, deadline - time.monotonic())):
                failed = {rank: answer for rank, answer in answers.items() if not answer[0]}
                if failed:
                    for rank in pending.values():
                        answers[rank] = (False, "still running when another rank had failed")
                    break
        return [answers[rank] for rank in range(count)]


def _serve(rank: int, port: int, connection: Connection) -> None:
    """Body of a rank: join the groups, then run tasks until the pipe closes."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=GLOO_TIMEOUT)
    groups = {tp: dist.new_group(list(range(tp)), timeout=GLOO_TIMEOUT) for tp in range(1, WORLD_SIZE)}
    groups[WORLD_SIZE] = dist.group.WORLD
    connection.send_bytes(pickle.dumps((True, None)))
    with contextlib.suppress(EOFError, OSError):
        while True:
            tp, function, args, timeout = _receive(connection)
            faulthandler.dump_traceback_later(timeout - 0.5 if timeout > 1 else timeout, file=sys.__stderr__)
            try:
                answer = pickle.dumps((True, function(groups[tp], *args)))
            except Exception:
                answer = pickle.dumps((False, traceback.format_exc()))
            faulthandler.cancel_dump_traceback_later()
            connection.send_bytes(answer)


def _receive(connection: Connection) -> tuple[int, Callable[..., Any], tuple[Any, ...], float]:
    task = connection.recv_bytes()
    try:
        return pickle.loads(task)
    except Exception:  # a module that cannot be imported here: let the task's own handling report it
        return WORLD_SIZE, _raise_again, (traceback.format_exc(),), 60.0


def _raise_again(_group: Any, text: str) -> None:
    raise RuntimeError(f"the task cannot be unpickled:\n{text}")
