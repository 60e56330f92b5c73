"""What a run over a file says of itself."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from graphfuse.cli import progress
from graphfuse.cli.input_survey import Task
from graphfuse.cli.progress import Latencies, Tally, shown, summary
from graphfuse.generation.completion import Completion, GenerationStats
from graphfuse.generation.record import Record
from graphfuse.generation.sampling import SamplingParams
from graphfuse.report import Report
from tests.cli.fake_llm import FakeLLM

RECORD = Record(line=1, index=0, size=100, key=b"")
COMPLETIONS = [Completion("a", [1, 2, 3], "stop", [1])]


@pytest.fixture
def task(tmp_path):
    (tmp_path / "in.jsonl").write_text("x" * 1000)
    return Task("model", tmp_path / "in.jsonl", Path("out.jsonl"), SamplingParams())


@pytest.fixture
def clock(monkeypatch):
    """Seconds since the start, to be set."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now.seconds)
    return now


def test_percentiles_are_those_of_all_times_within_one_percent():
    latencies = Latencies()
    for i in range(1, 1001):
        latencies.add(i / 100)
    for share, seconds in ((0.5, 5.0), (0.9, 9.0), (0.99, 9.9), (1.0, 10.0)):
        assert latencies.percentile(share) == pytest.approx(seconds, rel=0.011)
    assert Latencies().percentile(0.5) == 0.0
    latencies.add(0.0)  # a clock that has not moved


def test_many_times_take_little_memory():
    latencies = Latencies()
    for i in range(20_000):
        latencies.add(0.001 * 1.0007**i)
    assert len(latencies._counts) < 1000 and latencies.num == 20_000


def test_without_a_terminal_a_line_comes_now_and_then(task, clock, capsys):
    llm, tally = FakeLLM(), Tally()
    llm.progress = SimpleNamespace(num_running=7, num_waiting=3, cache_used=0.25)
    with shown(task, llm, tally, visible=True) as show:
        for i in range(1, 7):
            clock.seconds, llm.stats = 20.0 * i, GenerationStats(decode_tokens=200 * i)
            tally.completed(RECORD, COMPLETIONS, 1.0)
            show()
    assert capsys.readouterr().err.splitlines() == [
        "20 %, 2 records, 10 tokens/s, cache 25 %, 0:02:40 left",
        "40 %, 4 records, 10 tokens/s, cache 25 %, 0:02:00 left",
        "60 %, 6 records, 10 tokens/s, cache 25 %, 0:01:20 left",
    ]


def test_what_was_done_before_does_not_count_as_speed(task, clock, capsys):
    llm, tally = FakeLLM(), Tally()
    with shown(task, llm, tally, visible=True) as show:
        for _ in range(8):
            tally.passed(RECORD)
        clock.seconds = 40.0
        show()
        clock.seconds = 80.0
        tally.refused(RECORD)
        show()
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("80 %, 0 records") and first.endswith("? left")
    assert second.startswith("90 %, 1 records") and second.endswith("0:01:20 left")


def test_replicas_say_which_they_are_and_other_ranks_say_nothing(task, clock, capsys):
    for visible in (True, False):
        llm, tally = FakeLLM(), Tally()
        the_task = dataclasses.replace(task, replica=1, num_replicas=2)
        with shown(the_task, llm, tally, visible=visible) as show:
            clock.seconds += 31
            show()
    assert [line.partition(" %")[0] for line in capsys.readouterr().err.splitlines()] == ["replica 1: 0"]


def test_a_terminal_shows_a_bar(task, clock, monkeypatch):
    stream = io.StringIO()
    console = progress.Console
    monkeypatch.setattr(progress, "Console", lambda **_: console(file=stream, force_terminal=True, width=150))
    llm, tally = FakeLLM(), Tally()
    with shown(task, llm, tally, visible=True) as show:
        tally.completed(RECORD, COMPLETIONS, 1.0)
        show()
    assert "10 %" in stream.getvalue() and "1 records, 0 tokens/s" in stream.getvalue()


def test_the_summary(task):
    tally = Tally(num_before=4)
    tally.completed(RECORD, COMPLETIONS, 2.0)
    llm = FakeLLM()
    llm.stats = GenerationStats(prefill_tokens=10, prefill_seconds=1.0, decode_tokens=30, decode_seconds=2.0)
    llm.report = Report(num_graphs=1)
    assert summary(task, llm, tally).splitlines() == [
        "1 records completed, 0 could not be used, 4 were done before: see out.jsonl",
        llm.stats.to_text(),
        "latency of a record: p50 2.00 s, p90 2.00 s, p99 2.00 s",
        "0 all-reduces: 0 fused, 0 merged, 0 declined",
    ]
    assert "Nothing is left to do" in summary(task, None, tally)
