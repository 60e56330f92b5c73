"""The bounds of MoE kernels, on made-up results."""

from dataclasses import replace

import pytest

from benchmarks.moe_acceptance import PEERS, Point, main, points_of, report
from graphfuse.tuning.moe_peers import Peers
from tests.tuning.moe_results import DEEPSEEK, QWEN, peers, result, row


def marks(row, peer=None, shape=QWEN):
    lines, _ = report([Point(row, shape, peer)])
    return lines[2].split()[0]


@pytest.mark.parametrize(
    ("tokens", "us", "peer", "mark"),
    [
        (8, 20.0, 26.0, "+"),  # 26 / 1.3
        (8, 20.1, 26.0, "!"),
        (8, 15.5, 13.0, "+"),  # 1.15 x 10 + 4
        (8, 15.6, 13.0, "!"),
        (1, 15.5, None, "+"),
        (1, 15.6, None, "."),  # the peer, if it were known, might be slow
        (16, 20.0, 20.0, ".+"),
        (512, 20.1, 20.0, ".!"),
        (512, 10.8, 10.0, ".+"),  # 1.08 x 10
        (512, 10.9, 10.0, ".!"),
        (1024, 20.0, 22.0, "..+"),  # 22 / 1.1
        (1024, 20.1, 22.0, "..!"),
        (2048, 20.0, None, "..."),
    ],
)
def test_time_is_bounded_by_the_peer_or_the_floor(tokens, us, peer, mark):
    assert marks(row(tokens, floor=10.0, tuned=us), peer).startswith(mark)


def test_no_alternative_of_the_same_run_is_faster_by_more_than_three_percent():
    assert marks(row(2, tuned=10.29, heuristic=10.0, grouped_mm=50.0))[3] == "+"
    assert marks(row(2, tuned=10.31, heuristic=50.0, grouped_mm=10.0))[3] == "!"
    assert marks(row(2, tuned=10.0))[3] == ".", "nothing was measured beside it"


def test_bf16_of_8192_tokens_is_faster_than_grouped_products_by_a_tenth():
    assert marks(row(8192, tuned=100.0, grouped_mm=110.1))[4] == "+"
    assert marks(row(8192, tuned=100.0, grouped_mm=109.9))[4] == "!"
    assert marks(row(4096, tuned=100.0, grouped_mm=100.0))[4] == "."
    assert marks(row(8192, "deepseek", tuned=100.0, grouped_mm=100.0), shape=DEEPSEEK)[4] == "."


def test_block_fp8_of_8192_tokens_reaches_450_teraflops():
    # 6 x 8192 x 8 x 256 x 7168 = 721.6 GFLOP: 1,603 µs
    assert marks(row(8192, "deepseek", tuned=1603.0), shape=DEEPSEEK)[5] == "+"
    assert marks(row(8192, "deepseek", tuned=1604.0), shape=DEEPSEEK)[5] == "!"
    assert marks(row(8192, tuned=1e6))[5] == "."


def test_a_report_counts_what_holds_and_names_what_does_not():
    found = result(
        row(1, tuned=12.0, heuristic=12.0), row(8, tuned=33.0, heuristic=33.0), row(16, grouped_mm=1.0),
        row(8192, "deepseek", tuned=1000.0), shapes=(QWEN, DEEPSEEK),
    )  # fmt: skip
    points = points_of(found, peers((QWEN, 1, 20.0), (QWEN, 8, 39.0)))
    assert [(point.shape.name, point.row.tokens, point.peer_us) for point in points] == [
        ("qwen", 1, 20.0), ("qwen", 8, 39.0), ("deepseek", 8192, None),
    ], "of 16 tokens nothing tuned was measured"  # fmt: skip
    lines, fine = report(points)
    assert not fine
    text = "\n".join(lines)
    assert "1. up to 8 tokens: time ≤ max(peer / 1.3, 1.15 floor + 4 µs): 1 of 2 hold" in text
    assert "qwen at 8 tokens: 10.0 % beyond" in text
    assert "6. block FP8 at 8192 tokens: at least 450 TFLOP/s: 1 of 1 hold" in text
    assert report(points[:1])[1], "what holds everywhere is fine"


def test_the_script_reads_files_and_tells_by_its_exit_code(tmp_path, capsys):
    file = tmp_path / "result.json"
    result(row(1, tuned=20.9)).write(file)
    assert main([str(file)]) == 0, "the recorded peer takes 27.29 µs"
    result(row(1, tuned=2100.0)).write(file)
    assert main([str(file)]) == 1
    assert "0 of 1 hold" in capsys.readouterr().out


def test_the_recorded_peer_has_the_shapes_that_are_measured():
    from graphfuse.tuning.moe_bench import benched_shapes

    recorded = {key for key, _ in Peers.read(PEERS).us}
    found = {
        name
        for name, w in benched_shapes().items()
        if (w.shape.num_experts, w.shape.intermediate_size, w.shape.hidden_size, w.shape.top_k, w.form) in recorded
    }
    assert len(recorded) == 6 and set(benched_shapes()) - found == {
        "deepseek-v3-tp2-fp8_block", "gpt-oss-120b-tp2-bf16",
    }, "of these nothing is recorded"  # fmt: skip


def test_where_nothing_tuned_was_timed_the_bounds_are_not_kept(tmp_path, capsys):
    file = tmp_path / "result.json"
    broken = replace(QWEN, absent={"tuned": "At 8 tokens: its result is wrong by 1.0e+00"})
    result(row(1, tuned=20.9), row(8, grouped_mm=100.0), shapes=(broken,)).write(file)
    assert main([str(file)]) == 1
    assert "qwen at 8 tokens: nothing tuned was timed: At 8 tokens: its result is wrong" in capsys.readouterr().out
