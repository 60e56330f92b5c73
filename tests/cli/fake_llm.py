"""A stand-in for the LLM, whose answers are known: it reads ahead, and answers out of order. And files to give it."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from graphfuse.cli.generate_file import complete_file
from graphfuse.cli.input_survey import Task
from graphfuse.errors import GenerationError
from graphfuse.generation.completion import Completion, GenerationStats
from graphfuse.generation.job import Job
from graphfuse.generation.sampling import SamplingParams

TOO_LONG = "too long"


class Stop(Exception):
    """The run ends here, as if it were killed."""


class FakeLLM:
    def __init__(self, *, stop_after: int | None = None, ahead: int = 8, seed: int = 0, remembers: bool = True) -> None:
        self.asked: list[Job] = []
        self.has_chat_template = False
        self.tokenizer = SimpleNamespace(decode=lambda token_ids: f"<{token_ids[0]}>")
        self.stats = GenerationStats()
        self.progress = SimpleNamespace(num_running=0, num_waiting=0, cache_used=0.0)
        self.report = None
        self._left = stop_after
        self._remembers = remembers
        self._ahead = ahead
        self._random = random.Random(seed)

    def complete(self, jobs: Iterable[Job]) -> Iterator[tuple[Any, list[Completion] | GenerationError]]:
        waiting: list[Job] = []
        each = iter(jobs)
        while True:
            while len(waiting) < self._ahead and (job := next(each, None)) is not None:
                waiting.append(job)
                if self._remembers:
                    self.asked.append(job)
            if not waiting:
                return
            if self._left == 0:
                raise Stop
            if self._left is not None:
                self._left -= 1
            job = waiting.pop(self._random.randrange(len(waiting)))
            yield job.key, answer_to(job)


def answer_to(job: Job) -> list[Completion] | GenerationError:
    if job.prompt == TOO_LONG:
        return GenerationError("The prompt has 9 tokens, which leaves no room. Shorten it.")
    token_ids = list(str(job.prompt).encode())
    text = f"{job.prompt} {job.params.max_tokens} {job.params.seed}"
    return [Completion(text, [1] * (len(text) % 5 + 1), "stop", token_ids) for _ in range(job.params.n)]


class FakeReader:
    """A tokenizer of bytes."""

    def __init__(self, model: str, *limits: int | None) -> None:
        self.max_length = 32

    def count(self, record: Any, chat_template: bool) -> int:
        if record.prompt == TOO_LONG:
            raise GenerationError("The prompt has 9 tokens, which leaves no room. Shorten it.")
        return len(str(record.prompt).encode())


PARAMS = SamplingParams(max_tokens=7, temperature=1, seed=100)


def write_input(path: Path, count: int) -> Path:
    """Every kind of line, `count` in all."""
    kinds = [
        lambda i: json.dumps({"id": i, "prompt": f"prompt {i}"}),
        lambda i: json.dumps({"id": f"é{i}", "prompt": f"é {i}", "max_tokens": 3}, ensure_ascii=False),
        lambda i: "{broken" + str(i),
        lambda i: json.dumps({"id": i, "prompt": TOO_LONG}),
        lambda i: json.dumps({"id": i, "prompt": "x", "temperature": -1}),
        lambda i: json.dumps({"id": 0, "prompt": "the first id again"}),
        lambda i: json.dumps({"id": [i, None], "messages": [{"role": "user", "content": f"m{i}"}]}),
    ]
    path.write_text("".join(kinds[i % len(kinds)](i) + "\n" + "\n" * (i % 3) for i in range(count)))
    return path


def task(folder: Path, **changes) -> Task:
    return dataclasses.replace(Task("model", folder / "in.jsonl", folder / "out.jsonl", PARAMS), **changes)


def run(the_task: Task, llm: FakeLLM | None = None, group: Any = None, everyone: Any = None) -> Any:
    start: Any = lambda: llm or FakeLLM()  # noqa: E731
    return complete_file(the_task, group, everyone, start)


def lines_of(path: Path) -> list[str]:
    """In the order of their text. Every one is JSON."""
    lines = path.read_bytes().decode().splitlines(keepends=True)
    assert all(line.endswith("\n") and json.loads(line) for line in lines)
    return sorted(lines)


def names_of(path: Path) -> list[str]:
    """What each line stands for."""
    return sorted(json.dumps([data["id"], data.get("line")]) for data in map(json.loads, lines_of(path)))
