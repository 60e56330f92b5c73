"""Tuning runs on a GPU that is a formula: files, resuming, interruptions, several GPUs."""

import csv
import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from graphfuse.errors import BackendUnavailableError, ConfigError, SchemaError
from graphfuse.tuning import moe_tune
from graphfuse.tuning.moe_files import read_table
from graphfuse.tuning.moe_journal import COLUMNS, OK, Journal, Known, Trial
from graphfuse.tuning.moe_search import EFFORTS
from graphfuse.tuning.moe_share import Winner, deal, heuristics
from graphfuse.tuning.moe_tiles import MoeShape, Tile, Tiles
from graphfuse.tuning.moe_tune import TOKENS, Plan, kernels_version, tune
from tests.tuning.fake_meter import H200, OUT_OF_RESOURCES, SHAPE, VERSIONS, WORKLOAD, FakeMeter, host, surface

NAME = "E=128,N=384,device_name=NVIDIA_H200.json"
PAIR = Tiles(Tile(16, 64, 128, swap_ab=True), Tile(16, 32, 64, 16, 8, 4))


@pytest.fixture
def plan(tmp_path):
    return Plan(WORKLOAD, (1, 64, 4096), EFFORTS["quick"], tmp_path, "graphfuse tune moe --model qwen3-30b-a3b --tp 2")


@pytest.fixture
def meter():
    return FakeMeter()


def rows(outcome):
    with open(outcome.journal, encoding="utf-8", newline="") as stream:
        next(stream)
        return list(csv.DictReader(stream))


def test_a_run_writes_the_config_its_provenance_and_every_trial(plan, meter):
    events = []
    outcome = tune(plan, host(meter), each=events.append, date="2026-12-01")
    assert outcome.file == plan.folder / NAME and outcome.missing == ()
    table = read_table(outcome.file, 2048, 8)
    assert [num_tokens for num_tokens, _ in table.entries] == [1, 64, 4096]
    assert dict(table.measured_us) == pytest.approx({n: surface(n, tiles) for n, tiles in table.entries}, rel=1e-4)
    assert json.loads(outcome.file.read_text())["provenance"] == {
        "hidden_size": 2048, "top_k": 8, "device": "NVIDIA H200", "versions": VERSIONS, "date": "2026-12-01",
        "method": "bf16; median of 7 replays of a CUDA graph of calls on uniform and skewed routings in turn; both "
                  "products in one call; successive halving behind a cost model",
        "effort": "quick", "command": "graphfuse tune moe --model qwen3-30b-a3b --tp 2",
    }  # fmt: skip
    assert outcome.file.with_name(NAME.replace(".json", "_down.json")).is_file()
    assert len(rows(outcome)) == len(meter.asked) == sum(isinstance(event, Trial) for event in events)
    assert [event.num_tokens for event in events if isinstance(event, Winner)] == [1, 64, 4096]
    assert meter.is_closed


def test_tiles_are_no_slower_than_the_heuristics(plan, meter):
    outcome = tune(plan, host(meter))
    for num_tokens, best in outcome.done.items():
        assert best.us <= surface(num_tokens, heuristics(SHAPE, num_tokens)[0])


def test_what_can_be_foreseen_is_prepared_before_it_is_measured(plan, meter):
    tune(plan, host(meter))
    for num_tokens in plan.token_counts:
        asked = [trial.tiles for trial in meter.asked if trial.num_tokens == num_tokens]
        prepared = {tiles for of, tiles in meter.prepared if of == num_tokens}
        assert set(asked[:8]) <= prepared


def test_candidates_that_do_not_run_are_rows(plan, meter):
    meter.broken = frozenset(heuristics(SHAPE, 64))
    outcome = tune(plan, host(meter))
    failed = [row for row in rows(outcome) if row["status"] != OK]
    assert failed and {row["status"] for row in failed} == {OUT_OF_RESOURCES} and {row["us"] for row in failed} == {""}
    assert len(outcome.done) == 3


def test_a_second_run_measures_nothing_and_comes_to_the_same(plan, meter):
    first = tune(plan, host(meter), date="2026-12-01")
    before = first.file.read_bytes()
    again = FakeMeter(fails=0)
    second = tune(plan, host(again), date="2026-12-01")
    assert again.asked == [] and not again.prepared
    assert second.done == first.done and second.file.read_bytes() == before


