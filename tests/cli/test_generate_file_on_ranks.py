"""Ranks complete a file together, and replicas share it."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from graphfuse.cli import generate_file, input_survey
from graphfuse.cli.generate_file import agreed
from graphfuse.errors import GroupError, SchemaError
from graphfuse.generation.jsonl import read_records
from tests.cli.fake_llm import FakeLLM, FakeReader, Stop, lines_of, names_of, run, task, write_input


@pytest.fixture(autouse=True)
def bytes_for_tokens(monkeypatch):
    monkeypatch.setattr(input_survey, "Reader", FakeReader)


def test_replicas_share_the_records_and_another_number_of_them_goes_on(tmp_path):
    write_input(tmp_path / "in.jsonl", 20)
    run(task(tmp_path, output=tmp_path / "whole.jsonl"))
    parts = [tmp_path / f"out-0000{replica}-of-00003.jsonl" for replica in range(3)]
    for replica in range(3):
        with pytest.raises(Stop):
            run(task(tmp_path, replica=replica, num_replicas=3), FakeLLM(stop_after=2))
    parts[1].write_bytes(parts[1].read_bytes()[:-9])
    for replica in range(2):
        run(task(tmp_path, replica=replica, num_replicas=2))
    parts += [tmp_path / f"out-0000{replica}-of-00002.jsonl" for replica in range(2)]
    joined = tmp_path / "joined.jsonl"
    joined.write_bytes(b"".join(part.read_bytes() for part in parts))
    assert lines_of(joined) == lines_of(tmp_path / "whole.jsonl")
    assert run(task(tmp_path))[0] is None  # one process, which finds all of it done


def test_a_new_start_takes_the_files_of_other_replicas_away(tmp_path):
    write_input(tmp_path / "in.jsonl", 9)
    for replica in range(2):
        run(task(tmp_path, replica=replica, num_replicas=2))
    run(task(tmp_path, overwrite=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert len(names_of(tmp_path / "out.jsonl")) == 9


def complete_on_ranks(group, folder, stop_after):
    input_survey.Reader = FakeReader
    generate_file.BLOCK_RECORDS = 4
    llm = FakeLLM(stop_after=stop_after)
    try:
        _, tally = run(task(folder), llm, group, group)
    except Stop:
        return None
    return tally.num_completed, tally.num_errors, tally.num_before


def test_ranks_go_on_together_and_one_of_them_writes(ranks, tmp_path):
    write_input(tmp_path / "in.jsonl", 30)
    run(task(tmp_path, output=tmp_path / "whole.jsonl"))
    assert ranks.run(2, complete_on_ranks, tmp_path, 5) == [None, None]
    output = tmp_path / "out.jsonl"
    output.write_bytes(output.read_bytes()[:-3])
    before = len(output.read_bytes().splitlines()) - 1
    results = ranks.run(2, complete_on_ranks, tmp_path, None)
    assert results[0] == results[1] and sum(results[0]) == 30 and results[0][2] == before
    assert lines_of(output) == lines_of(tmp_path / "whole.jsonl")


def complete_as_replicas(_, folder):
    input_survey.Reader = FakeReader
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replica = dist.get_rank() // 2
    try:
        _, tally = run(task(folder, replica=replica, num_replicas=2), None, groups[replica], dist.group.WORLD)
    except SchemaError as error:
        return str(error)
    return tally.num_completed + tally.num_errors


def test_replicas_of_ranks_each_write_a_file(ranks, tmp_path):
    write_input(tmp_path / "in.jsonl", 15)
    run(task(tmp_path, output=tmp_path / "whole.jsonl"))
    assert ranks.run(4, complete_as_replicas, tmp_path) == [8, 8, 7, 7]
    parts = [tmp_path / f"out-0000{replica}-of-00002.jsonl" for replica in range(2)]
    joined = tmp_path / "joined.jsonl"
    joined.write_bytes(b"".join(part.read_bytes() for part in parts))
    assert lines_of(joined) == lines_of(tmp_path / "whole.jsonl")

    parts[1].write_text("something else\n")
    errors = ranks.run(4, complete_as_replicas, tmp_path)
    assert len(set(errors)) == 1 and "is no answer of a run" in errors[0]  # found by one, said by all


def read_different_inputs(group, folder):
    generate_file.BLOCK_RECORDS = 4
    taken = []
    try:
        for record in agreed(read_records(folder / f"in{dist.get_rank(group)}.jsonl"), group):
            taken.append(record.id)
    except GroupError as error:
        return taken, str(error)
    return taken, ""


@pytest.mark.parametrize("other", ["changed", "shorter"])
def test_ranks_that_read_different_things_stop_before_they_use_them(ranks, tmp_path, other):
    lines = [json.dumps({"id": i, "prompt": "a"}) + "\n" for i in range(10)]
    (tmp_path / "in0.jsonl").write_text("".join(lines))
    changed = [*lines[:6], '{"id": 6, "prompt": "b"}\n', *lines[7:]] if other == "changed" else lines[:6]
    (tmp_path / "in1.jsonl").write_text("".join(changed))
    for taken, error in ranks.run(2, read_different_inputs, tmp_path):
        assert taken == [0, 1, 2, 3]
        assert "The ranks differ in the input that they read" in error


def test_ranks_that_read_the_same_use_all_of_it(ranks, tmp_path):
    for rank in range(2):
        write_input(tmp_path / f"in{rank}.jsonl", 12)
    first, second = ranks.run(2, read_different_inputs, tmp_path)
    assert first == second and len(first[0]) == 12
