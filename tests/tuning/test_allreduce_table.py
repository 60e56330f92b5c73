"""A size table follows from the measurements: the fastest backend, but no change within the noise."""

import dataclasses

import pytest

from graphfuse.comm.table import SizeRange, SizeTable
from graphfuse.errors import ConfigError
from graphfuse.tuning.allreduce_result import Result, Row
from graphfuse.tuning.allreduce_table import choose_ranges, make_table

FLASHINFER, ONE_SHOT, TWO_SHOT = "flashinfer/oneshot", "symm_mem/one_shot", "symm_mem/two_shot"
H = 64
ROW_BYTES = H * 2


def row(tokens, us, hidden=H, **spread):
    return Row(tokens, hidden, us, {name.replace("__", "/"): share for name, share in spread.items()})


def ranges(*rows):
    """[(last token count or None, candidate)] of the chosen ranges."""
    chosen = choose_ranges(rows, itemsize=2, world_size=2)
    return [(r.max_bytes and r.max_bytes // ROW_BYTES, r.label) for r in chosen]


def test_the_fastest_serves_up_to_the_last_count_at_which_it_won():
    assert ranges(
        row(1, {"unfused": 10, ONE_SHOT: 4, TWO_SHOT: 6, "reference": 10}),
        row(64, {"unfused": 20, ONE_SHOT: 9, TWO_SHOT: 10, "reference": 20}),
        row(4096, {"unfused": 90, ONE_SHOT: 80, TWO_SHOT: 60, "reference": 90}),
    ) == [(64, ONE_SHOT), (None, TWO_SHOT)]


def test_a_choice_stays_while_another_is_faster_by_no_more_than_three_percent():
    first = row(1, {"unfused": 10, ONE_SHOT: 4, TWO_SHOT: 6})
    assert ranges(first, row(2, {"unfused": 10, ONE_SHOT: 100 / 20, TWO_SHOT: 97.5 / 20})) == [(None, ONE_SHOT)]
    assert ranges(first, row(2, {"unfused": 10, ONE_SHOT: 100 / 20, TWO_SHOT: 96 / 20})) == [
        (1, ONE_SHOT),
        (None, TWO_SHOT),
    ]


@pytest.mark.parametrize("noisy", ["symm_mem__one_shot", "symm_mem__two_shot"])
def test_where_the_rounds_spread_more_the_margin_is_twice_the_spread(noisy):
    first = row(1, {"unfused": 10, ONE_SHOT: 4, TWO_SHOT: 6})
    second = {"unfused": 10, ONE_SHOT: 5.0, TWO_SHOT: 4.6}  # 8 % faster
    assert ranges(first, row(2, second, **{noisy: 0.05})) == [(None, ONE_SHOT)]
    assert ranges(first, row(2, second, **{noisy: 0.03})) == [(1, ONE_SHOT), (None, TWO_SHOT)]


def test_one_odd_point_makes_no_range():
    first, odd = row(1, {"unfused": 10, ONE_SHOT: 4, TWO_SHOT: 6}), row(2, {"unfused": 10, ONE_SHOT: 5, TWO_SHOT: 4})
    assert ranges(first, odd, row(4, {"unfused": 20, ONE_SHOT: 8, TWO_SHOT: 8.1})) == [(None, ONE_SHOT)]
    assert ranges(first, odd, row(4, {"unfused": 20, ONE_SHOT: 8, TWO_SHOT: 8})) == [(1, ONE_SHOT), (None, TWO_SHOT)]


def test_what_is_slower_than_unfused_is_not_chosen_even_where_it_was_before():
    assert ranges(
        row(1, {"unfused": 10, ONE_SHOT: 4, "reference": 10}),
        row(4096, {"unfused": 50, ONE_SHOT: 60, "reference": 62}),
        row(8192, {"unfused": 100, ONE_SHOT: 60, "reference": 101}),
    ) == [(1, ONE_SHOT), (4096, "reference"), (None, ONE_SHOT)]


def test_as_fast_as_unfused_within_the_noise_is_fast_enough():
    assert ranges(row(1, {"unfused": 10, ONE_SHOT: 10.2, "reference": 10.6})) == [(None, ONE_SHOT)]


def test_flashinfer_serves_nothing_beyond_what_was_measured():
    rows = [
        row(1, {"unfused": 10, FLASHINFER: 4, ONE_SHOT: 8, "reference": 10}),
        row(64, {"unfused": 20, FLASHINFER: 5, ONE_SHOT: 9, "reference": 20}),
    ]
    assert ranges(*rows) == [(64, FLASHINFER), (None, ONE_SHOT)]
    slow = [dataclasses.replace(r, us={**r.us, ONE_SHOT: 30}) for r in rows]
    assert ranges(*slow) == [(64, FLASHINFER), (None, "reference")]


def test_the_reference_stands_for_the_unfused_work_where_only_that_was_measured():
    assert ranges(row(1, {"unfused": 10, ONE_SHOT: 30})) == [(None, "reference")]
    with pytest.raises(ConfigError, match="Nothing that a size table could choose was measured at 1 tokens"):
        ranges(row(1, {"torch/one_shot": 30}))


RESULT = Result(
    what="all-reduce + residual add + RMSNorm, TP4, bfloat16, microseconds per call",
    host="4x NVIDIA L40S",
    device_name="NVIDIA L40S",
    world_size=4,
    dtype="bfloat16",
    link="no NVLink, a peer copy reaches 26 GB/s",
    link_gbps=26.0,
    versions={"torch": "2.11.0", "triton": "3.6.0", "flashinfer-python": None, "nccl": "2.28.9"},
    date="2026-11-30",
    method="CUDA-graph replays",
    absent={FLASHINFER: "FlashInfer is not installed."},
    rows=(
        row(16, {"unfused": 30.0, ONE_SHOT: 20.0, "dispatched": 20.1, "link": 0.2}, hidden=4096),
        row(1, {"unfused": 10.0, ONE_SHOT: 4.0, "torch/one_shot": 8.0, "dispatched": 4.1, "link": 0.1}, hidden=4096),
        row(1, {"unfused": 9.0, ONE_SHOT: 3.0, "reference": 9.0}, hidden=2048),
    ),
)


def test_each_measured_hidden_size_is_a_class_and_the_last_one_holds_for_all_larger_ones():
    table = make_table(RESULT, source="here", stands_in_for=["NVIDIA L40"])
    assert table.classes == (
        (2048, (SizeRange(None, "symm_mem", "one_shot"),)),
        (None, (SizeRange(None, "symm_mem", "one_shot"),)),
    )
    assert (table.device_name, table.world_size, table.stands_in_for) == ("NVIDIA L40S", 4, ("NVIDIA L40",))


def test_the_table_keeps_the_figures_of_what_it_could_choose_and_of_unfused():
    measured = make_table(RESULT, source="here").measured
    assert [(m.hidden_size, m.tokens) for m in measured] == [(2048, 1), (4096, 1), (4096, 16)]
    assert measured[1].us == {"unfused": 10.0, ONE_SHOT: 4.0}


def test_it_is_written_under_the_name_by_which_it_is_found_and_read_back(tmp_path):
    table = make_table(RESULT, source="here")
    file = table.write(tmp_path)
    assert file.name == "device_name=NVIDIA_L40S,tp=4.json"
    assert SizeTable.read(file) == table


@pytest.mark.parametrize(
    ("dtype", "shared"), [("bfloat16", ("bfloat16", "float16")), ("float32", ("float32",))], ids=["bf16", "fp32"]
)
def test_types_of_one_size_share_a_table(dtype, shared):
    assert make_table(dataclasses.replace(RESULT, dtype=dtype), source="here").dtypes == shared
