"""`graphfuse explain` and `graphfuse doctor` print what the library finds."""

from __future__ import annotations

import json

from tests.cli.conftest import REPOSITORY


def test_explain_tells_of_another_host_without_weights(graphfuse, checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    facts = REPOSITORY / "configs" / "facts" / "h100_x8.json"
    result = graphfuse("explain", "--model", tmp_path, "--tp", 8, "--device-facts", facts, "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["totals"]["all_reduce"] == 5  # the embedding, two in each layer
    assert report["gate"]["facts"]["world_size"] == 8


def test_doctor_lists_versions_as_json(graphfuse):
    result = graphfuse("doctor", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["versions"]["torch"]
