"""What is wrong on the command line is said in one line, at once, before any rank starts."""

import subprocess
import sys

import pytest

from graphfuse.cli import launch
from graphfuse.cli.errors import plain_errors
from graphfuse.errors import GroupError


def test_help_lists_the_commands_without_loading_torch(graphfuse):
    code = (
        "import sys; from graphfuse.cli import main; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    result = graphfuse("--help")
    assert result.returncode == 0
    assert all(name in result.stdout for name in ("generate", "explain", "doctor", "bench", "tune"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give either --prompt or --input"),
        (["--prompt", "a", "--input", "f"], "Give either --prompt or --input"),
        (["--input", "f"], "--input and --output go together"),
        (["--prompt", "a", "--dtype", "int8"], "--dtype int8 is not known"),
        (["--prompt", "a", "--tp", "0"], "--tp 0 is not a number of ranks"),
        (["--prompt", "a", "--device", "tpu"], "--device tpu is not known"),
        (["--prompt", "a", "--device", "cpu", "--temperature", "-1"], "temperature=-1.0 is not a finite number"),
        (["--prompt", "a", "--device", "cpu", "--executor", "fast"], "executor='fast' is not known"),
        (["--prompt", "", "--device", "cpu"], "--prompt is empty"),
        (["--prompt", "a", "--device", "cpu", "--min-p", "2"], "min_p=2.0 lies outside"),
        (["--prompt", "a", "--n", "2"], "are about files. Leave them out with --prompt"),
        (["--prompt", "a", "--overwrite"], "are about files. Leave them out with --prompt"),
        (["--input", "f", "--output", "g", "--device", "cpu", "--n", "2"], "greedy completions would be alike"),
        (["--input", "f", "--output", "g", "--device", "cpu", "--json-schema", "none"], "none cannot be read as JSON"),
        (["--input", "none", "--output", "g", "--device", "cpu", "--tp", "2"], "none cannot be read"),
    ],
)
def test_a_bad_argument_is_one_clear_line(graphfuse, arguments, message):
    result = graphfuse("generate", "--model", "nowhere", *arguments)
    assert result.returncode == 1
    assert message in result.stderr
    assert result.stderr.startswith("graphfuse: ") and result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize("output", ["in.jsonl", "../here/in.jsonl", "link.jsonl", "copy"])
def test_an_output_that_would_overwrite_the_input_is_refused_and_nothing_is_written(graphfuse, tmp_path, output):
    here = tmp_path / "here"
    here.mkdir()
    prompts = here / ("copy-00000-of-00002" if output == "copy" else "in.jsonl")
    prompts.write_text('{"id": 1, "prompt": "a"}')
    (here / "link.jsonl").symlink_to(prompts)
    before = sorted(here.iterdir())
    result = graphfuse("generate", "--model", "nowhere", "--input", prompts, "--output", here / output)
    assert result.returncode == 1
    assert "would overwrite --input" in result.stderr and result.stderr.count("\n") == 1
    assert sorted(here.iterdir()) == before and "prompt" in prompts.read_text()


def test_an_unknown_option_is_a_usage_error(graphfuse):
    result = graphfuse("generate", "--model", "nowhere", "--colour", "red")
    assert result.returncode == 2
    assert "--colour" in result.stderr and "Traceback" not in result.stderr


def test_torchrun_and_tp_must_agree(graphfuse):
    result = graphfuse("generate", "--model", "m", "--prompt", "a", "--tp", "2", RANK="0", WORLD_SIZE="4")
    assert result.returncode == 1
    assert "torchrun started 4 ranks but --tp is 2. Make them equal" in result.stderr
    files = ["--input", "f", "--output", "g"]
    result = graphfuse("generate", "--model", "m", *files, "--tp", "3", RANK="0", WORLD_SIZE="4")
    assert result.returncode == 1
    assert "torchrun started 4 ranks but --tp is 3. Start a multiple of it" in result.stderr


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
@pytest.mark.parametrize("text", ["", "x", "-1", "²", "1e3", "9" * 5000])
def test_a_rank_that_torchrun_cannot_have_given_is_an_error(variable, text, monkeypatch):
    values = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"} | {variable: text}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(GroupError, match=rf"{variable}='.*' is not a number|{variable}='9+… is not a number"):  # noqa: SIM117
        with launch.joined(launch.check_ranks(None), "cpu"):
            pass


def test_an_error_is_said_whatever_the_rank_is_called(capfd, monkeypatch):
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(SystemExit), plain_errors():
        raise GroupError("What is wrong.")
    assert "What is wrong." in capfd.readouterr().err
