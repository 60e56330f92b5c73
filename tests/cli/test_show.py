"""A report as a page in a file."""

from __future__ import annotations

import pytest

from graphfuse.cli.show import write_page
from graphfuse.errors import ConfigError
from graphfuse.report import Report


def test_a_page_is_written_and_the_file_named(tmp_path, capsys):
    write_page(Report(), tmp_path / "page.html", "A model")
    assert "<title>A model</title>" in (tmp_path / "page.html").read_text()
    assert capsys.readouterr().err == f"Report page: {tmp_path / 'page.html'}\n"


@pytest.mark.parametrize("name", ["", "missing/page.html", "\0"])
def test_a_page_that_cannot_be_written_is_an_error(tmp_path, name):
    with pytest.raises(ConfigError, match=r"The page cannot be written: .*Give another file"):
        write_page(Report(), tmp_path / name, "A model")
