"""`graphfuse generate --tp 2`: whatever ends it, no process is left, and one line says why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import contextmanager, suppress

import psutil
import pytest

from tests.cli.conftest import COMMAND, clean_environment


@contextmanager
def generating(checkpoint, folder, until):
    """The command on a long file, and its ranks, once `until` holds."""
    (folder / "in.jsonl").write_text("".join(json.dumps({"id": i, "prompt": "The"}) + "\n" for i in range(5000)))
    command = [
        *COMMAND,
        "generate",
        "--model",
        str(checkpoint),
        "--tp",
        "2",
        "--device",
        "cpu",
        "--max-batch-size",
        "1",
    ]
    command += ["--input", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl"), "--max-new-tokens", "60"]
    # A session of its own stands for the terminal: Ctrl-C reaches the process in front, not the ranks.
    with subprocess.Popen(
        command, env=clean_environment(), start_new_session=True, stderr=subprocess.PIPE, text=True
    ) as process:
        parent, family = psutil.Process(process.pid), []
        try:
            while process.poll() is None and not until(family):
                psutil.wait_procs([parent], timeout=0.05)
                family = parent.children(recursive=True)
            assert process.poll() is None, process.stderr.read()
            family.sort(key=lambda child: child.pid)
            yield process, ranks_of(family), family
        finally:
            for child in (*family, parent):
                if child.is_running():
                    child.kill()


def ranks_of(family):
    found = []
    for child in family:
        with suppress(psutil.Error):  # it has gone, or has not become another program yet
            found += [child] if "graphfuse.cli.main" in child.cmdline() else []
    return found


def ended(process, family):
    """What it said; all of its processes are gone."""
    _, errors = process.communicate(timeout=30)
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    assert "Traceback" not in errors
    return errors


def writing(folder):
    """The first answers are there."""
    output = folder / "out.jsonl"
    return lambda _: output.exists() and output.stat().st_size > 0


def importing_or_loading(family):
    """The ranks have been there for a while: they import, load, or trace."""
    return len(family) >= 2 and time.time() - max(child.create_time() for child in family) > 2.5


def test_ctrl_c_while_the_ranks_start_leaves_no_process(checkpoint, tmp_path, record_property):
    with generating(checkpoint, tmp_path, importing_or_loading) as (process, _, family):
        start = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        ended(process, family)
        record_property("seconds", round(time.monotonic() - start, 2))
        assert process.returncode == 128 + signal.SIGINT


def begun(family):
    """The ranks are there, and have not imported anything."""
    return len(ranks_of(family)) == 2


def test_ranks_whose_launcher_is_killed_at_once_do_not_stay(checkpoint, tmp_path):
    with generating(checkpoint, tmp_path, begun) as (process, _, family):
        os.kill(process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=60)  # the time that they take to import
        assert not alive


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_is_named(checkpoint, tmp_path, record_property):
    with generating(checkpoint, tmp_path, writing(tmp_path)) as started:
        process, ranks, family = started
        start = time.monotonic()
        ranks[1].kill()
        errors = ended(process, family)
        record_property("seconds", round(time.monotonic() - start, 2))
    assert process.returncode == 1
    assert "ank 1" in errors and ("SIGKILL" in errors or "is gone without an error" in errors)


@pytest.mark.slow
def test_ranks_end_with_a_launcher_that_is_killed(checkpoint, tmp_path, record_property):
    with generating(checkpoint, tmp_path, writing(tmp_path)) as started:
        process, _, family = started
        start = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        ended(process, family)
        record_property("seconds", round(time.monotonic() - start, 2))
