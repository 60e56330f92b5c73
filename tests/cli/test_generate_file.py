"""A file of prompts is completed once, whatever ends a run and however often it is started again."""

from __future__ import annotations

import contextlib
import json
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphfuse.cli import input_survey
from graphfuse.cli.generate_file import complete_file
from graphfuse.errors import SchemaError
from tests.cli.fake_llm import FakeLLM, FakeReader, Stop, lines_of, names_of, run, task, write_input


@pytest.fixture(autouse=True)
def bytes_for_tokens(monkeypatch):
    monkeypatch.setattr(input_survey, "Reader", FakeReader)


def test_every_record_gets_its_line(tmp_path):
    write_input(tmp_path / "in.jsonl", 7)
    _, tally = run(task(tmp_path))
    data = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    by_name = {json.dumps([each["id"], each.get("line")]): each for each in data}
    assert len(data) == len(by_name) == 7
    assert by_name["[0, null]"] == {
        "id": 0,
        "text": "prompt 0 7 100",
        "finish_reason": "stop",
        "num_prompt_tokens": 8,
        "num_tokens": 5,
    }
    assert by_name['["\\u00e91", null]']["text"] == "é 1 3 101"
    assert [("error" in line, line.get("line")) for line in data if line["id"] is None] == [(True, 4), (True, 10)]
    assert (tally.num_completed, tally.num_errors, tally.num_before) == (3, 4, 0)
    assert tally.num_bytes == (tmp_path / "in.jsonl").stat().st_size


def test_answers_are_written_as_they_come(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"id": i, "prompt": "a"}) + "\n" for i in range(50)))
    with pytest.raises(Stop):
        run(task(tmp_path), FakeLLM(stop_after=10))
    ids = [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(ids) == 10 and ids != sorted(ids)
    llm = FakeLLM()
    _, tally = run(task(tmp_path), llm)
    assert (tally.num_before, tally.num_completed) == (10, 40)
    assert not {job.key.record.id for job in llm.asked} & set(ids)
    assert len(names_of(tmp_path / "out.jsonl")) == len(set(names_of(tmp_path / "out.jsonl"))) == 50


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    count=st.integers(0, 30),
    stops=st.lists(st.tuples(st.integers(0, 12), st.floats(0, 1), st.integers(0, 99)), max_size=4),
)
def test_wherever_the_output_is_cut_each_record_is_answered_once(tmp_path_factory, count, stops):
    folder = tmp_path_factory.mktemp("resume")
    write_input(folder / "in.jsonl", count)
    whole = task(folder, output=folder / "whole.jsonl")
    run(whole)
    output = folder / "out.jsonl"
    for stop_after, share, seed in stops:
        with contextlib.suppress(Stop):
            run(task(folder), FakeLLM(stop_after=stop_after, seed=seed))
        data = output.read_bytes()
        output.write_bytes(data[: round(share * len(data))])
    run(task(folder))
    assert lines_of(output) == lines_of(folder / "whole.jsonl")
    assert len(lines_of(output)) == count


def test_a_complete_output_needs_no_model(tmp_path):
    write_input(tmp_path / "in.jsonl", 14)
    run(task(tmp_path))
    before = (tmp_path / "out.jsonl").read_bytes()
    llm, tally = complete_file(task(tmp_path), None, None, lambda: pytest.fail("it was loaded"))
    assert llm is None and (tally.num_before, tally.num_errors_before) == (14, 8)
    assert not tally.found_no_use
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_errors_are_kept_unless_their_lines_are_taken_out(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"id": 1, "prompt": ""}\n{"id": 2, "prompt": "a"}\n')
    run(task(tmp_path))
    source.write_text('{"id": 1, "prompt": "b"}\n{"id": 2, "prompt": "a"}\n{"id": 3, "prompt": "c"}\n')
    run(task(tmp_path))
    output = tmp_path / "out.jsonl"
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["id"], "error" in line) for line in lines] == [(1, True), (2, False), (3, False)]
    output.write_text("".join(line for line in output.read_text().splitlines(keepends=True) if '"error"' not in line))
    run(task(tmp_path))
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["id"], "error" in line) for line in lines] == [(2, False), (3, False), (1, False)]


def test_the_output_of_another_input_is_refused_and_left_alone(tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": i, "prompt": f"some {i}"}) + "\n" for i in range(20)))
    run(task(tmp_path))
    before = output.read_bytes()

    source.write_text("".join(json.dumps({"id": i, "prompt": f"some {i}"}) + "\n" for i in range(5, 30)))
    with pytest.raises(SchemaError, match=r"holds 5 answers to ids that .*in.jsonl lacks"):
        run(task(tmp_path))
    source.write_text("".join(json.dumps({"id": i, "prompt": f"something else {i}"}) + "\n" for i in range(30)))
    with pytest.raises(SchemaError, match="answers to prompts of other lengths, with the same ids"):
        run(task(tmp_path))
    assert output.read_bytes() == before

    _, tally = run(task(tmp_path, overwrite=True))
    assert (tally.num_before, tally.num_completed) == (0, 30)
    assert len(names_of(output)) == 30


def test_lines_that_are_mended_or_move_do_not_make_it_another_input(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{broken\n{"id": 2, "prompt": "a"}\n')
    run(task(tmp_path))
    source.write_text('{"id": 1, "prompt": "b"}\n\n{"id": 2, "prompt": "a"}\n')
    _, tally = run(task(tmp_path))
    assert tally.num_completed == 1


def test_a_run_in_which_nothing_could_be_used_is_known(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{broken\n{"id": 2, "prompt": ""}\n')
    assert run(task(tmp_path))[1].found_no_use
    assert run(task(tmp_path))[1].found_no_use  # nor could it before
    source.write_text("")
    assert not run(task(tmp_path, overwrite=True))[1].found_no_use


def test_what_raw_prompts_and_chat_templates_make_of_a_prompt(tmp_path):
    (tmp_path / "in.jsonl").write_text(
        '{"id": 1, "prompt": "a"}\n'
        '{"custom_id": "2", "url": "/v1/completions", "body": {"prompt": "b"}}\n'
        '{"custom_id": "3", "url": "/v1/completions", "body": {"prompt": [5, 6]}}\n'
    )
    llm = FakeLLM()
    llm.has_chat_template = True
    run(task(tmp_path), llm)
    assert [job.prompt for job in llm.asked] == [[{"role": "user", "content": "a"}], "b", [5, 6]]
    llm = FakeLLM()
    run(task(tmp_path, chat_template=False, overwrite=True), llm)
    assert llm.asked[0].prompt == "a"


def test_memory_does_not_grow_with_the_input(tmp_path):
    with (tmp_path / "in.jsonl").open("w") as file:
        for i in range(3000):
            file.write(json.dumps({"id": i, "prompt": f"{i} " + "x" * 20_000}) + "\n")
    for stop_after in (1500, None):  # a run, and one that goes on
        tracemalloc.start()
        try:
            with contextlib.suppress(Stop):
                run(task(tmp_path), FakeLLM(stop_after=stop_after, remembers=False))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 4_000_000  # of 60 MB
    assert len(names_of(tmp_path / "out.jsonl")) == 3000
