"""Candidates are measured side by side on every rank; one that fails anywhere is absent everywhere, with the reason."""

import dataclasses
import sys
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from graphfuse.comm import reference
from graphfuse.comm.control import control_channel
from graphfuse.comm.pool import process_pool
from graphfuse.facts import Facts
from graphfuse.tuning import allreduce_candidates as candidates
from graphfuse.tuning.agreement import attempt
from graphfuse.tuning.allreduce_candidates import BENCHED, DISPATCHED, UNFUSED, Candidate, Candidates
from graphfuse.tuning.allreduce_inputs import Inputs, Shape, compiled_add_norm
from graphfuse.tuning.allreduce_measure import Plan, link_factor, measure
from graphfuse.tuning.allreduce_result import Result
from graphfuse.tuning.allreduce_timing import Stopwatch
from tests.documents import ROOT, run

CPU = torch.device("cpu")
SHAPE = Shape(5, 64, torch.bfloat16)


def run_plan(group, tokens, names=BENCHED, dtype=torch.bfloat16):
    plan = Plan(names, (64, 128), tokens, dtype, warm=1, timed=3)
    seen = []
    measured = measure(group, CPU, plan, each=lambda row: seen.append((row.hidden, row.tokens)))
    return measured.rows, measured.absent, seen


@pytest.mark.parametrize("tp", [2, 3])
def test_every_size_is_a_row_of_what_runs_on_the_cpu(ranks, tp):
    first, *others = ranks.run(tp, run_plan, (1, 7))
    rows, absent, seen = first
    assert seen == [(64, 1), (64, 7), (128, 1), (128, 7)] == [(row.hidden, row.tokens) for row in rows]
    for row in rows:
        assert set(row.us) == {"unfused", "reference", "dispatched"} == set(row.spread)
        assert all(time > 0 for time in row.us.values())
        assert row.dispatched == "reference"
    assert set(absent) == set(BENCHED) - {"unfused", "reference", "dispatched"}
    assert absent["torch/one_shot"] == "It is measured on GPUs only."
    assert "NVIDIA GPUs only" in absent["flashinfer/oneshot"]
    assert all(other == first for other in others), "every rank has the same result"


def broken_on_one_rank(group):
    inputs = Inputs(SHAPE, group, CPU)

    def call(_):
        if dist.get_rank(group) == 1:
            raise RuntimeError("no such kernel\nand more")
        return inputs.x[0], None

    stopwatch = Stopwatch(group, CPU, control_channel(group))
    reason = stopwatch.record(Candidate("broken", call, inputs.refill), inputs)
    good = stopwatch.record(working(group, inputs), inputs)
    return reason, stopwatch.rounds([good], warm=0, timed=2)


def working(group, inputs):
    every = Candidates((UNFUSED,), (inputs.shape,), None, group, CPU)
    every.prepare(inputs.shape.hidden_size)
    (candidate,) = every.at(inputs)
    return candidate


def test_a_candidate_that_fails_on_one_rank_is_absent_on_all_and_the_others_go_on(ranks):
    first, second = ranks.run(2, broken_on_one_rank)
    assert first == second
    assert first[0] == "rank 1: RuntimeError: no such kernel"
    assert len(first[1][0]) == 2, "two rounds of the one that works"


def wrong_somewhere(group, tokens):
    inputs = Inputs(Shape(tokens, 64, torch.bfloat16), group, CPU)
    good = working(group, inputs)

    def without_the_last_row(i):
        normed, summed = good.call(i)
        normed[-1] = 0
        return normed, summed

    def unreduced(i):
        return inputs.residual[i], inputs.residual[i]

    def not_a_number(i):
        normed, summed = good.call(i)
        return normed, summed * float("nan")

    stopwatch = Stopwatch(group, CPU, control_channel(group))
    calls = (without_the_last_row, unreduced, not_a_number)
    return [stopwatch.record(dataclasses.replace(good, call=call), inputs) for call in calls]


