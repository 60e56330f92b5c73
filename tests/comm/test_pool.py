"""The workspace pool, with a made-up backend on gloo ranks: votes, common fallback, growth, reuse, release."""

import time

import pytest
import torch
import torch.distributed as dist

from graphfuse.comm.pool import Pool
from graphfuse.comm.table import SizeRange
from graphfuse.comm.workspace import ANY_SIZE
from graphfuse.errors import ConfigError
from graphfuse.gate import Decision, gather_facts
from tests.comm.fake_backend import FLOAT, REFERENCE, ROW, FakeBackend, decision


def prepared(group, fails):
    """What `prepare` answers with a failing rank, and how long it takes; then again with all in order."""
    pool = Pool({"flashinfer": FakeBackend(fails)})
    started = time.monotonic()
    first = pool.prepare(group, decision(), **FLOAT)
    seconds = time.monotonic() - started
    active = pool.active(group.group_name, torch.float32, 8)
    in_force = (active.ranges, dict(active.workspaces))
    pool.release(group, dtype=torch.float32, hidden_size=8)
    pool.backends["flashinfer"].fails = (None, None)
    second = pool.prepare(group, decision(), **FLOAT)
    closed = [workspace.closed for workspace in pool.backends["flashinfer"].made]
    return first, seconds, in_force[0], list(in_force[1]), second, closed


@pytest.mark.parametrize("tp", [2, 4])
def test_with_all_ranks_able_the_decision_stands(ranks, tp):
    for first, _, active_ranges, workspaces, second, closed in ranks.run(tp, prepared, (None, None)):
        assert first == second == decision()
        assert active_ranges == decision().ranges
        assert workspaces == ["flashinfer"]
        assert closed == [False]  # the second prepare found the first one's


FAILURES = {
    "refusal": "rank 1: Not enough memory.",
    "raise": "rank 1: ImportError: no module",
    "before": "rank 1: RuntimeError: out of memory",
    "between": "rank 1: RuntimeError: out of memory",
    "after": "rank 1: RuntimeError: out of memory",
    "reserve": "rank 1: RuntimeError: out of memory",
    "end of reserve": "rank 1: RuntimeError: out of memory",
}


@pytest.mark.parametrize("where", FAILURES)
@pytest.mark.parametrize("tp", [2, 4])
def test_one_failing_rank_makes_all_fall_back_together_at_once_and_for_the_same_reason(ranks, tp, where):
    answers = ranks.run(tp, prepared, (1, where))
    for first, seconds, active_ranges, workspaces, second, _ in answers:
        assert first == answers[0][0]
        assert first.allowed
        assert first.ranges == active_ranges == (REFERENCE,)
        assert workspaces == []
        assert first.table is None
        assert first.reasons == (
            "measured",
            f"All ranks use the reference backend, because flashinfer could not be set up: {FAILURES[where]}",
        )
        assert seconds < 10
        assert second == decision()  # the next model may try again


@pytest.mark.parametrize("where", ["after", "reserve", "end of reserve"])
def test_half_made_workspaces_are_closed_wherever_they_had_been_made(ranks, where):
    answers = ranks.run(2, prepared, (1, where))
    assert answers[0][-1] == [True, False]
    assert answers[1][-1] == ([False] if where == "after" else [True, False])


def reserved_again(group, where):
    """A second model reserves in the workspace of the first one and fails on rank 1; a third one does not fail."""
    backend = FakeBackend(keeps_workspaces=False)
    pool = Pool({"flashinfer": backend})
    pool.prepare(group, decision(), **FLOAT)
    workspace = backend.made[0]
    workspace.fails = (1, where)
    second = pool.prepare(group, decision(), **{**FLOAT, "hidden_size": 2})
    workspace.fails = (None, None)
    third = pool.prepare(group, decision(), **{**FLOAT, "hidden_size": 4})
    first_active = pool.active(group.group_name, torch.float32, 8).workspaces["flashinfer"]
    third_active = pool.active(group.group_name, torch.float32, 4).workspaces["flashinfer"]
    return second, third, len(backend.made), workspace.closed, first_active is third_active is workspace