@pytest.mark.parametrize("calls", [1, 8, 12])
def test_ctrl_c_leaves_valid_files_from_which_the_next_run_goes_on(plan, meter, calls):
    with pytest.raises(KeyboardInterrupt):
        tune(plan, host(interrupted := FakeMeter(fails=calls)))
    assert interrupted.is_closed
    file = plan.folder / NAME
    done = len(read_table(file, 2048, 8).entries) if file.exists() else 0
    assert done < 3 and (done > 0) == (calls > 8)
    tune(plan, host(meter))
    measured = {(t.num_tokens, t.tiles, t.rounds) for t in interrupted.asked}
    assert measured and not measured & {(t.num_tokens, t.tiles, t.rounds) for t in meter.asked}
    whole = FakeMeter()
    tune(replace(plan, folder=plan.folder / "whole"), host(whole))
    assert read_table(file, 2048, 8) == read_table(plan.folder / "whole" / NAME, 2048, 8)
    assert len(interrupted.asked) + len(meter.asked) == len(whole.asked)


def test_a_line_cut_short_is_dropped(plan, meter):
    outcome = tune(plan, host(meter))
    text = outcome.journal.read_text()
    outcome.journal.write_text(text[:-20])
    again = FakeMeter()
    tune(plan, host(again))
    assert len(again.asked) == 1
    assert len(rows(outcome)) == len(meter.asked)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"versions": {**VERSIONS, "triton": "3.7.0"}}, "was measured with triton '3.6.0', and this is '3.7.0'"),
        ({"versions": {**VERSIONS, "kernels": "f"}}, "was measured with kernels '0123456789ab', and this is 'f'"),
    ],
)
def test_trials_of_other_versions_are_refused(plan, meter, changed, message):
    outcome = tune(plan, host(meter))
    before = outcome.file.read_bytes(), outcome.journal.read_bytes()
    with pytest.raises(ConfigError, match=message):
        tune(plan, host(FakeMeter(), **changed))
    assert before == (outcome.file.read_bytes(), outcome.journal.read_bytes())


def test_a_config_for_another_hidden_size_is_not_overwritten(plan, meter):
    tune(plan, host(meter))
    other = replace(WORKLOAD, shape=MoeShape(128, 384, 4096, 8))
    with pytest.raises(ConfigError, match="for hidden size 2048 and top-8; this run is for hidden size 4096"):
        tune(replace(plan, workload=other), host(FakeMeter()))


def test_a_config_of_unknown_origin_is_not_overwritten(plan, meter):
    entry = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
    (plan.folder / NAME).write_text(json.dumps({"1": entry}))
    with pytest.raises(ConfigError, match="is there already, for a shape that it does not name"):
        tune(plan, host(meter))


def test_further_token_counts_join_the_config(plan, meter):
    tune(plan, host(meter))
    for _ in range(2):
        outcome = tune(replace(plan, token_counts=(2, 64), effort=EFFORTS["full"]), host(FakeMeter()))
    assert list(outcome.done) == [1, 2, 64, 4096]
    assert [n for n, _ in read_table(outcome.file, 2048, 8).entries] == [1, 2, 64, 4096]
    assert json.loads(outcome.file.read_text())["provenance"]["effort"] == "quick and full"


def test_after_the_time_limit_nothing_is_measured_and_what_is_done_is_written(plan, meter, monkeypatch):
    clock = iter([*range(14), *[1000] * 1000])
    monkeypatch.setattr(time, "time", lambda: next(clock))
    outcome = tune(replace(plan, deadline=100.0), host(meter))
    assert outcome.missing and list(outcome.done) == [n for n in plan.token_counts if n not in outcome.missing]
    monkeypatch.undo()
    assert tune(plan, host(FakeMeter())).missing == ()


def test_a_candidate_that_breaks_the_gpu_is_known_to_the_next_run(plan, meter):
    meter.breaks_gpu = heuristics(SHAPE, 4096)[0]
    with pytest.raises(BackendUnavailableError, match="left GPU 0 unusable: an illegal memory access"):
        tune(plan, host(meter))
    again = FakeMeter()
    outcome = tune(plan, host(again))
    assert meter.breaks_gpu not in {trial.tiles for trial in again.asked if trial.num_tokens == 4096}
    assert len(outcome.done) == 3


def test_trials_survive_the_file(tmp_path):
    trials = [
        Trial(1, PAIR, 2, 27.125),
        Trial(64, PAIR, 3, math.inf, 'CompilationError: at 1:2, "x", y'),
    ]
    with Journal(tmp_path / "j.csv", {"device": "NVIDIA H200"}) as journal:
        for trial in trials:
            journal.add(trial)
    with Journal(tmp_path / "j.csv", {"device": "NVIDIA H200"}) as journal:
        assert [journal.known.get(t.num_tokens, PAIR, t.rounds) for t in trials] == trials


