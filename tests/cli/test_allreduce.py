"""`graphfuse bench allreduce`, `bench plot` and `tune allreduce` as a user runs them, on the CPU with tiny sizes."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from graphfuse.comm.table import TABLE_FOLDER_VARIABLE, SizeTable
from graphfuse.tuning.allreduce_result import Result
from tests.cli.conftest import COMMAND, clean_environment
from tests.documents import ROOT

SMALL = ("--device", "cpu", "--tp", 2, "--hidden", "64,128", "--tokens", "1,9")
PNG = b"\x89PNG"


def test_bench_prints_a_line_a_size_and_writes_the_result_and_its_plot(graphfuse, tmp_path):
    output, plot = tmp_path / "result.json", tmp_path / "plot.png"
    done = graphfuse("bench", "allreduce", *SMALL, "--output", output, "--plot", plot)
    assert done.returncode == 0, done.stderr
    header, *lines = done.stdout.splitlines()
    assert header.split()[:3] == ["tokens", "hidden", "unfused"]
    assert [line.split()[:2] for line in lines[:4]] == [["1", "64"], ["9", "64"], ["1", "128"], ["9", "128"]]
    assert "flashinfer/oneshot: FlashInfer runs on NVIDIA GPUs only" in done.stdout
    assert "dispatched against unfused:" in done.stdout
    result = Result.read(output)
    assert [(row.hidden, row.tokens) for row in result.rows] == [(64, 1), (64, 9), (128, 1), (128, 9)]
    assert (result.world_size, result.device_name, result.dtype, result.link_gbps) == (2, "cpu", "bfloat16", None)
    assert plot.read_bytes().startswith(PNG)


def test_tune_writes_a_table_that_follows_the_schema(graphfuse, tmp_path):
    done = graphfuse("tune", "allreduce", *SMALL, "--output", tmp_path, "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    file = tmp_path / "device_name=cpu,tp=2.json"
    table = SizeTable.read(file)
    assert [(up_to, [r.label for r in ranges]) for up_to, ranges in table.classes] == [
        (64, ["reference"]),
        (None, ["reference"]),
    ]
    assert table.dtypes == ("float32",)
    assert set(table.measured[0].us) == {"unfused", "reference"}, "what a table could choose, and unfused"
    assert table.provenance["source"].startswith("graphfuse tune allreduce --device cpu --tp 2")
    assert f"{file} is written; {TABLE_FOLDER_VARIABLE}={tmp_path} makes graphfuse use it." in done.stdout


def test_a_table_is_made_of_a_result_without_measuring(graphfuse, tmp_path):
    source = ROOT / "benchmarks" / "results" / "allreduce_h200x2.json"
    done = graphfuse("tune", "allreduce", "--from", source, "--output", tmp_path, "--stands-in-for", "NVIDIA H20")
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.iterdir()
    table = SizeTable.read(file)
    assert (table.device_name, table.world_size, table.stands_in_for) == ("NVIDIA H200", 2, ("NVIDIA H20",))
    assert len(table.measured) == len(Result.read(source).rows)


def test_a_plot_is_drawn_of_a_result(graphfuse, tmp_path):
    source = ROOT / "benchmarks" / "results" / "allreduce_h200x2.json"
    done = graphfuse("bench", "plot", source, "--output", tmp_path / "plot.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)


def test_it_takes_part_in_the_ranks_of_torchrun(tmp_path):
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m")
    command = (*launch, "graphfuse.cli.main", "bench", "allreduce", *SMALL, "--output", tmp_path / "result.json")
    done = subprocess.run(
        list(map(str, command)), env=clean_environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tokens hidden") == 1, "one rank prints"
    assert len(Result.read(tmp_path / "result.json").rows) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "1"], "One rank has nothing to reduce"),
        (["--tp", "2", "--tokens", "1,x"], "--tokens 1,x is not a list of sizes"),
        (["--tp", "2", "--hidden", "0"], "--hidden 0 is not a list of sizes"),
        (["--tp", "2", "--dtype", "float64"], "--dtype float64 is not known"),
        (["--tp", "2", "--device", "tpu"], "--device tpu is not known"),
        (["--tp", "2", "--device", "cpu", "--plot", "plot.txt"], "plot.txt does not name a picture"),
    ],
)
@pytest.mark.parametrize("command", ["bench", "tune"])
def test_what_is_wrong_is_said_before_any_rank_starts(graphfuse, command, arguments, message):
    done = graphfuse(command, "allreduce", *arguments)
    assert done.returncode == 1
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_bench_measures_only_the_candidates_it_is_asked_for(graphfuse):
    done = graphfuse("bench", "allreduce", *SMALL, "--candidates", "reference,unfused")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("GB/s")[0].split() == ["tokens", "hidden", "reference", "unfused", "link"]
    done = graphfuse("bench", "allreduce", *SMALL, "--candidates", "unfused,multimem")
    assert done.returncode == 1 and "--candidates multimem is not known" in done.stderr


WITHOUT_MATPLOTLIB = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "matplotlib" else find(name, *a)
from graphfuse.cli.main import app
app(sys.argv[1:])
"""


def test_without_matplotlib_a_plot_is_refused_before_anything_is_measured():
    arguments = ("bench", "allreduce", "--tp", "2", "--device", "cpu", "--plot", "plot.png")
    command = [sys.executable, "-c", WITHOUT_MATPLOTLIB, *arguments]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert 'matplotlib, which is not installed: pip install "graphfuse[bench]"' in done.stderr


DOCUMENTED = re.findall(
    r"^graphfuse ((?:bench plot|bench allreduce|tune allreduce) .*?)(?: +#.*)?$",
    "\n".join((ROOT / name).read_text() for name in ("README.md", "docs/allreduce.md")),
    re.MULTILINE,
)


@pytest.mark.parametrize("command", dict.fromkeys(DOCUMENTED))
def test_what_the_documents_show_runs(command, tmp_path):
    """With tiny sizes on the CPU, in a folder with a result of that name."""
    arguments = shlex.split(command)
    os.symlink(ROOT / "benchmarks", tmp_path / "benchmarks")
    (tmp_path / "result.json").write_bytes((ROOT / "benchmarks/results/allreduce_h200x2.json").read_bytes())
    if arguments[1] != "plot":
        arguments += ["--device", "cpu", "--hidden", "64", "--tokens", "1,2", "--tp", "2"]
    done = subprocess.run(
        [*COMMAND, *arguments],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
