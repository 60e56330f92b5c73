"""`graphfuse tune moe` as a user runs it, on a GPU that is a formula."""

import pytest
from typer.testing import CliRunner

from graphfuse.cli.main import app
from graphfuse.tuning.moe_files import read_table
from graphfuse.tuning.moe_tune import TOKENS, Host
from tests.tuning.fake_meter import FakeMeter, host

MODEL = ("--model", "qwen3-30b-a3b", "--tp", "2")
NAME = "E=128,N=384,device_name=NVIDIA_H200.json"


@pytest.fixture
def tune(monkeypatch, tmp_path):
    """Runs `graphfuse tune moe ARGUMENTS` in this process, on a fake H200."""

    def run(*arguments, meter=None):
        monkeypatch.setattr(Host, "here", lambda: host(meter or FakeMeter()))
        monkeypatch.setattr("sys.argv", ["graphfuse", "tune", "moe", *arguments])
        return CliRunner().invoke(app, ["tune", "moe", "--output", str(tmp_path), *arguments])

    return run


def test_it_prints_a_line_for_each_token_count_and_says_where_the_files_are(tune, tmp_path):
    done = tune(*MODEL, "--effort", "quick", "--tokens", "1,64,2048")
    assert done.exit_code == 0, done.output
    title, *lines, last = done.stdout.splitlines()
    assert title == "E=128, N=384, H=2048, top-8, bf16"
    assert [line.split()[:2] for line in lines] == [["1", "tokens"], ["64", "tokens"], ["2048", "tokens"]]
    assert "µs   gate_up 16x" in lines[0] and "stages" in lines[0]
    file = tmp_path / NAME
    assert last == f"{file} is written, for 3 token counts; all trials are in {str(file)[:-5]}.trials.csv."
    assert '"command": "graphfuse tune moe --model qwen3-30b-a3b' in file.read_text()


def test_all_token_counts_and_dtypes_of_a_model_by_default(tune, tmp_path):
    done = tune("--model", "mistral-small-4-119b", "--tp", "2", "--effort", "quick")
    assert done.exit_code == 0, done.output
    for suffix in ("", ",dtype=fp8_w8a8"):
        file = tmp_path / f"E=128,N=1024,device_name=NVIDIA_H200{suffix}.json"
        assert [num_tokens for num_tokens, _ in read_table(file, 4096, 4).entries] == list(TOKENS)


def test_a_time_limit_says_what_is_missing(tune, tmp_path):
    done = tune(*MODEL, "--tokens", "1,2", "--time-limit", "1e-9")
    assert done.exit_code == 0, done.output
    assert done.stdout.endswith("There was no time for 1, 2 tokens. Start the same command again to go on.\n")
    assert not (tmp_path / NAME).exists()


def test_ctrl_c_is_its_exit_code_and_no_traceback(tune, tmp_path):
    done = tune(*MODEL, "--tokens", "1,64", "--effort", "quick", meter=FakeMeter(fails=12))
    assert done.exit_code == 130 and "Traceback" not in done.output
    assert len(read_table(tmp_path / NAME, 2048, 8).entries) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Neither --model nor --shape is given"),
        ((*MODEL, "--shape", "8,8,8,2"), "Both --model and --shape are given"),
        (("--shape", "8,8,8,2", "--tp", "2"), "--tp does not go with --shape"),
        (("--shape", "8,8"), "--shape 8,8 is not a shape"),
        (("--model", "gpt-9"), "neither a folder with a config.json nor one of qwen3-30b-a3b"),
        (("--model", "qwen3-30b-a3b", "--tp", "5"), "which 5 ranks cannot share evenly"),
        ((*MODEL, "--dtype", "int4"), "--dtype int4 is not known"),
        ((*MODEL, "--effort", "heroic"), "--effort heroic is not known. Use quick or full."),
        ((*MODEL, "--tokens", "1,x"), "--tokens 1,x is not a list of sizes"),
        ((*MODEL, "--time-limit", "0"), "--time-limit 0.0 is no time to measure in"),
    ],
)
def test_mistakes_are_one_line(tune, arguments, message, capfd):
    assert tune(*arguments).exit_code == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line


def test_a_host_without_a_gpu_is_told_so(graphfuse, tmp_path):
    done = graphfuse("tune", "moe", *MODEL, "--output", tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and "there is no CUDA GPU here" in done.stderr
    assert not list(tmp_path.iterdir())
