"""The command line as a user runs it: in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.generation.conftest import checkpoint  # noqa: F401  (the same tiny Llama)

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "graphfuse.cli.main"]


def clean_environment(**variables: str) -> dict[str, str]:
    """As a fresh shell: not that of a rank, which some test before may have left behind."""
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    inherited = {k: v for k, v in os.environ.items() if k not in ours}
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return {**inherited, "PYTHONPATH": path, **variables}


@pytest.fixture
def graphfuse():
    """Runs `graphfuse ARGUMENTS` to its end."""

    def run(*arguments: object, **variables: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*COMMAND, *map(str, arguments)],
            env=clean_environment(**variables),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    return run
