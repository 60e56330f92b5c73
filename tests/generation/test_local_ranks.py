"""`LocalRanks`: child processes that complete prompts as an LLM of this process does, and that end when they should."""

from __future__ import annotations

import os
import signal

import pytest

from graphfuse.errors import CheckpointError, ConfigError, GenerationError, GroupError
from graphfuse.generation import LLM, SamplingParams
from graphfuse.generation.local_ranks import LocalRanks

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
OPTIONS = {"device": "cpu", "compile": False}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_two_ranks_complete_what_one_process_completes_and_one_that_is_killed_ends_both(checkpoint):
    llm = LLM(checkpoint, **OPTIONS)
    ranks = LocalRanks(str(checkpoint), 2, **OPTIONS)
    pids = [process.pid for process, _ in ranks._ranks]
    for prompts in (["The capital", "A"], ["One two three"]):
        found = ranks.complete(prompts, [GREEDY] * len(prompts))
        assert found == [[completion] for completion in llm.generate(prompts, GREEDY)]
    with pytest.raises(GenerationError, match="2 prompts but 1 SamplingParams"):
        ranks.complete(["A", "B"], [GREEDY])
    good, bad = ranks.complete(["The", ""], [GREEDY] * 2)
    assert good == llm.generate(["The"], GREEDY)
    assert isinstance(bad, GenerationError) and "is empty" in str(bad)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(GroupError, match="Rank 1 ended with SIGKILL"):
        ranks.complete(["A"], [GREEDY])
    assert not any(map(is_alive, pids))
    with pytest.raises(ConfigError, match="These ranks are closed"):
        ranks.complete(["A"], [GREEDY])


@pytest.mark.slow
def test_processes_end_when_they_are_closed(checkpoint):
    with LocalRanks(str(checkpoint), 2, **OPTIONS) as ranks:
        pids = [process.pid for process, _ in ranks._ranks]
        assert all(map(is_alive, pids))
    assert not any(map(is_alive, pids))


@pytest.mark.slow
def test_what_ranks_raise_while_they_load_is_raised_here(tmp_path):
    with pytest.raises(CheckpointError, match="config"):
        LocalRanks(str(tmp_path), 1, **OPTIONS)


@pytest.mark.parametrize("tp", [0, 1.5])
def test_no_ranks_are_refused(tmp_path, tp):
    with pytest.raises(ConfigError, match=f"tp={tp} is no number of ranks"):
        LocalRanks(str(tmp_path), tp, **OPTIONS)
