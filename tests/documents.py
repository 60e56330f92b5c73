"""Running what the documents show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.cli.conftest import clean_environment

ROOT = Path(__file__).resolve().parents[1]


def run(*command: object, folder: Path, timeout: float = 200) -> str:
    """Run a command in a folder, as from a fresh shell, and return what it printed. It must succeed."""
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_pytest(*arguments: object, folder: Path) -> str:
    # The plugin is named: its entry point is there in an installed package only.
    plugin = ("-p", "graphfuse.testing.pytest_plugin") if not _installed() else ()
    return run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin, *arguments, folder=folder)


def _installed() -> bool:
    from importlib.metadata import entry_points

    return bool(list(entry_points(group="pytest11", name="graphfuse")))
