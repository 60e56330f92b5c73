"""A measurement of generation: its statistics, its file, its tables and its picture."""

from __future__ import annotations

import json

import pytest

from graphfuse.errors import ConfigError
from graphfuse.tuning import generate_plot, generate_result, generate_text
from graphfuse.tuning.generate_meters import Busy
from graphfuse.tuning.generate_plan import FUSED, UNFUSED
from graphfuse.tuning.generate_result import percentile, ratio, rounded
from tests.tuning.generate_results import result, row


@pytest.mark.parametrize(
    ("values", "percent", "found"),
    [
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([4.0, 1.0, 3.0, 2.0], 50, 2.0),
        ([1.0], 99, 1.0),
        (list(range(1, 101)), 99, 99),
        (list(range(1, 102)), 99, 100),
        (list(range(1, 11)), 99, 10),
    ],
)
def test_percentiles_are_values_that_were_measured(values, percent, found):
    assert percentile(values, percent) == found


def test_a_row_is_the_median_of_medians():
    found = row(FUSED, [1.0, 2.0, 2.0, 9.0], [4.0] * 4, [3.0] * 4)
    assert found.tpot_ms_rounds == pytest.approx([2.0, 4.0, 3.0])
    assert found.tpot_ms == pytest.approx(3.0)
    assert found.tpot_ms_p99 == pytest.approx(9.0)
    assert found.tokens_per_s == pytest.approx(4 / 3e-3)
    assert (found.ttft_ms_p50, found.ttft_ms_p99) == pytest.approx((200.0, 400.0))
    assert found.prefill_tokens_per_s == pytest.approx(4 * 100 / 0.4)
    assert found.roofline_ms == pytest.approx(1.0) and found.roofline_share == pytest.approx(1 / 3)
    assert (found.first_step_ms, found.context, found.busy_share) == (500.0, 105.0, None)


def test_energy_is_of_all_tokens_of_the_timed_steps_and_unknown_unless_every_round_knows_it():
    assert row(FUSED, [1.0], [1.0], [1.0], joules=(16.0, 32.0, 48.0)).joules_per_token == pytest.approx(32 / (4 * 4))
    assert row(FUSED, [1.0], [1.0], joules=(16.0, None)).joules_per_token is None
    assert row(FUSED, [1.0]).joules_per_token is None


def test_what_the_profiler_saw_joins_the_row():
    plain = row(FUSED, [2.0])
    assert plain.with_busy(None) is plain
    seen = plain.with_busy(Busy(0.97, 1.9, 2.1, 500.0))
    assert (seen.busy_share, seen.kernel_ms, seen.profiled_step_ms, seen.kernels) == (0.97, 1.9, 2.1, 500.0)
    assert seen.tpot_ms == plain.tpot_ms


def test_ratios_are_of_rounds_beside_each_other():
    assert ratio([3.0, 3.0, 4.0], [2.0, 3.0, 1.0]) == {"median": 1.5, "min": 1.0, "max": 4.0}
    found = result().ratios
    assert found["batch 4"] == pytest.approx({"median": 1.5, "min": 1.2, "max": 2.0})
    assert found["offline"] == pytest.approx({"median": 1.75, "min": 1.5, "max": 2.0})


def test_one_variant_has_no_ratios():
    found = result()
    found.rows, found.offline = found.rows[:1], found.offline[1:]
    assert found.ratios == {}


def test_an_offline_load_counts_tokens_in_and_out():
    load = result().offline[0]
    assert load.total_tokens_per_s == pytest.approx(10 * 8 / 1.5)
    assert load.output_tokens_per_s == pytest.approx(10 * 3 / 1.5)


def test_the_load_is_not_of_the_cold_start():
    assert result().cold_start[FUSED].total_s == 1.0 + 6.0 + 2.0 + 0.5


def test_numbers_have_five_digits():
    assert rounded({"a": [1.234567, 123456.7], "b": None, "c": 1234567}) == {
        "a": [1.2346, 123460.0], "b": None, "c": 1234567,
    }  # fmt: skip


def test_the_file_has_a_line_for_each_row_and_says_what_it_documents(tmp_path):
    file = tmp_path / "new" / "result.json"
    result().write(file)
    data = json.loads(file.read_text())
    assert (data["schema"], data["kind"], data["host"], data["model"]) == (1, "generate", "2x CPU", "tiny")
    assert sum('"tpot_ms"' in line for line in file.read_text().splitlines()) == 2
    assert data["ratios"]["batch 4"]["median"] == 1.5
    assert data["cold_start"][FUSED]["total_s"] == 9.5
    assert data["offline"][0]["total_tokens_per_s"] == 53.333
    documented = str(generate_result.__doc__)
    for key in (*data, *data["rows"][0], *data["cold_start"][FUSED], *data["offline"][0]):
        assert f'"{key}"' in documented


def test_a_file_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        result().write(tmp_path / "file" / "result.json")


def test_the_tables(capsys):
    found = result()
    found.rows[0] = found.rows[0].with_busy(Busy(0.973, 1.9, 2.1, 500.0))
    found.notes.append("The time limit of 9 s ended the measurement before batch 8.")
    generate_text.show(found)
    printed = capsys.readouterr().out
    for text in (
        "decoding behind prompts of 100 tokens", "2.000", "97.3 %", "1.500x (1.200 … 2.000)", "50 %",
        "10 prompts at once, 5 tokens in and 3 out", "1.750x (1.500 … 2.000)", "9.50",
        "fused: 97 all-reduces, 97 fused, 0 merged", "there is no size table for this host", "before batch 8.",
    ):  # fmt: skip
        assert text in printed


def test_a_result_without_rows_has_its_cold_start(capsys):
    found = result()
    found.rows, found.offline = [], []
    generate_text.show(found)
    assert "cold start, s" in capsys.readouterr().out


def test_the_picture_has_a_line_for_each_variant_and_the_roofline():
    times, rates = generate_plot.draw(result()).axes
    lines = {line.get_label(): [round(float(y), 6) for y in line.get_ydata()] for line in times.get_lines()}
    assert lines == {FUSED: [2.0], UNFUSED: [3.0], "roofline": [1.0]}
    assert [float(line.get_ydata()[0]) for line in rates.get_lines()] == pytest.approx([4 / 3e-3, 2000.0, 4000.0])


def test_a_picture_of_no_rows_is_empty(tmp_path):
    found = result()
    found.rows = []
    generate_plot.plot(found, tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 0