@pytest.mark.parametrize("where", ["reserve", "end of reserve"])
def test_a_rank_that_cannot_reserve_for_a_second_model_leaves_the_first_ones_workspace_alone(ranks, where):
    answers = ranks.run(2, reserved_again, where)
    for second, third, made, closed, shared in answers:
        assert second == answers[0][0]
        assert second.ranges == (REFERENCE,)
        assert "rank 1: RuntimeError: out of memory" in second.reasons[-1]
        assert third == decision()
        assert (made, closed, shared) == (1, False, True)


def one_of_two_backends_fails(group):
    symm_mem = FakeBackend(keeps_workspaces=False)
    pool = Pool({"symm_mem": symm_mem, "flashinfer": FakeBackend((1, "refusal"))})
    ranges = (SizeRange(ROW, "symm_mem", "one_shot"), SizeRange(4 * ROW, "flashinfer", "oneshot"), REFERENCE)
    outcome = pool.prepare(group, Decision(True, ranges), **FLOAT)
    return outcome.ranges, [workspace.closed for workspace in symm_mem.made], len(pool._workspaces)


def test_what_was_made_before_another_backend_failed_is_given_back(ranks):
    assert ranks.run(2, one_of_two_backends_fails) == [((REFERENCE,), [True], 0)] * 2


REQUESTED = {
    "limited": (decision().ranges, (4 * ROW, (("oneshot", 4 * ROW),))),
    "unlimited": ((SizeRange(None, "symm_mem", "one_shot"),), (None, (("one_shot", None),))),
    "two variants": (
        (SizeRange(2 * ROW, "symm_mem", "one_shot"), SizeRange(None, "symm_mem", "two_shot")),
        (None, (("one_shot", 2 * ROW), ("two_shot", None))),
    ),
    "two variants below the reference": (
        (SizeRange(2 * ROW, "symm_mem", "one_shot"), SizeRange(9 * ROW, "symm_mem", "two_shot"), REFERENCE),
        (9 * ROW, (("one_shot", 2 * ROW), ("two_shot", 9 * ROW))),
    ),
    "less than a row": ((SizeRange(5, "flashinfer", "oneshot"), REFERENCE), (ROW, (("oneshot", ROW),))),
    "a variant in two stretches": (
        (
            SizeRange(ROW, "symm_mem", "one_shot"),
            SizeRange(2 * ROW, "symm_mem", "two_shot"),
            SizeRange(5 * ROW, "symm_mem", "one_shot"),
            REFERENCE,
        ),
        (5 * ROW, (("one_shot", 5 * ROW), ("two_shot", 2 * ROW))),
    ),
}


def requested(group, ranges):
    backend = FakeBackend()
    outcome = Pool(dict.fromkeys(("flashinfer", "symm_mem"), backend)).prepare(group, Decision(True, ranges), **FLOAT)
    return outcome.ranges, backend.made[0].capacity, backend.made[0].reserved


@pytest.mark.parametrize("case", REQUESTED)
def test_workspaces_are_asked_for_the_variants_of_the_ranges_each_with_its_largest_message(ranks, case):
    ranges, (max_bytes, variants) = REQUESTED[case]
    for active, capacity, reserved in ranks.run(2, requested, ranges):
        assert active == ranges
        assert capacity == (ANY_SIZE if max_bytes is None else max_bytes)
        assert reserved == [(8, max_bytes, variants)]


def grown(group):
    """Three models: 4 tokens, 16 tokens at another hidden size, 2 tokens."""
    backend = FakeBackend()
    pool = Pool({"flashinfer": backend})
    pool.prepare(group, decision(4), **FLOAT)
    pool.prepare(group, decision(16), **{**FLOAT, "hidden_size": 16})
    pool.prepare(group, decision(2), **{**FLOAT, "hidden_size": 32})
    used = [id(pool.active(group.group_name, torch.float32, h).workspaces["flashinfer"]) for h in (8, 16, 32)]
    made = [id(workspace) for workspace in backend.made]
    hidden_sizes = [[hidden_size for hidden_size, *_ in workspace.reserved] for workspace in backend.made]
    return [made.index(workspace) for workspace in used], hidden_sizes


def test_a_workspace_serves_narrower_models_and_grows_for_wider_ones(ranks):
    for used, hidden_sizes in ranks.run(2, grown):
        assert used == [0, 1, 1]  # the first model keeps its own: captured graphs hold its addresses
        assert hidden_sizes == [[8], [16, 32]]


