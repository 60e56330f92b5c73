"""What is no failure: a rank that is slow, stopped, or fails like all the others is waited for."""

from __future__ import annotations

import os
import signal
import time
from unittest import mock

import pytest

import graphfuse
from graphfuse.comm.watch import END_AFTER
from tests.conftest import Model, ids
from tests.failures.family import run


def compile_for_long(scene):
    """Rank 1 compiles for longer than anything waits that ends a rank."""
    import graphfuse.backend as backend

    run_passes = backend.run_passes

    def slow(*arguments, **options):
        time.sleep(END_AFTER + 1 if scene.rank == 1 else 0)
        return run_passes(*arguments, **options)

    with mock.patch.object(backend, "run_passes", slow):
        return graphfuse.compile(Model(group=scene.group), scene.group, example_inputs=ids(1, 4)).report.num_graphs


def test_a_rank_that_compiles_for_long_is_waited_for():
    assert [rank.result for rank in run(2, compile_for_long)] == [1, 1]


def be_stopped(scene):
    """Rank 1 is stopped, as by a debugger, for longer than anything waits that ends a rank."""
    model = graphfuse.compile(Model(group=scene.group), scene.group, example_inputs=ids(1, 4))
    pid = os.getpid()
    if scene.rank == 1 and os.fork() == 0:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(END_AFTER + 1)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    return model(ids(1, 4)).shape[-1]


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_waited_for():
    assert [rank.result for rank in run(2, be_stopped)] == [16, 16]


def fail_alike(scene):
    """All ranks fail in the same call, one of them later, and go on."""
    model = graphfuse.compile(Model(group=scene.group), scene.group)
    model(ids(1, 4))
    for _ in range(2):
        try:
            model(ids(1, 4), unknown=1)
        except TypeError:
            time.sleep(0.7 * (scene.rank == 1))  # rank 0 is told of rank 1's failure in the meantime, and goes on
        model(ids(1, 4))
    return True


def test_ranks_that_fail_alike_go_on():
    ranks = run(2, fail_alike)
    assert [rank.result for rank in ranks] == [True, True], ranks[0].said + ranks[1].said
