"""The Python under docs/ runs as it stands, with a tiny model in place of the checkpoint and without a group. Commands
there and in README.md are known to the command line, with all their options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from graphfuse.cli.main import app
from tests.documents import ROOT
from tests.generation.conftest import checkpoint  # noqa: F401  (the tiny Llama)

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(path, code) for path in sorted((ROOT / "docs").glob("*.md")) for code in BLOCK.findall(path.read_text())]


@pytest.mark.parametrize(("path", "code"), BLOCKS, ids=[path.name for path, _ in BLOCKS])
def test_it_runs(path: Path, code: str, checkpoint, capsys, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    code = code.replace("path/to/checkpoint", str(checkpoint))
    exec(compile(code, path, "exec"), {"tp_group": None})
    assert capsys.readouterr().out.strip(), "it prints what it shows"


SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = [
    pytest.param(line, id=f"{path.name}: {line[10:50].strip()}")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for block in SHELL.findall(path.read_text())
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("graphfuse ")
]


@pytest.mark.parametrize("line", COMMANDS)
def test_the_command_line_knows(line):
    _, *words = shlex.split(line, comments=True)
    command: Any = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", ()):
        command = command.commands[words.pop(0)]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert not hasattr(command, "commands"), f"{line} names no command"
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options