def released(group, keeps):
    backend = FakeBackend(keeps_workspaces=keeps)
    pool = Pool({"flashinfer": backend})
    history = []
    for step in (pool.prepare, pool.prepare, pool.release, pool.release, pool.release):
        if step == pool.prepare:
            step(group, decision(), **FLOAT)
        else:
            step(group, dtype=torch.float32, hidden_size=8)
        active = pool.active(group.group_name, torch.float32, 8)
        history.append((active.users if active else 0, backend.made[0].closed))
    pool.prepare(group, decision(), **FLOAT)
    return history, len(backend.made)


@pytest.mark.parametrize("keeps", [True, False])
def test_ranges_go_with_their_last_user_and_workspaces_too_unless_the_backend_keeps_them(ranks, keeps):
    gone = not keeps
    for history, made in ranks.run(2, released, keeps):
        assert history == [(1, False), (2, False), (1, False), (0, gone), (0, gone)]
        assert made == (1 if keeps else 2)


def conflicting(group):
    pool = Pool({"flashinfer": FakeBackend()})
    pool.prepare(group, decision(4), **FLOAT)
    messages = []
    reference = Decision(True, (REFERENCE,))
    for other in (decision(8), reference):
        try:
            pool.prepare(group, other, **FLOAT)
        except ConfigError as error:
            messages.append(str(error))
    return messages, pool.active(group.group_name, torch.float32, 8).users


def test_two_open_models_cannot_want_different_backends_for_the_same_tensors(ranks):
    for messages, users in ranks.run(2, conflicting):
        assert len(messages) == 2
        assert all("Close it first (model.close())" in message for message in messages)
        assert users == 1


def parted(group, device):
    """Rank 1 has a table that the others lack; then all have one, and then rank 0 alone forces the reference."""
    pool = Pool({"flashinfer": FakeBackend()})
    forced = Decision(True, (REFERENCE,))
    decisions = [decision(8 if dist.get_rank(group) == 1 else 4), forced if dist.get_rank(group) == 0 else decision()]
    messages = []
    for differing in decisions:
        try:
            pool.prepare(group, differing, **{**FLOAT, "device": device})
        except ConfigError as error:
            messages.append(str(error))
    same = pool.prepare(group, decision(), **FLOAT) == decision()
    return messages, same, pool.active(group.group_name, torch.float32, 8).users


def test_ranks_that_decided_differently_all_raise_and_name_the_ranks_and_the_variable(ranks):
    # Of a CUDA device nothing is asked but its type: a rank there waits for its peers' ranges even if it needs nothing.
    answers = ranks.run(3, parted, torch.device("cuda", 0))
    for messages, same, users in answers:
        assert messages == answers[0][0]
        assert "ranks 0, 2: flashinfer/oneshot up to 128 bytes, reference; rank 1: flashinfer/oneshot" in messages[0]
        assert "rank 0: reference; ranks 1, 2: flashinfer/oneshot up to 128 bytes, reference" in messages[1]
        assert all("GRAPHFUSE_ALLREDUCE_TABLES" in message for message in messages)
        assert (same, users) == (True, 1)


def one_rank_alone(group):
    """Rank 1 does not call at all."""
    if dist.get_rank(group) == 0:
        return Pool({}).prepare(group, Decision(True, (REFERENCE,)), **FLOAT)


def test_on_the_cpu_the_reference_alone_waits_for_nobody(ranks):
    assert ranks.run(2, one_rank_alone, timeout=20.0) == [Decision(True, (REFERENCE,)), None]


def refused_and_reference(group):
    pool = Pool({"flashinfer": FakeBackend()})
    refused = Decision(False, (), ("no",))
    forced = Decision(True, (REFERENCE,))
    answers = pool.prepare(group, refused, **FLOAT), pool.prepare(group, forced, **FLOAT)
    return answers == (refused, forced), pool.active(group.group_name, torch.float32, 8).workspaces


def test_a_decision_without_workspaces_needs_no_vote(ranks):
    for same, workspaces in ranks.run(2, refused_and_reference):
        assert same
        assert workspaces == {}


def test_on_a_fake_group_the_decision_stands_and_nothing_is_made():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        pool = Pool({"flashinfer": FakeBackend()})
        assert pool.prepare(dist.group.WORLD, decision(), **FLOAT) == decision()
        pool.release(dist.group.WORLD, dtype=torch.float32, hidden_size=8)
        facts = gather_facts(dist.group.WORLD, "cpu")
    finally:
        dist.destroy_process_group()
    assert facts.world_size == 8
