"""The failure matrix of docs/reliability.md: what the other ranks say when one is gone, fails, or stays away."""

from __future__ import annotations

import os
import signal
import time
from unittest import mock

import pytest
import torch

import graphfuse
from graphfuse.comm import dispatch
from graphfuse.generation import LLM, SamplingParams
from tests.conftest import Model, ids
from tests.failures.family import run

LIMIT = 10.0
GONE = r" \(process \d+\) is gone without an error"


def kill(scene):
    scene.now("killed")
    os.kill(os.getpid(), signal.SIGKILL)


def check(ended, pattern, record_property):
    """The rank says so within the limit, in its error or as the last words of its process."""
    with pytest.raises(AssertionError, match=pattern):
        raise AssertionError(ended.said)
    assert ended.seconds < LIMIT
    record_property("seconds", round(ended.seconds, 2))


# --- gone -----------------------------------------------------------------------------------------------------------


def generate(scene, folder, victim):
    llm = LLM(folder, scene.group, device="cpu")
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    shown = 0

    def die(_index, _text):
        nonlocal shown
        shown += 1
        if scene.rank == victim and shown == 5:
            kill(scene)

    for _ in range(50):
        llm.generate(["The capital"], params, on_text=die)


@pytest.mark.parametrize(("size", "victim"), [(2, 1), pytest.param(3, 0, marks=pytest.mark.slow)])
def test_a_rank_killed_while_generating(checkpoint, size, victim, record_property):
    ranks = run(size, generate, str(checkpoint), victim)
    assert ranks[victim].exit_code == -signal.SIGKILL
    for rank in set(range(size)) - {victim}:
        check(ranks[rank], rf"GroupError: Rank {victim}{GONE}, last in call \d+ \(step of \[1\]\)", record_property)


def forward(scene, victim):
    model = graphfuse.compile(Model(group=scene.group), scene.group)
    for i in range(100_000):
        if scene.rank == victim and i == 20:
            kill(scene)
        model(ids(1, 5))


def test_a_rank_killed_that_holds_the_store(record_property):
    _, other = run(2, forward, 0, store_on_rank_0=True)
    check(other, rf"GroupError: Rank 0{GONE}", record_property)
    assert other.stderr.count("sendBytes failed") < 3, "a lost store is not asked again and again"


def compile_slowly(scene):
    """Rank 1 dies while rank 0 is in the middle of compiling, in Python that waits for nobody."""
    import graphfuse.backend as backend

    def slow(*_arguments, **_options):
        if scene.rank == 1:
            scene.wait_for("compiling", 0)
            kill(scene)
        scene.mark("compiling")
        for _ in range(3000):
            time.sleep(0.01)

    with mock.patch.object(backend, "run_passes", slow):
        graphfuse.compile(Model(group=scene.group), scene.group, example_inputs=ids(1, 4))


def test_a_rank_killed_while_another_compiles(record_property):
    first, _ = run(2, compile_slowly)
    check(first, rf"GroupError: Rank 1{GONE}, last in call 1 \(forward of \[1, 4\]\)", record_property)


def before_the_first_call(scene):
    from graphfuse.comm.watching import watch

    watch(scene.group)
    if scene.rank == 1:
        scene.wait_for("waiting", 0)
        kill(scene)
    scene.mark("waiting")
    graphfuse.compile(Model(group=scene.group), scene.group, example_inputs=ids(1, 4))


def test_a_rank_killed_while_another_waits_to_agree(record_property):
    first, _ = run(2, before_the_first_call)
    check(first, rf"GroupError: Rank 1{GONE}", record_property)


def end_early(scene):
    model = graphfuse.compile(Model(group=scene.group), scene.group)
    for i in range(100):
        if scene.rank == 1 and i == 20:
            scene.now("ended")
            return
        model(ids(1, 5))


def test_a_rank_that_ends_its_program_early(record_property):
    first, second = run(2, end_early)
    assert second.exit_code == 0 and not second.error
    check(first, r"GroupError: Rank 1 ended the program after call 20, and this rank waits in call 21", record_property)


# --- failed ---------------------------------------------------------------------------------------------------------