@pytest.mark.parametrize("tokens", [1, 5, 1000])
def test_a_wrong_result_is_not_timed(ranks, tokens):
    for reasons in ranks.run(2, wrong_somewhere, tokens):
        for reason, what in zip(reasons, ("normed value", "normed value", "residual"), strict=True):
            assert isinstance(reason, str) and f"its {what} is wrong by" in reason


def order_of_calls(group):
    inputs = Inputs(SHAPE, group, CPU)
    good = working(group, inputs)
    log = []

    def logging(name):
        def call(i):
            log.append(name)
            return good.call(i)

        return dataclasses.replace(good, name=name, call=call)

    stopwatch = Stopwatch(group, CPU, control_channel(group))
    recordings = [stopwatch.record(logging(name), inputs) for name in "ab"]
    log.clear()
    times = stopwatch.rounds(recordings, warm=1, timed=2)
    iterations = recordings[0].iterations
    return log == (["a"] * iterations + ["b"] * iterations) * 3, len(times), [len(each) for each in times]


def test_rounds_take_each_candidate_in_turn(ranks):
    assert ranks.run(2, order_of_calls) == [(True, 2, [2, 2])] * 2


def slow_on_one_rank(group):
    inputs = Inputs(SHAPE, group, CPU)
    good = working(group, inputs)

    def call(i):
        if dist.get_rank(group) == 1:
            end = time.perf_counter() + 0.02
            while time.perf_counter() < end:
                pass
        return good.call(i)

    stopwatch = Stopwatch(group, CPU, control_channel(group))
    recording = stopwatch.record(dataclasses.replace(good, call=call), inputs)
    return stopwatch.rounds([recording], warm=0, timed=1)


def test_a_time_is_that_of_the_slowest_rank(ranks):
    for ((us,),) in ranks.run(2, slow_on_one_rank):
        assert us >= 20_000


class FakeBackend:
    """Serves by the reference; cannot make its workspace on one of the ranks, if it is told so."""

    keeps_workspaces = False

    def __init__(self, broken_rank=None):
        self.broken_rank = broken_rank

    def refusal(self, request):
        return None

    def create(self, request, channel):
        if channel.rank == self.broken_rank:
            raise MemoryError("no room")
        return FakeWorkspace(request)


class FakeWorkspace:
    quantises, num_bytes = False, 0

    def __init__(self, request):
        self.group, self.capacity, self.calls = request.group, request.max_bytes or 1 << 62, []

    def reserve(self, *_):
        pass

    def accepts(self, call):
        return True

    def run(self, call, variant):
        self.calls.append(variant)
        return reference.run(call, self.group)

    def close(self):
        pass


def with_fake_backends(group, flashinfer_fails):
    facts = Facts.from_json(ROOT / "configs" / "facts" / "h200_x2.json")
    shapes = [Shape(tokens, 256, torch.bfloat16) for tokens in (4, 8)]
    backends = {"flashinfer": FakeBackend(1 if flashinfer_fails else None), "symm_mem": FakeBackend()}
    with mock.patch.object(process_pool, "backends", backends):
        every = Candidates((*candidates.ELIGIBLE, DISPATCHED), shapes, facts, group, CPU)
        every.prepare(256)
        inputs = Inputs(shapes[1], group, CPU)
        stopwatch = Stopwatch(group, CPU, control_channel(group))
        names = [c.name for c in every.at(inputs) if not isinstance(stopwatch.record(c, inputs), str)]
        workspaces = {
            name: active.workspaces[name.split("/")[0]]
            for name, pool in every._pools.items()
            if (active := pool.active(group.group_name, torch.bfloat16, 256)) and active.workspaces
        }
        variants = {name: set(workspace.calls) for name, workspace in workspaces.items()}
        capacities = {name: workspace.capacity for name, workspace in workspaces.items()}
        served = every.dispatched(shapes[1])
        every.release(256)
        left = process_pool.active(group.group_name, torch.bfloat16, 256)
    return names, every.absent, variants, capacities, served, left


def test_each_backend_is_measured_in_a_pool_of_its_own_by_its_own_variant(ranks):
    for names, absent, variants, capacities, served, left in ranks.run(2, with_fake_backends, False):
        assert names == [*candidates.ELIGIBLE, DISPATCHED] and absent == {}
        assert variants == {name: {name.split("/")[1]} for name in candidates.ELIGIBLE if name != "reference"}
        assert capacities["flashinfer/oneshot"] == 8 * 256 * 2, "for the largest message of the run, and no more"
        assert served in candidates.ELIGIBLE and left is None


