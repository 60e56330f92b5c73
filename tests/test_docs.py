"""The Python under docs/ runs as it stands, with a tiny model in place of the checkpoint and without a group."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documents import ROOT
from tests.generation.conftest import checkpoint  # noqa: F401  (the tiny Llama)

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(path, code) for path in sorted((ROOT / "docs").glob("*.md")) for code in BLOCK.findall(path.read_text())]


@pytest.mark.parametrize(("path", "code"), BLOCKS, ids=[path.name for path, _ in BLOCKS])
def test_it_runs(path: Path, code: str, checkpoint, capsys):  # noqa: F811
    code = code.replace("path/to/checkpoint", str(checkpoint))
    exec(compile(code, path, "exec"), {"tp_group": None})
    assert capsys.readouterr().out.strip(), "it prints what it shows"
