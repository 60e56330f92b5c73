"""The workspace pool, with a made-up backend on gloo ranks: votes, common fallback, growth, reuse, release."""

import time
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from graphfuse.comm import dispatch
from graphfuse.comm import pool as pool_module
from graphfuse.comm.call import FusedCall
from graphfuse.comm.pool import Pool
from graphfuse.comm.table import SizeRange
from graphfuse.errors import BackendUnavailableError, ConfigError
from graphfuse.gate import Decision, gather_facts

ROW = 8 * 4  # hidden size 8 in float32
FLOAT = {"dtype": torch.float32, "hidden_size": 8, "device": torch.device("cpu")}


def decision(max_tokens=4):
    ranges = (SizeRange(max_tokens * ROW, "flashinfer", "oneshot"), SizeRange(None, "reference"))
    return Decision(True, ranges, ("measured",), "table.json")


@dataclass
class FakeWorkspace:
    group: object
    capacity: int
    hidden_sizes: set = field(default_factory=set)
    closed: bool = False
    breaks: bool = False

    def reserve(self, hidden_size):
        self.hidden_sizes.add(hidden_size)

    def accepts(self, call):
        return call.x.dtype == torch.float32

    def run(self, call, variant):
        """A recognisable result: not a norm at all."""
        if self.breaks:
            raise BackendUnavailableError("broken in the middle")
        x = call.x.clone()
        dist.all_reduce(x, group=self.group)
        return torch.full_like(x, 42.0), x

    def close(self):
        self.closed = True


@dataclass
class FakeBackend:
    """Creation takes two exchanges, as real ones do. `fails` is (rank, where): refusal, raise, before, between, after
    the exchanges."""

    fails: tuple = (None, None)
    keeps_workspaces: bool = True
    made: list = field(default_factory=list)

    def _fail(self, group, where):
        return self.fails == (dist.get_rank(group), where)

    def refusal(self, request):
        if self._fail(request.group, "raise"):
            raise ImportError("no module")
        return "Not enough memory." if self._fail(request.group, "refusal") else None

    def create(self, request, channel):
        for where in ("before", "between"):
            if self._fail(request.group, where):
                raise RuntimeError("out of memory")
            channel.exchange(where)
        if self._fail(request.group, "after"):
            raise RuntimeError("out of memory")
        self.made.append(FakeWorkspace(request.group, request.max_bytes))
        return self.made[-1]


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
}


@pytest.mark.parametrize("where", FAILURES)
@pytest.mark.parametrize("tp", [2, 4])
def test_one_failing_rank_makes_all_fall_back_together_at_once_and_for_the_same_reason(ranks, tp, where):
    answers = ranks.run(tp, prepared, (1, where))
    for first, seconds, active_ranges, workspaces, second, _ in answers:
        assert first == answers[0][0]
        assert first.allowed
        assert first.ranges == active_ranges == (SizeRange(None, "reference"),)
        assert workspaces == []
        assert first.table is None
        assert first.reasons == (
            "measured",
            f"All ranks use the reference backend, because flashinfer could not be set up: {FAILURES[where]}",
        )
        assert seconds < 10
        assert second == decision()  # the next model may try again


def test_half_made_workspaces_are_closed_on_the_ranks_that_had_succeeded(ranks):
    answers = ranks.run(2, prepared, (1, "after"))
    assert answers[0][-1] == [True, False]
    assert answers[1][-1] == [False]


def grown(group):
    """Three models: 4 tokens, 16 tokens at another hidden size, 2 tokens."""
    backend = FakeBackend()
    pool = Pool({"flashinfer": backend})
    pool.prepare(group, decision(4), **FLOAT)
    pool.prepare(group, decision(16), **{**FLOAT, "hidden_size": 16})
    pool.prepare(group, decision(2), **{**FLOAT, "hidden_size": 32})
    used = [id(pool.active(group.group_name, torch.float32, h).workspaces["flashinfer"]) for h in (8, 16, 32)]
    made = [id(workspace) for workspace in backend.made]
    return [made.index(workspace) for workspace in used], [sorted(w.hidden_sizes) for w in backend.made]


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
    reference = Decision(True, (SizeRange(None, "reference"),))
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


def refused_and_reference(group):
    pool = Pool({"flashinfer": FakeBackend()})
    refused = Decision(False, (), ("no",))
    forced = Decision(True, (SizeRange(None, "reference"),))
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


def dispatched(group, breaks=False):
    """Calls of 4, 5 and 0 tokens, of another hidden size, and in float64, through the process's pool."""
    backend = FakeBackend()
    pool_module.process_pool, before = Pool({"flashinfer": backend}), pool_module.process_pool
    try:
        pool_module.prepare(group, decision(4), **FLOAT)
        backend.made[0].breaks = breaks
        results = []
        for tokens, hidden, dtype in [(4, 8, None), (5, 8, None), (0, 8, None), (4, 16, None), (2, 8, torch.float64)]:
            x = torch.ones(tokens, hidden, dtype=dtype)
            normed, summed = dispatch.run(FusedCall(x, None, None, 1e-6), group.group_name)
            reduced = torch.equal(summed, x * dist.get_world_size(group))
            results.append((bool((normed == 42.0).any()), reduced))
        return results
    except BackendUnavailableError as error:
        return str(error)
    finally:
        pool_module.process_pool = before


def test_dispatch_goes_by_message_bytes_and_every_choice_reduces(ranks):
    for results in ranks.run(2, dispatched):
        assert [fused for fused, _ in results] == [True, False, False, False, False]
        assert all(reduced for _, reduced in results)


def test_a_backend_that_fails_in_the_middle_is_an_error_and_not_another_backend_on_one_rank(ranks):
    assert ranks.run(2, dispatched, True) == ["broken in the middle"] * 2


def test_choose_takes_the_first_range_that_holds_the_message():
    ranges = decision(4).ranges
    assert dispatch.choose(ranges, 4 * ROW).backend == "flashinfer"
    assert dispatch.choose(ranges, 4 * ROW + 1).backend == "reference"
    assert dispatch.choose(ranges[:1], 4 * ROW + 1) is None
