"""README.md is true: its code runs, its figures are those of the measurement, its tables are complete."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from graphfuse.errors import TraceMismatchError
from graphfuse.testing.golden import set_update
from graphfuse.tuning import moe_plot, moe_result
from graphfuse.tuning.allreduce_plot import plot
from graphfuse.tuning.allreduce_result import LARGE_TOKENS, SMALL_TOKENS, Result
from graphfuse.tuning.measured import geometric_mean
from graphfuse.tuning.moe_peers import Peers
from tests.documents import ROOT, run
from tests.generation.conftest import checkpoint  # noqa: F401  (the tiny Llama)

README = (ROOT / "README.md").read_text()
MEASURED = ROOT / "benchmarks" / "results" / "allreduce_h200x2.json"
MEASURED_MOE = ROOT / "benchmarks" / "results" / "moe_h200.json"
MOE_PEERS = ROOT / "benchmarks" / "peers" / "moe_vllm_0_22_h200.json"
MOE_TOKENS = (1, 8, 128, 2048, 8192)
PYTHON = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SCRIPT, GENERATE, TEST = PYTHON
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "dtype": "bfloat16",
}


def test_the_script_runs_on_two_ranks(checkpoint, tmp_path):  # noqa: F811
    script = (SCRIPT + GENERATE).replace("path/to/checkpoint", str(checkpoint))
    (tmp_path / "script.py").write_text(script)
    output = run(
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        2,
        "script.py",
        folder=tmp_path,
    )
    assert output.count("5 all-reduces: 5 fused") == 2  # once a rank
    assert output.count("length") + output.count("stop") == 4  # two prompts a rank


def test_the_test_of_a_model_passes_and_notices_another_graph(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    exec(TEST, namespace)
    test = namespace["test_every_reduction_is_fused"]
    set_update(True)  # as pytest --update-goldens
    try:
        test()
    finally:
        set_update(False)
    test()
    golden = tmp_path / "golden" / "llama.txt"
    golden.write_text(golden.read_text().replace("all_reduce_rms_norm", "all_reduce"))
    with pytest.raises(TraceMismatchError, match="differs from the golden one") as failure:
        test()
    assert len(re.findall(r"^-%", str(failure.value), re.MULTILINE)) == 1, "this line, and no other"


def test_the_report_shown_is_what_explain_prints(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    facts = ROOT / "configs" / "facts" / "h200_x2.json"
    command = ("-m", "graphfuse.cli.main", "explain", "--model", tmp_path, "--tp", 2, "--device-facts", facts)
    printed = {line.rstrip().replace("┃", "│") for line in run(sys.executable, *command, folder=tmp_path).splitlines()}
    (shown,) = re.findall(r"^```text\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert [line for line in shown.splitlines() if line not in printed] == ["…"]


def measured_table(result: Result) -> str:
    """The table of README.md, from the measurement. `python -m tests.test_readme` writes it there."""
    cells = {(row.tokens, row.hidden): row for row in result.rows}
    widths = sorted({hidden for _, hidden in cells})
    lines = ["| tokens | served by | " + " | ".join(f"hidden {hidden:,}" for hidden in widths) + " |"]
    lines.append("|---" * (2 + len(widths)) + "|")
    for tokens in sorted({tokens for tokens, _ in cells}):
        rows = [cells[tokens, hidden] for hidden in widths]
        served = ", ".join(dict.fromkeys(str(row.dispatched) for row in rows))
        times = [(row.us["unfused"], row.us["dispatched"]) for row in rows]
        line = [f"{unfused:.1f} → {fused:.1f} ({unfused / fused:.2f}x)" for unfused, fused in times]
        lines.append(f"| {tokens:,} | {served} | " + " | ".join(line) + " |")
    return "\n".join([*lines, "", textwrap.fill(in_words(result), 118)])


BASELINES = {
    "unfused": "unfused",
    "flashinfer": "FlashInfer's kernel",
    "torch": "the faster of torch's symmetric-memory kernels with the same norm",
    "sequence_parallel": "the sequence-parallel form",
}


def in_words(result: Result) -> str:
    """What the figures come to."""
    against = result.summary()["against"]
    each = [f"{_figures(ratios)} over {BASELINES[name]}" for name, ratios in against.items()]
    text = f"Speed-ups up to {SMALL_TOKENS:,} tokens / above / at worst (geometric means): {', '.join(each)}"
    over_link = result.summary()["over_link"]
    if over_link:
        text += f". From {LARGE_TOKENS:,} tokens graphfuse takes {min(over_link.values()):.2f} to "
        text += f"{max(over_link.values()):.2f} times what the link needs for the bytes"
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return f"{text}. One run, {result.date}; {versions}. Other hosts and whole models have not been measured."


def _figures(ratios: dict[str, Any]) -> str:
    means = [ratios[key] for key in (f"up_to_{SMALL_TOKENS}_tokens", f"above_{SMALL_TOKENS}_tokens")]
    return " / ".join(f"{figure:.2f}" for figure in (*means, ratios["worst"]["ratio"]))


def measured_moe_table(result: moe_result.Result) -> str:
    """The table of MoE layers, likewise."""
    rows = {(row.shape, row.tokens): row for row in result.rows}
    lines = ["| shape, number format | " + " | ".join(f"{n:,} token{'s' * (n > 1)}" for n in MOE_TOKENS) + " |"]
    lines.append("|---" * (1 + len(MOE_TOKENS)) + "|")
    for shape in result.shapes:
        cells = []
        for tokens in MOE_TOKENS:
            us = rows[shape.name, tokens].us
            ours, grouped = us[moe_result.TUNED], us.get(moe_result.GROUPED)
            cells.append(f"{ours:.0f}" if grouped is None else f"{grouped:.0f} → {ours:.0f} ({grouped / ours:.1f}x)")
        lines.append(f"| {shape.name} | " + " | ".join(cells) + " |")
    few, more = (
        geometric_mean([row.us[moe_result.TUNED] / row.floor_us for row in result.rows if low <= row.tokens <= high])
        for low, high in ((1, 8), (16, 512))
    )
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items() if version)
    text = (
        f"graphfuse takes {few:.2f} times the floor up to 8 tokens and {more:.2f} times up to 512 (geometric means): "
        f"the larger of reading the experts' weights once and of the arithmetic. One run, {result.date}; {versions}; "
        f"{result.routing} routing."
    )
    return "\n".join([*lines, "", textwrap.fill(text, 118)])


MARKED = re.compile(r"(<!-- measured: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_measured_tables(text: str) -> str:
    tables = {
        str(MEASURED.relative_to(ROOT)): measured_table(Result.read(MEASURED)),
        str(MEASURED_MOE.relative_to(ROOT)): measured_moe_table(moe_result.Result.read(MEASURED_MOE)),
    }
    return MARKED.sub(lambda m: f"{m[1]}{tables[m[2]]}\n{m[3]}", text)


def test_the_figures_are_those_of_the_measurement():
    assert with_measured_tables(README) == README, "run python -m tests.test_readme"


def test_every_environment_variable_is_listed():
    from graphfuse.comm.table import TABLE_FOLDER_VARIABLE
    from graphfuse.probe import MULTICAST_SWITCHES

    pattern = re.compile(r"environ(?:\.get|\.setdefault|\.pop)?[\[(]\s*[\"'](\w+)[\"']|getenv\([\"'](\w+)")
    read = {TABLE_FOLDER_VARIABLE} | {f"{name}={value}" for name, value in MULTICAST_SWITCHES}
    for folder in ("graphfuse", "passes", "models"):
        for path in (ROOT / folder).rglob("*.py"):
            read |= {a or b for a, b in pattern.findall(path.read_text())}
    table = (ROOT / "docs" / "environment.md").read_text()
    listed = set(re.findall(r"`([\w=]+)`", table.replace("`TORCHELASTIC_*`", "")))
    assert {name for name in read if not name.startswith("TORCHELASTIC_")} <= listed
    assert {"GRAPHFUSE_DUMP", "GRAPHFUSE_FUEL"} <= read, "the pattern above finds nothing any more"


def test_links_lead_to_files():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).is_file(), target


if __name__ == "__main__":
    Path(ROOT / "README.md").write_text(with_measured_tables(README))
    plot(Result.read(MEASURED), MEASURED.with_suffix(".png"))
    moe_plot.plot(moe_result.Result.read(MEASURED_MOE), MEASURED_MOE.with_suffix(".png"), Peers.read(MOE_PEERS))