def out_of_memory(scene, goes_on):
    model = graphfuse.compile(Model(group=scene.group), scene.group)
    model(ids(1, 5))

    def fail(*_arguments):
        scene.now("out of memory")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nDetails.")

    with mock.patch.object(dispatch, "_run", fail if scene.rank == 1 else dispatch._run):
        try:
            model(ids(1, 5))
        except torch.OutOfMemoryError:
            if not goes_on:
                raise
            time.sleep(6)


FAILED = (
    r"Rank 1 failed in call 2 \(forward of \[1, 5\]\): OutOfMemoryError: CUDA out of memory\. Tried to allocate 2\.00 G"
)


def test_a_rank_out_of_memory_that_ends(record_property):
    first, second = run(2, out_of_memory, False)
    assert second.error.startswith("OutOfMemoryError: CUDA out of memory")
    check(first, "GroupError: " + FAILED, record_property)


def test_a_rank_out_of_memory_that_lives_on_ends_the_one_that_is_stuck(record_property):
    first, second = run(2, out_of_memory, True)
    assert first.exit_code == 1 and not first.error
    check(first, f"^graphfuse: {FAILED}.*This process ends: it is stuck in a collective", record_property)
    assert second.exit_code == 0


def load(scene, folder):
    scene.now("no checkpoint")
    LLM(folder if scene.rank == 0 else folder + "/nowhere", scene.group, device="cpu")


def test_a_rank_that_cannot_load_its_checkpoint(checkpoint, record_property):
    first, second = run(2, load, str(checkpoint))
    assert second.error.startswith("CheckpointError")
    check(
        first,
        r"GroupError: Rank 1 failed in call 1 \(start of the LLM\): CheckpointError: There is no",
        record_property,
    )


def interrupted(scene):
    model = graphfuse.compile(Model(group=scene.group), scene.group)
    model(ids(1, 5))

    def stop(*_arguments):
        scene.now("interrupted")
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    with mock.patch.object(dispatch, "_run", stop if scene.rank == 1 else dispatch._run):
        model(ids(1, 5))


def test_a_rank_interrupted_from_the_keyboard(record_property):
    first, second = run(2, interrupted)
    assert second.error.startswith("KeyboardInterrupt")
    check(first, r"GroupError: Rank 1 failed in call 2 \(forward of \[1, 5\]\): KeyboardInterrupt", record_property)


# --- out of step ----------------------------------------------------------------------------------------------------


def other_lengths(scene):
    model = graphfuse.compile(Model(group=scene.group), scene.group)
    model(ids(1, 5))
    scene.now("another length")
    model(ids(1, 5 + 2 * scene.rank))
    time.sleep(5)


def test_ranks_that_give_different_token_counts(record_property):
    """gloo ends the process with the smaller buffer; the other one says why."""
    first, second = run(2, other_lengths)
    assert first.exit_code == -signal.SIGABRT
    lengths = r"The ranks gave different shapes in call 2 \(forward\): \[1, 7\] on rank 1, \[1, 5\] on rank 0"
    check(second, "GroupError: " + lengths, record_property)


def debugged(scene, what):
    os.environ["GRAPHFUSE_COMM_TIMEOUT"] = "1"
    model = graphfuse.compile(Model(group=scene.group), scene.group)
    model(ids(1, 5))
    scene.now(what)
    if what == "lengths":
        model(ids(1, 5 + 2 * scene.rank))
    elif scene.rank == 1:
        time.sleep(3)
    else:
        model(ids(1, 5))


def test_ranks_that_give_different_token_counts_while_debugging(record_property):
    for rank in run(2, debugged, "lengths"):
        shapes = r"\[1, 5, 16\] float32 on rank 0, \[1, 7, 16\] float32 on rank 1"
        check(rank, f"GroupError: The ranks gave different shapes to a fused all-reduce: {shapes}", record_property)


def test_a_rank_that_stays_away_while_debugging(record_property):
    first, _ = run(2, debugged, "late")
    check(
        first,
        r"GroupError: Rank 1 (of the tensor-parallel group did not answer within 1 s|did not come to call 2)",
        record_property,
    )
