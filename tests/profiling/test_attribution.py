"""From a trace to time by label."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphfuse.profiling.attribution import Work, spent, with_labels_of, work_of
from tests.profiling.traces import MM, SUM, Trace


def test_a_kernel_belongs_to_the_range_that_launched_it():
    trace = Trace().phase("step", 0, 100).range(MM, 10, 20).range(SUM, 20, 40)
    trace.kernel("gemm", launched=12, start=50, end=80).kernel("push", launched=30, start=80, end=90)
    found = spent(work_of(trace.json), "step")
    assert found.by_label == {MM: 30.0, SUM: 10.0}
    assert (found.window, found.idle, found.attributed, found.kernels) == (40.0, 0.0, 1.0, 2)


def test_gaps_are_idle_and_what_has_no_range_is_not_attributed():
    trace = Trace().phase("step", 0, 100).range(MM, 10, 20)
    trace.kernel("gemm", 12, 50, 60).kernel("copy", 30, 70, 75)
    found = spent(work_of(trace.json), "step")
    assert (found.window, found.idle, found.busy, found.unattributed) == (25.0, 10.0, 15.0, 5.0)
    assert found.attributed == pytest.approx(2 / 3)


def test_ranges_of_another_thread_do_not_count():
    trace = Trace().phase("step", 0, 100).range(MM, 10, 20).kernel("gemm", 12, 50, 60, tid=8)
    assert work_of(trace.json) == []  # launched in no phase


def test_the_innermost_range_counts():
    trace = Trace().phase("step", 0, 100).range(MM, 10, 50).range(SUM, 20, 30)
    trace.kernel("a", 15, 60, 61).kernel("b", 25, 61, 62).kernel("c", 35, 62, 63)
    assert [piece.label for piece in work_of(trace.json)] == [MM, SUM, MM]


def test_a_range_that_is_no_label_leaves_the_one_around_it():
    trace = Trace().phase("step", 0, 100).range(MM, 10, 50).add("user_annotation", "nccl:all_reduce", 12, 20)
    assert work_of(trace.kernel("a", 15, 60, 61).json)[0].label == MM


def test_phases_are_apart():
    trace = Trace().phase("prefill", 0, 50).phase("step", 50, 100).range(MM, 10, 20).range(MM, 60, 70)
    trace.kernel("a", 15, 20, 25).kernel("a", 65, 70, 90)
    work = work_of(trace.json)
    assert (spent(work, "prefill").window, spent(work, "step").window, spent(work, "other").window) == (5.0, 20.0, 0.0)


def test_kernels_that_overlap_share_the_time():
    trace = Trace().phase("step", 0, 100).range(MM, 10, 20).range(SUM, 20, 40)
    trace.kernel("gemm", 12, 50, 80).kernel("push", 30, 60, 80, stream=21)
    found = spent(work_of(trace.json), "step")
    assert found.by_label == {MM: 20.0, SUM: 10.0}


def test_copies_and_fills_count_as_kernels():
    trace = Trace().phase("step", 0, 100).range(MM, 10, 20)
    trace.add("cuda_driver", "cuMemsetD8Async", 11, 12, correlation=99)
    trace.add("gpu_memset", "Memset (Device)", 20, 22, tid=20, correlation=99)
    assert spent(work_of(trace.json), "step").by_label == {MM: 2.0}


def test_on_the_cpu_ranges_are_the_work_without_those_inside():
    trace = Trace().phase("step", 0, 100).range(MM, 10, 50).range(SUM, 20, 30)
    trace.op("aten::mm", 11, 19).op("aten::add", 60, 65).op("aten::add_", 61, 64).op("TorchDynamo Cache Lookup", 70, 80)
    trace.op("aten::mul", 5, 55)  # around what is labelled: no work of its own
    found = spent(work_of(trace.json), "step")
    assert found.by_label == {MM: 30.0, SUM: 10.0}
    assert (found.unattributed, found.window, found.idle) == (5.0, 55.0, 10.0)


def work(*pieces: tuple) -> list[Work]:
    return [Work("step", name, label, at, at + 1) for at, (name, label) in enumerate(pieces)]


def test_the_kth_kernel_of_a_name_is_the_same_in_another_run():
    labelled = work(("gemm", MM), ("push", SUM), ("gemm", SUM))
    replay = work(("push", None), ("gemm", None), ("gemm", None))  # another stream was ahead
    assert [piece.label for piece in with_labels_of(replay, labelled)] == [SUM, MM, SUM]
    assert [piece.start for piece in with_labels_of(replay, labelled)] == [0, 1, 2]


def test_a_name_that_comes_more_often_is_labelled_only_if_that_is_certain():
    replay = work(("gemm", None), ("gemm", None))
    assert [p.label for p in with_labels_of(replay, work(("gemm", MM)))] == [MM, MM]
    three = work(("gemm", MM), ("gemm", SUM), ("gemm", MM))
    assert [p.label for p in with_labels_of(replay, three)] == [None, None]
    assert [p.label for p in with_labels_of(replay, [])] == [None, None]


pieces = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9), st.sampled_from([MM, SUM, None])), max_size=12)


@given(pieces)
def test_the_parts_add_up(drawn):
    found = spent([Work("step", "k", label, start, start + length) for start, length, label in drawn], "step")
    assert sum(found.by_label.values()) + found.unattributed + found.idle == pytest.approx(found.window)
    covered = {t for start, length, _ in drawn for t in range(start, start + length)}
    assert found.busy == pytest.approx(len(covered))
    assert 0.0 <= found.attributed <= 1.0
