"""`graphfuse models` prints what each family says of itself; the registry is the only list."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from graphfuse.cli.main import app
from graphfuse.models.causal_lm import CausalLM
from graphfuse.models.registry import FAMILIES, families


def subclasses(kind):
    for model in kind.__subclasses__():
        yield model
        yield from subclasses(model)


def test_every_family_says_what_it_is_and_serves_some_config():
    ours = {model for model in subclasses(CausalLM) if model.__module__.startswith("graphfuse.models")}
    assert ours == set(FAMILIES.values())
    for model in ours:
        about = vars(model)["about"]  # its own, not that of the family it is built on
        assert about.name and about.architectures and about.attention and about.moe and about.formats
    assert sorted(kind for _, kinds in families() for kind in kinds) == sorted(FAMILIES)


def test_the_table_has_a_line_for_each_family():
    printed = CliRunner().invoke(app, ["models"])
    assert printed.exit_code == 0
    lines = printed.stdout.splitlines()
    for about, _ in families():
        (line,) = (line for line in lines if line.count("|") > 1 and line.split("|")[1].strip() == about.name)
        assert about.architectures[0] in line and ", ".join(about.formats) in line and about.tested_against in line
    assert max(map(len, lines)) > 120, "a pipe is as wide as the table"
    assert "MXFP4" in printed.stdout


def test_the_table_as_json_has_the_types_of_config():
    rows = json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)
    (oss,) = (row for row in rows if row["model_types"] == ["gpt_oss"])
    assert oss["architectures"] == ["GptOssForCausalLM"] and "sinks" in oss["attention"]
