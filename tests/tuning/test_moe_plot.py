"""The picture of MoE layers: a panel for each shape, a line for each candidate, the floor dashed, peers as crosses."""

import pytest

from graphfuse.errors import ConfigError
from graphfuse.tuning.moe_plot import COLOUR_OF, draw, plot
from graphfuse.tuning.moe_result import CANDIDATES
from tests.tuning.moe_results import DEEPSEEK, QWEN, peers, result, row


def measured():
    us = dict.fromkeys(CANDIDATES, 20.0)
    rows = [row(tokens, shape, **us) for shape in ("qwen", "deepseek") for tokens in (64, 1)]
    rows[-1].us.pop("grouped_mm")
    return result(*rows, shapes=(QWEN, DEEPSEEK))


def lines_of(panel):
    return {line.get_label(): line for line in panel.lines}


def test_each_candidate_is_a_line_of_its_own_colour_in_each_panel():
    panels = draw(measured()).axes
    assert [panel.get_title() for panel in panels] == ["qwen", "deepseek"]
    for panel in panels:
        lines = lines_of(panel)
        assert set(lines) == {*CANDIDATES, "floor"}
        assert lines["floor"].get_linestyle() == "--"
        assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
    assert set(COLOUR_OF) == set(CANDIDATES) and len(set(COLOUR_OF.values())) == len(CANDIDATES)


def test_points_are_by_rising_tokens_and_what_was_not_measured_is_none():
    lines = lines_of(draw(measured()).axes[1])
    assert list(lines["tuned"].get_xdata()) == [1, 64]
    assert list(lines["grouped_mm"].get_xdata()) == [64]


def test_recorded_figures_are_crosses_where_there_are_any():
    qwen, deepseek = draw(measured(), peers((QWEN, 1, 27.3), (QWEN, 8, 78.0))).axes
    recorded = lines_of(qwen)["peer 1.0, recorded"]
    assert (list(recorded.get_xdata()), list(recorded.get_ydata())) == ([1], [27.3])
    assert recorded.get_marker() == "x" and "peer 1.0, recorded" not in lines_of(deepseek)
    assert "peer 1.0, recorded" in [text.get_text() for text in qwen.get_legend().get_texts()]


def test_it_is_drawn_into_a_new_folder(tmp_path):
    plot(measured(), tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").stat().st_size > 1000


def test_a_file_that_is_no_picture_is_an_error_that_says_so(tmp_path):
    with pytest.raises(ConfigError, match="does not name a picture"):
        plot(measured(), tmp_path / "plot.txt")
