"""The symm_mem backend without its kernels: sizes of buffers, reserving together, the time-out, refusals.

The kernels run in tests/kernels and tests/gpu.
"""

import itertools
import types

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from graphfuse.comm import symm_mem
from graphfuse.comm.call import FusedCall
from graphfuse.comm.control import control_channel
from graphfuse.comm.pool import Pool
from graphfuse.comm.symm_mem import BUFFER_BYTES, MOST_ROWS, SymmMemBackend, SymmMemWorkspace, plan_rows, spin_limit
from graphfuse.comm.symmetric_memory import SymmetricBuffer
from graphfuse.comm.table import REFERENCE_ONLY, SizeRange
from graphfuse.comm.workspace import ANY_SIZE, WorkspaceRequest
from graphfuse.errors import ConfigError
from graphfuse.gate import Decision

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def request(hidden_size, variants, dtype=torch.bfloat16, group=None):
    limits = [limit for _, limit in variants]
    return WorkspaceRequest(
        group, dtype, hidden_size, None if None in limits else max(limits, default=0), CPU, tuple(map(tuple, variants))
    )


def reserved_bytes(wanted, world_size):
    """What a workspace that reserves this holds, with buffers that take no memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symm_mem, "allocate", lambda elements, word, *_: buffer_of(elements, word))
        workspace = SymmMemWorkspace(0, world_size, wanted.dtype, CPU)
        workspace.reserve(wanted, None)
        return workspace.num_bytes


def buffer_of(elements, word):
    return SymmetricBuffer(torch.empty(elements, dtype=word, device="meta"), torch.zeros(1), None)


LIMITS = st.one_of(st.none(), st.integers(0, 1 << 32))
VARIANTS = st.one_of(
    LIMITS.map(lambda limit: [("one_shot", limit)]),
    LIMITS.map(lambda limit: [("two_shot", limit)]),
    st.tuples(LIMITS, LIMITS).map(lambda both: [("one_shot", both[0]), ("two_shot", both[1])]),
)


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 16384), st.sampled_from(DTYPES), st.integers(2, 8), VARIANTS)
def test_buffers_hold_at_least_a_row_of_each_variant_and_stay_within_the_budget(hidden_size, dtype, world, variants):
    wanted = request(hidden_size, variants, dtype)
    rows = plan_rows(wanted, world)
    assert set(rows) == {variant for variant, _ in variants}
    assert all(1 <= count < MOST_ROWS + world for count in rows.values())
    if "two_shot" in rows:  # a row for each owner, and as many for one as for the other
        assert rows["two_shot"] >= world and rows["two_shot"] % world == 0
    assert reserved_bytes(wanted, world) <= BUFFER_BYTES


@pytest.mark.parametrize("hidden_size", [1, 15, 16, 17, 4096, 8192, 16383, 16384])
def test_the_budget_holds_at_the_ends_of_every_dimension(hidden_size):
    for dtype, world, variants in itertools.product(
        DTYPES, (2, 3, 8), ([("one_shot", None)], [("two_shot", None)], [("one_shot", None), ("two_shot", None)])
    ):
        wanted = request(hidden_size, variants, dtype)
        assert reserved_bytes(wanted, world) <= BUFFER_BYTES, (dtype, world, variants)


def test_a_limit_is_planned_for_and_no_more():
    assert plan_rows(request(64, [("one_shot", 10 * 128)]), 4) == {"one_shot": 10}
    assert plan_rows(request(64, [("one_shot", 10 * 128 + 127)]), 4) == {"one_shot": 10}  # whole rows
    assert plan_rows(request(64, [("two_shot", 10 * 128)]), 4) == {"two_shot": 12}
    assert plan_rows(request(64, [("one_shot", 5)]), 4) == {"one_shot": 1}


def test_what_small_messages_do_not_need_goes_to_the_large_ones():
    """4096 x bfloat16 on two ranks: 24 KiB a row of one_shot, 36 KiB of two_shot."""
    alone = plan_rows(request(4096, [("two_shot", None)]), 2)
    beside = plan_rows(request(4096, [("two_shot", None), ("one_shot", 16 * 8192)]), 2)
    halves = plan_rows(request(4096, [("two_shot", None), ("one_shot", None)]), 2)
    assert beside["one_shot"] == 16
    assert alone["two_shot"] - 16 <= beside["two_shot"] < alone["two_shot"]
    assert halves["two_shot"] <= alone["two_shot"] // 2 + 2
    assert halves["one_shot"] * 24 << 10 <= BUFFER_BYTES // 2


class Failing:
    """Stands in for `allocate`: exchanges as it does, and fails on a rank where it is told to."""

    def __init__(self, rank, where):
        self.fails, self.made = (rank, where), 0

    def __call__(self, elements, word, group, device, channel):
        for where in ("before", "between"):
            if self.fails == (channel.rank, where):
                raise RuntimeError("out of memory")
            channel.exchange(where)
        self.made += 1
        return buffer_of(elements, word)


def symm_mem_decision(*limits):
    ranges = tuple(SizeRange(limit, "symm_mem", v) for limit, v in zip(limits, ("one_shot", "two_shot"), strict=False))
    return Decision(True, ranges if limits[-1] is None else (*ranges, *REFERENCE_ONLY))


def models(group, fails):
    """One model; a second one whose reserving fails on rank 1; the second again; a third with larger limits."""
    symm_mem.allocate, before = Failing(None, None), symm_mem.allocate
    zeros = torch.zeros
    try:
        pool = Pool({"symm_mem": SymmMemBackend()})

        def prepare(decision, hidden_size):
            outcome = pool.prepare(group, decision, dtype=torch.bfloat16, hidden_size=hidden_size, device=CPU)
            workspace = pool.active(group.group_name, torch.bfloat16, hidden_size).workspaces.get("symm_mem")
            held = sorted((size, variant) for size, variant in workspace._rows) if workspace else None
            return outcome.ranges == decision.ranges, held, workspace and id(workspace)

        history = [prepare(symm_mem_decision(64 * 16, None), 64)]
        if fails == "slots":
            if dist.get_rank(group) == 1:

                def no_slots(*size, **kwargs):
                    raise RuntimeError("out of memory")

                torch.zeros = no_slots
        else:
            symm_mem.allocate.fails = (1, fails)
        history.append(prepare(symm_mem_decision(96 * 16), 96))
        torch.zeros, symm_mem.allocate.fails = zeros, (None, None)
        pool.release(group, dtype=torch.bfloat16, hidden_size=96)
        history.append(prepare(symm_mem_decision(96 * 16), 96))
        history.append(prepare(symm_mem_decision(None), 32))
        return [step[:2] for step in history], len({w for _, _, w in history if w}), symm_mem.allocate.made
    finally:
        symm_mem.allocate, torch.zeros = before, zeros


@pytest.mark.parametrize("fails", ["before", "between", "slots"])
def test_models_share_a_workspace_and_one_ranks_failure_to_reserve_leaves_all_ranks_with_the_same_rows(ranks, fails):
    first = [(64, "one_shot"), (64, "two_shot")]
    for history, workspaces, made in ranks.run(2, models, fails, timeout=30.0):
        assert history == [
            (True, first),
            (False, None),
            (True, [*first, (96, "one_shot")]),
            (True, [(32, "one_shot"), *first, (96, "one_shot")]),
        ]
        assert workspaces == 1
        assert made == 4  # buffers of two variants, then one for each model


def accepted(group):
    symm_mem.allocate, before = Failing(None, None), symm_mem.allocate
    try:
        channel = control_channel(group)
        workspace = SymmMemBackend().create(request(64, []), channel)
        empty = workspace.num_bytes
        workspace.reserve(request(64, [("one_shot", 640)], group=group), channel)
        calls = [torch.zeros(2, 64).bfloat16(), torch.zeros(99, 64).bfloat16(), torch.zeros(2, 64), torch.zeros(2, 32)]
        answers = [workspace.accepts(FusedCall(x, None, None, 1e-6)) for x in calls]
        held = workspace.num_bytes
        workspace.close()
        return answers, (empty, held, workspace.num_bytes), workspace.capacity, workspace.quantises
    finally:
        symm_mem.allocate = before


def test_a_workspace_takes_any_number_of_tokens_of_its_dtype_and_hidden_sizes(ranks):
    rows = 640 // 128
    for answers, num_bytes, capacity, quantises in ranks.run(2, accepted):
        assert answers == [True, True, False, False]
        assert num_bytes == (0, 3 * rows * 128 + rows * 4, 0)
        assert capacity == ANY_SIZE
        assert quantises


def test_without_a_time_out_a_row_is_waited_for_for_ever():
    assert spin_limit({}.get) == spin_limit({"GRAPHFUSE_COMM_TIMEOUT": ""}.get) == 0


def test_a_time_out_becomes_a_number_of_polls_that_a_32_bit_counter_reaches():
    limits = [spin_limit({"GRAPHFUSE_COMM_TIMEOUT": seconds}.get) for seconds in ("1e-9", "0.5", "10", "86400", "inf")]
    assert limits == [1, 1_000_000, 20_000_000, 2**31 - 1, 2**31 - 1]


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan"])
def test_a_time_out_that_is_no_positive_number_is_an_error(value):
    with pytest.raises(ConfigError, match=r"GRAPHFUSE_COMM_TIMEOUT=.* is not a positive number of seconds\. Give"):
        spin_limit({"GRAPHFUSE_COMM_TIMEOUT": value}.get)


NEEDED = 3 * 512 * 2 * 1024  # three slots of 512 rows of 1024 x bfloat16, from one sender


def on_cuda(monkeypatch, *free, capturing=False):
    """The refusal where so many bytes are free at each look, the second one after the cache was emptied."""
    looks = iter(free)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (next(looks), 140 << 30))
    group, device = types.SimpleNamespace(size=lambda: 2), torch.device("cuda", 0)
    variants = (("one_shot", 512 * 2 * 1024),)
    return SymmMemBackend().refusal(WorkspaceRequest(group, torch.bfloat16, 1024, None, device, variants))


def test_refusals_name_the_reason(monkeypatch):
    assert on_cuda(monkeypatch, NEEDED) is None
    assert on_cuda(monkeypatch, 0, NEEDED) is None
    assert "before capturing" in on_cuda(monkeypatch, NEEDED, capturing=True)
    assert "take 3 MiB of GPU memory, and 2 MiB are free" in on_cuda(monkeypatch, 0, NEEDED - 1)
    assert SymmMemBackend().refusal(request(64, [])) is None
    monkeypatch.setattr(symm_mem, "norm_epilogue", types.SimpleNamespace(available=lambda: False))
    assert "Triton is not installed" in SymmMemBackend().refusal(request(64, []))
