"""Files of answers: only added to, repaired where a line is torn, and left alone where they hold something else."""

import multiprocessing as mp
import os

import pytest

from graphfuse.errors import SchemaError
from graphfuse.generation import answer_file
from graphfuse.generation.answer_file import AnswerFile, family, read_answered, replica_path
from graphfuse.generation.record import id_key, line_key

FIRST = '{"id": 1, "text": "é", "finish_reason": "stop", "num_prompt_tokens": 3, "num_tokens": 1}\n'.encode()
SECOND = b'{"id": 2, "error": "why"}\n'
NAMELESS = b'{"id": null, "line": 7, "error": "why"}\n'


def repaired(path):
    with AnswerFile(path) as file:
        file.repair()
    return path.read_bytes()


def test_lines_are_added_and_there_at_once(tmp_path):
    path = tmp_path / "out.jsonl"
    with AnswerFile(path) as file:
        assert path.read_bytes() == b""
        file.write(FIRST)
        assert path.read_bytes() == FIRST
    with AnswerFile(path) as file:
        file.write(SECOND)
    assert path.read_bytes() == FIRST + SECOND


@pytest.mark.parametrize("cut", range(len(SECOND) + 1))
def test_a_torn_last_line_is_dropped_and_a_whole_one_kept(tmp_path, cut):
    path = tmp_path / "out.jsonl"
    path.write_bytes(FIRST + SECOND[:cut])
    whole = cut >= len(SECOND) - 1
    assert len(read_answered([path]).keys) == 1 + whole
    assert repaired(path) == (FIRST + SECOND if whole else FIRST)


@pytest.mark.parametrize("tail", [b"\0" * 9, b'{"id": 2, "te\0\0\0', b"  ", b"{"])
def test_what_a_crash_leaves_at_the_end_is_dropped(tmp_path, tail):
    path = tmp_path / "out.jsonl"
    path.write_bytes(FIRST + tail)
    assert repaired(path) == FIRST


@pytest.mark.parametrize(
    "data",
    [b"hello", b"hello\n", FIRST + b"hello", FIRST + b"hello\n" + SECOND, b'{"id": 1, "prompt": "a"}\n', b"\xff"],
)
def test_a_file_of_something_else_is_left_alone(tmp_path, data):
    path = tmp_path / "precious.jsonl"
    path.write_bytes(data)
    with pytest.raises(SchemaError, match="is no answer of a run"):
        repaired(path)
    with pytest.raises(SchemaError, match="is no answer of a run"):
        read_answered([path])
    assert path.read_bytes() == data


def test_what_is_answered(tmp_path):
    path, other = tmp_path / "out.jsonl", tmp_path / "other.jsonl"
    path.write_bytes(FIRST + b"\n" + SECOND)
    other.write_bytes(NAMELESS + SECOND)
    answered = read_answered([path, other])
    assert answered.keys == {id_key(1), id_key(2), line_key(7)}
    assert (answered.num_errors, answered.num_ids, answered.sample) == (2, 2, {id_key(1): 3})
    assert answered.digest() == read_answered([other, path]).digest() != read_answered([path]).digest()


def test_only_one_run_writes_to_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(answer_file, "_PATIENCE", 0.0)
    path = tmp_path / "out.jsonl"
    with AnswerFile(path), pytest.raises(SchemaError, match="is being written by another run"):
        AnswerFile(path)
    AnswerFile(path).close()


def hold(path, connection):
    with AnswerFile(path):
        connection.send(None)
        connection.recv()


def test_a_run_that_ends_lets_the_next_one_in(tmp_path):
    path = tmp_path / "out.jsonl"
    ours, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=hold, args=(path, theirs))
    process.start()
    ours.recv()
    process.kill()
    AnswerFile(path).close()  # waits
    process.join()


def test_an_output_folder_must_exist(tmp_path):
    with pytest.raises(SchemaError, match="existing, writable folder"):
        AnswerFile(tmp_path / "none" / "out.jsonl")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_is_said_with_what_to_do(tmp_path):
    with AnswerFile(tmp_path / "out.jsonl") as file, open("/dev/full", "wb", buffering=0) as full:
        os.dup2(full.fileno(), file._file.fileno())
        with pytest.raises(SchemaError, match=r"No space left.*it goes on where it was"):
            file.write(FIRST)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_regular_file_is_refused(tmp_path, make):
    make(tmp_path / "out.jsonl")
    with pytest.raises(SchemaError, match="is no regular file"):
        AnswerFile(tmp_path / "out.jsonl")


def test_names_of_replicas_and_their_family(tmp_path):
    output = tmp_path / "a.b.jsonl"
    assert replica_path(output, 0, 1) == output
    names = [replica_path(output, replica, 2) for replica in range(2)]
    assert [path.name for path in names] == ["a.b-00000-of-00002.jsonl", "a.b-00001-of-00002.jsonl"]
    assert family(output) == []
    others = [
        tmp_path / name for name in ("axb-00000-of-00002.jsonl", "a.b-x-of-00002.jsonl", "a.b-00000-of-00002.json")
    ]
    for path in (*names, *others, output):
        path.touch()
    assert family(output) == [output, *names]
    assert family(tmp_path / "none" / "out.jsonl") == []
