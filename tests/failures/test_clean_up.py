"""What is left after an error: no workspace, no thread."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist

import graphfuse
from graphfuse import FuseConfig
from graphfuse.comm.pool import Pool, process_pool
from graphfuse.errors import FusionRequiredError
from tests.cli.conftest import clean_environment
from tests.comm.fake_backend import FLOAT, FakeBackend, FakeWorkspace, decision
from tests.conftest import Model, ids
from tests.documents import ROOT
from tests.failures.family import run


class InterruptedWorkspace(FakeWorkspace):
    def reserve(self, request, channel):
        raise KeyboardInterrupt


class InterruptedBackend(FakeBackend):
    def create(self, request, channel):
        self.made.append(InterruptedWorkspace(request.group, request.capacity))
        return self.made[-1]


def interrupt_set_up(group):
    backend = InterruptedBackend()
    pool = Pool({"flashinfer": backend})
    try:
        pool.prepare(group, decision(), **FLOAT)
    except KeyboardInterrupt:
        return [workspace.closed for workspace in backend.made], pool._workspaces, pool._active
    return None


def test_ctrl_c_while_workspaces_are_made_closes_them(ranks):
    assert ranks.run(2, interrupt_set_up) == [([True], {}, {})] * 2


def fail_to_trace(group):
    before = len(process_pool._active)
    config = FuseConfig(fusion="require", disabled_rules={"all_reduce_add_rms_norm"})
    model = graphfuse.compile(Model(group=group), group, config=config)
    try:
        model(ids(1, 4))
    except FusionRequiredError:
        return len(process_pool._active) - before
    return None


def test_a_model_that_cannot_be_traced_holds_no_workspace(ranks):
    assert ranks.run(2, fail_to_trace) == [0, 0]


def part(scene):
    """Rank 1 ends; the other one looks at what it still holds afterwards."""
    model = graphfuse.compile(Model(group=scene.group), scene.group)
    model(ids(1, 4))
    assert process_pool._active
    if scene.rank == 0:
        scene.wait_for("going", 1)
        time.sleep(0.2)
        try:
            model(ids(1, 4))
        except graphfuse.errors.GroupError:
            return len(process_pool._active)
    scene.mark("going")
    return None


def test_a_rank_that_is_left_alone_gives_its_workspaces_back():
    assert run(2, part)[0].result == 0


def watching():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("graphfuse watch")]


def begin_and_end(scene):
    group = dist.new_group([0, 1])
    before = watching()
    unwatched = graphfuse.compile(Model(group=group), group, config=FuseConfig(watch=False))
    unwatched(ids(1, 4))
    without = watching()
    model = graphfuse.compile(Model(group=group), group)
    model(ids(1, 4))
    model(ids(1, 4))
    during = watching()
    dist.barrier()
    dist.destroy_process_group(group)
    del group, model, unwatched
    torch._dynamo.reset()
    gc.collect()
    end = time.monotonic() + 5
    while watching() and time.monotonic() < end:
        time.sleep(0.05)
    return before, without, during, watching()


def test_the_watch_is_one_thread_and_ends_with_the_group():
    for rank, ended in enumerate(run(2, begin_and_end)):
        assert ended.result == [[], [], [f"graphfuse watch {rank}/2"], []], ended.said


def test_no_thread_is_begun_by_an_import():
    code = "import threading; n = threading.active_count(); import graphfuse.generation, graphfuse.comm.watching; "
    code += "assert threading.active_count() == n"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=clean_environment(), check=True, timeout=60)