def test_a_backend_that_cannot_be_set_up_on_one_rank_is_absent_on_both(ranks):
    (first_names, first_absent, *_), (names, absent, *_) = ranks.run(2, with_fake_backends, True)
    assert first_absent == absent and first_names == names
    assert "flashinfer/oneshot" not in names and "symm_mem/one_shot" in names
    assert "rank 1: MemoryError: no room" in absent["flashinfer/oneshot"]


def inputs_of(group):
    inputs = Inputs(SHAPE, group, CPU)
    before = inputs.x[0].clone()
    inputs.x[0].add_(1)
    inputs.refill()
    assert torch.equal(inputs.x[0], before)
    return inputs.x[0].float().sum().item(), inputs.residual[0].float().sum().item(), inputs.padded_x[0].shape[0]


def test_x_differs_by_rank_and_the_residual_does_not(ranks):
    (x, residual, padded), (other_x, other_residual, _) = ranks.run(2, inputs_of)
    assert x != other_x and residual == other_residual and padded == 6


def test_several_sets_of_inputs_where_memory_allows():
    assert Shape(1, 2048, torch.bfloat16).num_buffers == 8
    assert Shape(8192, 4096, torch.bfloat16).num_buffers == 2
    assert Shape(16384, 7168, torch.bfloat16).num_buffers == 1


def try_something(group, failing):
    def action():
        if dist.get_rank(group) in failing:
            raise ValueError("no")
        return 42

    return attempt(control_channel(group), action)


@pytest.mark.parametrize(
    ("failing", "outcome"),
    [((), (42, None)), ((1,), (None, "rank 1: ValueError: no")), ((0, 1), (None, "ValueError: no"))],
    ids=["none", "one", "all"],
)
def test_an_attempt_has_one_outcome_on_all_ranks(ranks, failing, outcome):
    assert ranks.run(2, try_something, failing) == [outcome, outcome]


def test_the_norm_is_compiled_once_for_one_token_and_once_for_all_other_counts(monkeypatch):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile(function, backend="eager"))
    meta = torch.device("meta")
    from torch._dynamo.utils import counters

    with torch.no_grad():
        for hidden_size in (64, 128):
            norm = compiled_add_norm(hidden_size, 64, torch.bfloat16, meta)
            counters.clear()
            for tokens in (1, 2, 3, 64, 1000):
                x = torch.empty(tokens, hidden_size, dtype=torch.bfloat16, device=meta)
                norm(x, torch.empty_like(x), x[0].clone())
            assert counters["stats"]["unique_graphs"] == 1, "that of one token; the other was made at the start"
    torch._dynamo.reset()


def test_a_message_crosses_the_link_once_between_two_ranks_and_in_two_halves_between_more():
    assert [link_factor(n) for n in (2, 4, 8)] == [1.0, 1.5, 1.75]


def test_dispatched_is_what_the_gate_decides(ranks):
    rows, _, _ = ranks.run(2, run_plan, (4,), (DISPATCHED,))[0]
    assert [row.dispatched for row in rows] == ["reference", "reference"]
    assert candidates.ELIGIBLE == ("flashinfer/oneshot", "symm_mem/one_shot", "symm_mem/two_shot", "reference")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.timeout(180)
def test_two_gpus_measure_every_candidate(tmp_path):
    command = ("-m", "graphfuse.cli.main", "bench", "allreduce", "--tp", 2, "--hidden", 2048, "--tokens", "1,3,2048")
    run(sys.executable, *command, "--output", "result.json", folder=tmp_path, timeout=150)
    result = Result.read(tmp_path / "result.json")
    for row in result.rows:
        missing = {"sequence_parallel"} if row.tokens < 2 else set()
        if result.versions["flashinfer-python"] is None:
            missing |= {"flashinfer/oneshot"}
        assert set(row.us) == {*BENCHED, "link"} - missing, result.absent
