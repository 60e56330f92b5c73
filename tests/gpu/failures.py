"""The failure matrix on two GPUs: what the rank that is left says, and after how many seconds.

    python tests/gpu/failures.py --allreduce symm_mem reference

Starts its own ranks, two for each row. A rank that is left may be waiting in a kernel of ours that polls for rows which
nobody will push, or in one of NCCL: in both cases it must end within ten seconds, and name the other one. Prints one
line of JSON: a list of rows, and whether all are as they should be.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import graphfuse
from graphfuse import FuseConfig
from graphfuse.comm.watching import in_call, watch
from tests.conftest import Model, ids
from tests.failures.family import Ended, Scene, run

LIMIT = 10.0
GONE = r"Rank 1 \(process \d+\) is gone without an error, last in call \d+"


def compiled(scene: Scene, allreduce: str):
    torch.manual_seed(0)
    config = FuseConfig(allreduce=allreduce, executor="eager")
    model = graphfuse.compile(Model(group=scene.group).to("cuda", torch.bfloat16), scene.group, config=config)
    for _ in range(3):
        model(ids(1, 5).cuda())
    torch.cuda.synchronize()
    return model


def killed_in_a_call(scene: Scene, allreduce: str) -> None:
    """Rank 0 waits for the result of each call, as a generation does."""
    model = compiled(scene, allreduce)
    for i in range(1_000_000):
        if scene.rank == 1 and i == 50:
            scene.now("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        model(ids(1, 5).cuda()).sum().item()


def killed_and_nobody_waits(scene: Scene, allreduce: str) -> None:
    """Rank 0 has queued its calls and is in no call when rank 1 dies; only its GPU waits."""
    model = compiled(scene, allreduce)
    if scene.rank == 1:
        scene.wait_for("queued", 0)
        scene.now("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    result = model(ids(1, 5).cuda())
    scene.mark("queued")
    time.sleep(1)
    result.sum().item()  # in no call of ours


def killed_while_calls_are_queued(scene: Scene, allreduce: str) -> None:
    """Rank 0 never waits: it queues calls until no more fit, and stands in a launch."""
    model = compiled(scene, allreduce)
    for i in range(1_000_000):
        if scene.rank == 1 and i == 50:
            torch.cuda.synchronize()
            scene.now("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        model(ids(1, 5).cuda())


def killed_in_a_captured_graph(scene: Scene, allreduce: str) -> None:
    """The calls are replays of a CUDA graph, outside of any call; then one more call is made."""
    model = compiled(scene, allreduce)
    x = ids(1, 5).cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x)
    for i in range(1_000_000):
        if scene.rank == 1 and i == 50:
            scene.now("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        graph.replay()
        torch.cuda.synchronize()


def out_of_memory(scene: Scene, allreduce: str) -> None:
    """Rank 1 runs out of GPU memory inside a call, catches the error, and lives on."""
    model = compiled(scene, allreduce)
    if scene.rank == 1:
        from graphfuse.comm import dispatch

        def allocate(*_arguments: object) -> None:
            scene.now("out of memory")
            torch.empty(1 << 50, dtype=torch.int8, device="cuda")

        dispatch._run = allocate  # type: ignore[assignment]
        try:
            model(ids(1, 5).cuda())
        except torch.OutOfMemoryError:
            time.sleep(12)
        return
    model(ids(1, 5).cuda()).sum().item()


def different_lengths(scene: Scene, allreduce: str) -> None:
    """Rank 1 gives more tokens, and waits for rows that rank 0 never pushes: in a call, as a generation does."""
    model = compiled(scene, allreduce)
    scene.now("lengths")
    x = ids(1, 5 + 2 * scene.rank).cuda()
    with in_call(watch(scene.group), "decode", (x,)):
        model(x).sum().item()
    time.sleep(12)


def different_lengths_while_debugging(scene: Scene, allreduce: str) -> None:
    os.environ["GRAPHFUSE_COMM_TIMEOUT"] = "2"
    model = compiled(scene, allreduce)
    scene.now("lengths")
    model(ids(1, 5 + 2 * scene.rank).cuda()).sum().item()


def interrupted(scene: Scene, allreduce: str) -> None:
    """Ctrl-C on rank 0 while its GPU waits for rank 1, which stays away: rank 0 must end all the same."""
    model = compiled(scene, allreduce)
    if scene.rank == 1:
        scene.wait_for("waiting", 0)
        time.sleep(12)
        return
    scene.mark("waiting")
    result = model(ids(1, 5).cuda())
    scene.now("interrupted")
    os.kill(os.getpid(), signal.SIGINT)
    result.sum().item()


ROWS = {
    killed_in_a_call: {0: GONE},
    killed_and_nobody_waits: {0: GONE},
    killed_while_calls_are_queued: {0: GONE},
    killed_in_a_captured_graph: {0: GONE},
    out_of_memory: {0: r"Rank 1 failed in call \d+ \(forward of \[1, 5\]\): OutOfMemoryError: CUDA out of memory"},
    different_lengths: {
        1: r"The ranks gave different shapes in call 4 \(decode\): \[1, 7\] on rank 1, \[1, 5\] on rank 0"
    },
    different_lengths_while_debugging: dict.fromkeys((0, 1), "The ranks gave different shapes to a fused all-reduce: "),
    interrupted: {0: "KeyboardInterrupt"},
}
"""What the ranks that are left must say."""


def judged(row: object, allreduce: str, rank: int, ended: Ended, pattern: str) -> dict:
    good = ended.exit_code is not None and ended.seconds < LIMIT and re.search(pattern, ended.said) is not None
    return {
        "row": row.__name__,
        "allreduce": allreduce,
        "rank": rank,
        "good": good,
        "seconds": round(ended.seconds, 2),
        "exit_code": ended.exit_code,
        "said": (ended.error or ended.stderr.strip()[-400:])[:400],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--allreduce", nargs="+", default=["symm_mem", "reference"])
    parser.add_argument("--rows", nargs="*", default=[row.__name__ for row in ROWS])
    arguments = parser.parse_args()
    found = []
    for allreduce in arguments.allreduce:
        for row, patterns in ROWS.items():
            if row.__name__ not in arguments.rows:
                continue
            ranks = run(2, row, allreduce, timeout=40.0, backend="nccl")
            for rank, pattern in patterns.items():
                found.append(judged(row, allreduce, rank, ranks[rank], pattern))
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"ok": all(row["good"] for row in found), "rows": found}))


if __name__ == "__main__":
    main()
