"""The picture of a measurement: a panel for each hidden size, a line for each candidate, the link's floor dashed."""

import pytest

from graphfuse.errors import ConfigError
from graphfuse.tuning.allreduce_candidates import BENCHED
from graphfuse.tuning.allreduce_plot import COLOUR_OF, draw, plot
from graphfuse.tuning.allreduce_result import Result, Row


def result():
    rows = [
        Row(tokens, hidden, {**dict.fromkeys(BENCHED, 10.0 * tokens), "link": 0.1 * tokens})
        for hidden in (4096, 2048)
        for tokens in (1, 64)
    ]
    rows[0].us.pop("sequence_parallel")
    return Result("what", "2x GPU", "GPU", 2, "bfloat16", "links", 392.0, {}, "today", "how", {}, tuple(rows))


def test_each_candidate_is_a_line_of_its_own_colour_in_each_panel():
    panels = draw(result()).axes
    assert [panel.get_title() for panel in panels] == ["hidden size 2,048", "hidden size 4,096"]
    for panel in panels:
        lines = {line.get_label(): line for line in panel.lines}
        assert set(lines) == {*BENCHED, "link's floor"}
        assert lines["link's floor"].get_linestyle() == "--"
        assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
    assert len(set(COLOUR_OF.values())) == len(BENCHED)


def test_a_size_that_was_not_measured_is_no_point():
    wide = draw(result()).axes[1]
    points = {line.get_label(): list(line.get_xdata()) for line in wide.lines}
    assert points["sequence_parallel"] == [64]
    assert points["unfused"] == [1, 64]


def test_every_measured_time_is_within_the_picture():
    bottom, top = draw(result()).axes[0].get_ylim()
    assert bottom < 10 and top > 640


@pytest.mark.parametrize("name", ["plot.png", "plot.svg"])
def test_it_is_drawn_into_a_new_folder(tmp_path, name):
    plot(result(), tmp_path / "new" / name)
    assert (tmp_path / "new" / name).stat().st_size > 1000


def test_a_file_that_cannot_be_written_is_an_error_that_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="The plot cannot be written"):
        plot(result(), tmp_path / "file" / "plot.png")
