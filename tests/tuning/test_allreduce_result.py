"""A result file says what was measured, what it comes to, and names the key where it is damaged."""

import json
import math
import re

import pytest

from graphfuse.errors import ConfigError, SchemaError
from graphfuse.tuning.allreduce_result import Result, Row
from graphfuse.tuning.allreduce_text import Columns, summary_lines
from graphfuse.tuning.measured import spread
from tests.documents import ROOT

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("allreduce_h*.json"))


def result(*rows):
    return Result(
        "what", "2x GPU", "GPU", 2, "bfloat16", "links", 392.0, {"torch": "2"}, "today", "how", {"a": "b"}, rows
    )


def row(tokens, hidden=4096, **us):
    return Row(tokens, hidden, {name.replace("__", "/"): t for name, t in us.items()}, {"unfused": 0.01}, "reference")


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_the_results_of_the_repository_follow_the_schema_and_hold_their_own_summary(file):
    read = Result.read(file)
    assert read.rows and json.loads(file.read_text())["summary"] == read.summary()


def test_a_written_result_is_read_back_equal(tmp_path):
    written = result(row(1, unfused=8.0, dispatched=4.0), row(2, unfused=9.0))
    file = tmp_path / "new" / "result.json"
    written.write(file)
    assert Result.read(file) == written
    assert sum('"us"' in line for line in file.read_text().splitlines()) == 2, "one line a row"


def test_ratios_are_geometric_means_apart_for_small_and_large_messages_with_the_worst_point():
    found = result(
        row(1, unfused=8.0, dispatched=4.0),
        row(1024, unfused=32.0, dispatched=4.0),
        row(2048, unfused=30.0, dispatched=20.0),
    ).summary()["against"]["unfused"]
    assert found == {
        "up_to_1024_tokens": 4.0,
        "above_1024_tokens": 1.5,
        "worst": {"hidden": 4096, "tokens": 2048, "ratio": 1.5},
    }


def test_torch_is_compared_by_the_faster_of_its_two_kernels():
    found = result(row(1, torch__one_shot=9.0, torch__two_shot=6.0, dispatched=4.0)).summary()["against"]
    assert found["torch"]["worst"]["ratio"] == 1.5
    assert set(found) == {"torch"}, "nothing is said about what was not measured"


def test_the_time_over_the_links_floor_is_the_worst_of_large_messages_by_hidden_size():
    found = result(
        row(1, dispatched=4.0, link=0.1),
        row(8192, dispatched=110.0, link=100.0),
        row(16384, dispatched=210.0, link=200.0),
        row(8192, hidden=7168, dispatched=120.0, link=100.0),
    ).summary()
    assert found["over_link"] == {"4096": 1.1, "7168": 1.2}


def test_spread_is_half_the_range_of_the_middle_half():
    assert spread([10.0] * 9) == 0
    assert spread([1, 9, 9, 10, 10, 10, 11, 11, 99]) == 0.1, "one odd round at either end does not count"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 7}, "the key schema is 7"),
        ({"rows": []}, "the key rows is an empty list"),
        ({"extra": 1}, "the key extra is not known"),
        (
            {"rows": [{"tokens": 0, "hidden": 8, "us": {}, "spread": {}, "dispatched": None}]},
            "tokens is 0, which is not",
        ),
        (
            {"rows": [{"tokens": 1, "hidden": 8, "us": {"a": 0}, "spread": {}, "dispatched": None}]},
            "us.a is 0, which is not above zero",
        ),
        (
            {"rows": [{"tokens": 1, "hidden": 8, "us": {"a": 1}, "spread": {"a": math.inf}, "dispatched": None}]},
            "spread.a is inf, which is not a finite number",
        ),
        ({"versions": {"torch": 2}}, "versions.torch is 2, which is not a string or null"),
        ({"world_size": -2}, "world_size is -2, which is not above zero"),
        (
            {"rows": [{"tokens": 1, "hidden": 8, "us": {"a": "fast"}, "spread": {}, "dispatched": None}]},
            "us.a is 'fast'",
        ),
    ],
    ids=["schema", "empty", "unknown", "no tokens", "no time", "spread", "version", "no ranks", "text"],
)
def test_a_damaged_result_names_the_key(tmp_path, change, message):
    file = tmp_path / "result.json"
    result(row(1, unfused=8.0)).write(file)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(SchemaError, match=re.escape(message)):
        Result.read(file)


def test_a_result_that_cannot_be_written_is_an_error_that_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="The result cannot be written"):
        result(row(1)).write(tmp_path / "file" / "result.json")


def test_a_line_of_text_has_the_rate_and_ratio_of_what_serves():
    columns = Columns(("unfused", "symm_mem/one_shot", "dispatched"), itemsize=2)
    line = columns.line(row(1024, unfused=60.0, symm_mem__one_shot=31.0, dispatched=30.0, link=21.4))
    assert line.split() == ["1024", "4096", "60.0", "31.0", "30.0", "21.4", "279.6", "2.00x", "reference"]
    tuned = columns.line(row(1024, unfused=62.0, symm_mem__one_shot=31.0))
    assert tuned.split() == ["1024", "4096", "62.0", "31.0", "-", "-", "270.6", "2.00x", "symm_mem/one_shot"]
    assert columns.header().split()[:6] == ["tokens", "hidden", "unfused", "symm_mem/one_shot", "dispatched", "link"]


def test_the_summary_in_words():
    lines = summary_lines(result(row(8192, unfused=200.0, dispatched=100.0, link=90.0)))
    assert lines == [
        "dispatched against unfused: 2.00x above 1024 tokens (geometric means); "
        "worst 2.00x at 8192 tokens of hidden size 4096",
        "dispatched over the link's floor, worst from 8192 tokens: 1.11 at hidden size 4096",
    ]