def test_known_times_serve_for_fewer_rounds_and_failures_for_any():
    known = Known()
    known.add(few := Trial(1, PAIR, 2, 30.0))
    known.add(more := Trial(1, PAIR, 5, 29.0))
    known.add(failed := Trial(2, PAIR, 2, math.inf, "wrong"))
    assert [known.get(1, PAIR, rounds) for rounds in (1, 2, 3, 5, 6)] == [few, few, more, more, None]
    assert known.get(2, PAIR, 9) == failed and known.get(3, PAIR, 1) is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("hello", "line 3: 'hello' is no trial"),
        ("t,1,2,x,ok" + ",16" * 13, "is no trial"),
        ("t,1,2,,ok" + ",16" * 13, "is no trial"),
        ("t,1,2,5.0,wrong" + ",16" * 13, "is no trial"),
    ],
)
def test_a_line_that_is_no_trial_is_an_error(tmp_path, line, message):
    file = tmp_path / "j.csv"
    file.write_text("# {}\n" + ",".join(COLUMNS) + f"\n{line}\n")
    with pytest.raises(SchemaError, match=message):
        Journal(file, {})


def test_a_file_that_is_no_journal_is_an_error(tmp_path):
    file = tmp_path / "j.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(SchemaError, match="does not begin as a file of trials does"):
        Journal(file, {})
    with pytest.raises(ConfigError, match="cannot be written"):
        Journal(tmp_path, {})


@pytest.mark.parametrize("num_gpus", [1, 2, 3, 8, 40])
def test_token_counts_are_dealt_out_in_neighbouring_stretches(num_gpus):
    dealt = deal(SHAPE, TOKENS, num_gpus, H200)
    assert [num_tokens for share in dealt for num_tokens in share] == list(TOKENS)
    assert len(dealt) == min(num_gpus, len(dealt)) and all(dealt)
    if num_gpus <= 3:
        assert len(dealt) == num_gpus


def make_meter_that_may_fail(workload, gpu, num_gpus):
    """In a process of its own, told by a file what to do there."""
    meter = FakeMeter()
    told = Path(os.environ["FAKE_METER"])
    (told / f"gpu{gpu}-{os.getpid()}").touch()  # the name, since a kill can come between opening and writing
    if (told / f"exit{gpu}").exists():
        os._exit(7)
    if (told / f"raise{gpu}").exists():
        raise BackendUnavailableError("No such luck. Try again.")
    if (told / f"hang{gpu}").exists():
        time.sleep(100)
    return meter


def seen_pids(told: Path) -> set[int]:
    return {int(file.name.partition("-")[2]) for file in told.glob("gpu*-*")}


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_METER", str(tmp_path))
    return host(FakeMeter(), gpus=(0, 1), make_meter=make_meter_that_may_fail)


def test_two_gpus_find_what_one_finds(plan, two_gpus, tmp_path):
    outcome = tune(plan, two_gpus)
    pids = seen_pids(tmp_path)
    assert len(pids) == 2 and os.getpid() not in pids
    assert list(outcome.done) == [1, 64, 4096]
    assert len(read_table(outcome.file, 2048, 8).entries) == 3
    for gpu in (0, 1):
        (tmp_path / f"raise{gpu}").touch()
    assert tune(plan, two_gpus).done == outcome.done, "nothing is left to measure"


@pytest.mark.parametrize(
    ("told", "message"), [("exit1", "The process for GPU 1 ended with code 7"), ("raise1", "No such luck")]
)
def test_a_process_that_fails_ends_the_others(plan, two_gpus, tmp_path, told, message):
    (tmp_path / told).touch()
    (tmp_path / "hang0").touch()
    with pytest.raises(BackendUnavailableError, match=message):
        tune(plan, two_gpus)
    assert not any(Path(f"/proc/{pid}").exists() for pid in seen_pids(tmp_path))


def test_ctrl_c_ends_the_processes_of_all_gpus(plan, two_gpus, tmp_path):
    def interrupt(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(plan, two_gpus, each=interrupt)
    pids = seen_pids(tmp_path)
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    again = tune(plan, two_gpus)
    assert list(again.done) == [1, 64, 4096]


def test_the_kernels_version_follows_their_source(monkeypatch, tmp_path):
    assert kernels_version() == kernels_version()
    files = [tmp_path / "kernels" / "moe_x.py", tmp_path / "kernels" / "quantise.py", tmp_path / "tuning" / "x.py"]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("1")
    monkeypatch.setattr(moe_tune, "__file__", str(files[2]))
    before = kernels_version()
    files[0].write_text("2")
    assert kernels_version() != before
