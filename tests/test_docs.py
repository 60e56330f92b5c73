"""What the documents show is so. Python under docs/ runs as it stands, with a tiny model in place of the checkpoint and
without a group, and prints what is shown behind it; commands are known to the command line, with all their options.

Other tests look after README.md (test_readme.py), the worked example of CONTRIBUTING.md (test_contributing.py), the
demo of docs/quick-start.md (test_quick_start.py), the config in docs/moe.md (tuning/test_moe_reading.py), and the
messages in docs/reliability.md (failures/).
"""

from __future__ import annotations

import re
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import typer

from graphfuse.cli.main import app
from tests.cli.conftest import graphfuse  # noqa: F401
from tests.documents import ROOT
from tests.generation.conftest import checkpoint  # noqa: F401  (the tiny Llama)

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
EXAMPLES = [
    pytest.param(path, code, shown, id=path.name)
    for path in sorted((ROOT / "docs").glob("*.md"))
    for code, shown in EXAMPLE.findall(path.read_text())
]


@pytest.mark.parametrize(("path", "code", "shown"), EXAMPLES)
def test_it_runs(path: Path, code: str, shown: str, checkpoint, capsys, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    code = code.replace("path/to/checkpoint", str(checkpoint))
    module: Any = types.ModuleType("documented")  # Dynamo looks there for what a forward names
    module.tp_group = None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, path, "exec"), module.__dict__)
    printed = capsys.readouterr().out
    assert printed.strip(), "it prints what it shows"
    parts = [part.strip("\n") for part in re.split(r"^…$", shown, flags=re.MULTILINE)]
    assert all(part in printed for part in parts), printed
    if "…" not in shown and shown:
        assert printed == shown


TESTED_ELSEWHERE = {"README.md", "CONTRIBUTING.md"}


def test_every_block_is_of_a_kind_that_is_tested():
    for path in DOCUMENTS:
        if path.name in TESTED_ELSEWHERE:
            continue
        text = path.read_text()
        shown = {output for _, output in EXAMPLE.findall(text)}
        for language, block in BLOCK.findall(text):
            if language == "text":
                elsewhere = path.name in ("quick-start.md", "reliability.md")
                assert block in shown or elsewhere, f"{path.name}: no Python prints\n{block}"
            elif language == "json":
                assert path.name == "moe.md"
            elif language:
                assert language in ("python", "sh"), f"{path.name}: {language}"


LINES = [
    pytest.param(line, id=f"{path.name}: {line[:50].strip()}")
    for path in DOCUMENTS
    for language, block in BLOCK.findall(path.read_text())
    for line in block.replace("\\\n", " ").splitlines()
    if language == "sh"
]
MODULE = "-m graphfuse.cli.main "


@pytest.mark.parametrize("line", LINES)
def test_a_command_is_there_with_its_options(line):
    if line.startswith("make "):
        assert re.search(rf"^{line.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    words = shlex.split(line, comments=True)
    if line.startswith("graphfuse ") or MODULE in line:
        known_to_the_command_line(shlex.split(line.rpartition(MODULE)[2].removeprefix("graphfuse "), comments=True))
        return
    program = next(word for word in words if "=" not in word)
    assert program.rpartition("/")[2] in ("python", "torchrun", "pip"), line
    for word in words:
        if word.endswith(".py") or word.startswith("tests/"):
            assert (ROOT / word).exists(), word


def known_to_the_command_line(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", ()):
        command = command.commands[words.pop(0)]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert not hasattr(command, "commands"), "it names no command"
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options


RUN = ("explain", "profile", "doctor", "models")
"""Commands that neither measure a GPU nor are tested as documented elsewhere."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", [line for line in LINES if str(line.values[0]).split()[1:2] in [[name] for name in RUN]]
)
def test_a_command_runs(line, graphfuse, checkpoint, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    for folder in ("configs", "my/configs", "tuned/moe"):
        (tmp_path / folder).parent.mkdir(exist_ok=True)
        (tmp_path / folder).symlink_to(ROOT / "configs" / ("" if folder == "configs" else "moe"))
    _, *words = shlex.split(line, comments=True)
    words = [str(checkpoint) if word in ("DIR", "path/to/checkpoint") else word for word in words]
    words = ["2" if before == "--tp" else word for before, word in zip(["", *words], words, strict=False)]
    words = ["8" if before == "--input-len" else word for before, word in zip(["", *words], words, strict=False)]
    done = graphfuse(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
