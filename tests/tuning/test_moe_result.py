"""A result file of MoE layers says what was measured and what it comes to, and names the key where it is damaged."""

import json
import math
import re

import pytest

from graphfuse.errors import ConfigError, SchemaError
from graphfuse.tuning.moe_peers import Peers
from graphfuse.tuning.moe_result import Result
from graphfuse.tuning.moe_text import HEADER, absent_lines, line, shape_line, summary_lines
from tests.documents import ROOT
from tests.tuning.moe_results import DEEPSEEK, QWEN, result, row

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("moe_*.json"))


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_the_results_of_the_repository_follow_the_schema_and_hold_their_own_summary(file):
    read = Result.read(file)
    assert read.rows and json.loads(file.read_text())["summary"] == read.summary()


def test_a_written_result_is_read_back_equal(tmp_path):
    written = result(row(1, tuned=8.0, heuristic=9.0), row(2, "deepseek", tuned=9.0), shapes=(QWEN, DEEPSEEK))
    file = tmp_path / "new" / "result.json"
    written.write(file)
    assert Result.read(file) == written
    assert sum('"us"' in line for line in file.read_text().splitlines()) == 2, "one line a row"
    assert json.loads(file.read_text())["kind"] == "moe"


def test_ratios_are_geometric_means_apart_for_few_and_many_tokens_with_the_worst_point():
    found = result(
        row(1, tuned=10.0, grouped_mm=40.0, floor=5.0),
        row(512, tuned=10.0, grouped_mm=10.0, floor=5.0),
        row(8192, tuned=100.0, grouped_mm=150.0, floor=80.0),
    ).summary()["qwen"]
    assert found["against"] == {
        "grouped_mm": {
            "up_to_512_tokens": 2.0,
            "above_512_tokens": 1.5,
            "worst": {"tokens": 512, "ratio": 1.0},
        }
    }, "nothing is said about what was not measured"
    assert found["over_floor"] == pytest.approx((2 * 2 * 1.25) ** (1 / 3), abs=1e-3)


def test_a_shape_of_which_nothing_ran_has_no_figures():
    assert result(row(1, grouped_mm=4.0)).summary()["qwen"] == {"against": {}, "over_floor": None}


GOOD = {
    "shape": "qwen", "tokens": 1, "us": {"tuned": 1}, "spread": {}, "error": {}, "experts_touched": 8, "floor_us": 1,
    "tuned_by": "heuristic",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "allreduce"}, "the key kind is 'allreduce', not 'moe'"),
        ({"schema": 7}, "the key schema is 7"),
        ({"rows": []}, "the key rows is an empty list"),
        ({"extra": 1}, "the key extra is not known"),
        ({"rows": [GOOD | {"shape": "llama"}]}, "rows[0].shape is none of the shapes"),
        ({"rows": [GOOD | {"tokens": 0}]}, "rows[0].tokens is 0, which is not above zero"),
        ({"rows": [GOOD | {"us": {"tuned": "fast"}}]}, "us.tuned is 'fast'"),
        ({"rows": [GOOD | {"floor_us": 0}]}, "floor_us is 0, which is not above zero"),
        ({"rows": [GOOD | {"error": {"tuned": math.nan}}]}, "error.tuned is nan, which is not a finite number"),
        ({"rows": [GOOD | {"us": {"tuned": 1e-320}}]}, "us.tuned is 1e-320, which is no time of a call"),
        ({"versions": {"torch": 2}}, "versions.torch is 2, which is not a string or null"),
        ({"shapes": [{"name": "qwen"}]}, "shapes[0].experts is missing"),
    ],
    ids=[
        "kind",
        "schema",
        "empty",
        "unknown",
        "shape",
        "tokens",
        "text",
        "floor",
        "error",
        "no time",
        "version",
        "no sizes",
    ],
)
def test_a_damaged_result_names_the_key(tmp_path, change, message):
    file = tmp_path / "result.json"
    result(row(1, tuned=8.0)).write(file)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(SchemaError, match=re.escape(message)):
        Result.read(file)


def test_a_result_that_cannot_be_written_is_an_error_that_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="The result cannot be written"):
        result(row(1)).write(tmp_path / "file" / "result.json")


def test_a_line_of_text_has_the_rates_of_what_is_tuned():
    # 8192 tokens are 309.2 GFLOP and, with 8 experts touched, 37.7 + 67.1 MB.
    text = line(row(8192, tuned=500.0, grouped_mm=800.0, floor=391.4), QWEN)
    assert text.split() == ["8192", "8.0", "500.0", "-", "800.0", "-", "391.4", "618.5", "210", "E=128,N=384.json"]
    assert len(HEADER.split("  tuned by")[0]) == len(text.split("  E=")[0])
    assert line(row(1, heuristic=3.0), QWEN).split() == ["1", "8.0", "-", "3.0", "-", "-", "10.0"]


def test_shapes_reasons_and_summary_in_words():
    found = result(row(1, tuned=10.0, heuristic=12.0, floor=8.0), shapes=(QWEN, DEEPSEEK))
    assert shape_line(QWEN) == "qwen: E=128, N=384, H=2048, top-8, bf16, served by E=128,N=384.json"
    assert absent_lines(found) == ["not measured, or not everywhere: flashinfer of qwen: not installed"]
    assert summary_lines(found) == [
        "qwen: tuned against heuristic 1.20x up to 512 tokens, worst 1.20x at 1 tokens; 1.25 times the floor "
        "(geometric means)"
    ]


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "peers").glob("*.json")), ids=lambda file: file.stem)
def test_recorded_figures_of_peers_follow_their_schema(file):
    read = Peers.read(file)
    assert read.peer and min(read.us.values()) > 1
    for (key, tokens), us in read.us.items():
        more = read.us.get((key, 8192))
        assert tokens == 8192 or (more is not None and us < more), "few tokens never take longer than many"


def test_a_damaged_file_of_figures_names_the_key(tmp_path):
    file = tmp_path / "peers.json"
    file.write_text(json.dumps({"schema": 1, "peer": "peer", "rows": [{"experts": 8, "us": 1}]}))
    with pytest.raises(SchemaError, match=re.escape("rows[0].intermediate_size is missing")):
        Peers.read(file)
