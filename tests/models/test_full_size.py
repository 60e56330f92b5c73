"""Published configs at full size, explained without weights: two reductions a layer and the embedding's, all fused,
every value proved, in less than a minute of one core. MiniMax-M2 has a third in each layer, of the sums of squares of
queries and keys that lie on several ranks: no residual follows it."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from graphfuse.explain import explain_checkpoint

HOST = Path(__file__).parents[2] / "configs" / "facts" / "h100_x8.json"
CONFIGS = sorted((Path(__file__).parent / "configs").glob("*.json"))


def text_values(file: Path) -> dict:
    values = json.loads(file.read_text())
    return values.get("text_config", values)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda file: file.stem)
def test_every_reduction_of_a_published_model_is_fused(tmp_path, config, tp):
    shutil.copy(config, tmp_path / "config.json")
    started = time.process_time()  # the tracing is single-threaded; other load does not count
    report = explain_checkpoint(tmp_path, tp, HOST)
    assert time.process_time() - started < 60
    values = text_values(config)
    num_fused = 2 * values["num_hidden_layers"] + 1
    others = values["num_hidden_layers"] if values["model_type"] == "minimax_m2" else 0
    assert report.totals == {"all_reduce": num_fused + others, "fused": num_fused, "merged": 0, "declined": others}
    assert not [note for note in report.notes if "traced flat" in note or "not one graph" in note]
    assert report.placements["faults"] == []
    assert report.placements["reasons"] == []
    assert {layer.status for layer in report.moe} <= {"lowered"}
