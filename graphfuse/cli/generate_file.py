"""Complete a file of prompts into another file: what `graphfuse generate --input … --output …` does on each rank.

    every rank           reads the input, compares it with the ranks of its group a block ahead, and generates
    a group's first      also adds the answers to its file, which nobody else writes, and shows how far the run is

Before anything is generated the files of the output are repaired; when that is done all ranks read which records have
their answer; when that is done the first answer may be written. Replicas, groups of ranks with a whole model each, take
every n-th record.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from graphfuse.agreement import is_shared, require
from graphfuse.cli.input_survey import Task, prompt_of, survey
from graphfuse.cli.progress import Tally, shown
from graphfuse.comm.control import ControlChannel, control_channel
from graphfuse.errors import GenerationError, GraphfuseError, SchemaError, brief
from graphfuse.generation.answer_file import Answered, AnswerFile, read_answered
from graphfuse.generation.answers import Format, error_line
from graphfuse.generation.job import Job
from graphfuse.generation.jsonl import read_records
from graphfuse.generation.record import Record, refusal

if TYPE_CHECKING:
    from graphfuse.generation import LLM

T = TypeVar("T")

BLOCK_RECORDS, BLOCK_BYTES = 256, 4 << 20
"""What ranks read ahead, and compare before they use any of it."""

_PATIENCE = timedelta(hours=24)
"""While one rank reads the whole of an input of any size."""


@dataclass(frozen=True)
class Ticket:
    """What comes back with the completions of a record."""

    record: Record
    since: float
    """When the engine took it, by `time.perf_counter`."""


def complete_file(
    task: Task, group: dist.ProcessGroup | None, everyone: dist.ProcessGroup | None, start: Callable[[], LLM]
) -> tuple[LLM | None, Tally]:
    """Complete each record of the input that has no answer yet. Call it on every rank of every replica.

    Args:
        group: the ranks of this replica, None for a process that is alone.
        everyone: those of all replicas.
        start: makes the LLM, when it is certain that there is something to do.

    Returns:
        The LLM, None where it was not needed, and what became of the records.

    Raises:
        SchemaError: the input cannot be read, or the output is that of another one or cannot be written.
        GroupError: the ranks read different things.
    """
    world = _channel(everyone)
    is_writer = group is None or dist.get_rank(group) == 0
    with ExitStack() as stack:
        file = _together(world, lambda: stack.enter_context(_opened(task)) if is_writer else None)
        answered = _together(world, lambda: read_answered(task.files()))
        if is_shared(group):
            fields = {"the number of answers": len(answered.keys), "their ids": answered.digest()}
            require(control_channel(group), f"what {task.output} holds", fields)
        tally = Tally(num_before=len(answered.keys), num_errors_before=answered.num_errors)
        if answered.keys:
            is_first = world is None or world.rank == 0
            left = _together(world, lambda: survey(task, answered).num_left if is_first else 0)
            left = left if world is None else world.exchange(left, subject="what is left to do")[0]
            if is_first:
                done = len(answered.keys)
                print(f"{done} records are done in {task.output}, {left} are left.", file=sys.stderr)
            if not left:
                return None, tally
        llm = start()
        _run(task, llm, group, answered, file, tally)
        return llm, tally


def _channel(group: dist.ProcessGroup | None) -> ControlChannel | None:
    return control_channel(group) if is_shared(group) else None


def _together(channel: ControlChannel | None, action: Callable[[], T]) -> T:
    """What `action` returns, once it has returned on all ranks. What it raises on one is raised on all. Collective."""
    if channel is None:
        return action()
    results, problem = [], None
    try:
        results.append(action())
    except GraphfuseError as error:
        problem = str(error)
    for said in channel.exchange(problem, _PATIENCE, subject="opening the files"):
        if said is not None:
            raise SchemaError(said)
    return results[0]


def _opened(task: Task) -> AnswerFile:
    """The file of this replica, ready to be added to. The first replica also sees to what other numbers of replicas
    left. Afterwards no line of the output is torn."""
    own = task.own_files()
    file = AnswerFile(own[task.replica])
    try:
        for path in set(task.files()) - set(own) if task.replica == 0 else ():
            with AnswerFile(path) as other:
                if task.overwrite:
                    path.unlink()
                else:
                    other.repair()
        if task.overwrite:
            file.clear()
        else:
            file.repair()
    except BaseException as error:
        file.close()
        if isinstance(error, OSError):
            raise SchemaError(f"{task.output} cannot be changed ({brief(error)}). Give another --output.") from error
        raise
    return file


def _run(
    task: Task,
    llm: LLM,
    group: dist.ProcessGroup | None,
    answered: Answered,
    file: AnswerFile | None,
    tally: Tally,
) -> None:
    def refuse(record: Record, message: str) -> None:
        if file is not None:
            file.write(error_line(record, message))
        tally.refused(record)

    def jobs() -> Iterator[Job]:
        for record in agreed(read_records(task.input), group):
            if record.index % task.num_replicas != task.replica or record.key in answered.keys:
                answered.keys.discard(record.key)  # an id comes once; the memory can go
                tally.passed(record)
                continue
            if record.error is not None:
                refuse(record, record.error)
                continue
            try:
                params = record.params(task.params)
            except GenerationError as error:
                refuse(record, refusal(error))
                continue
            prompt = prompt_of(record, task.chat_template and llm.has_chat_template)
            yield Job(Ticket(record.without_prompt(), time.perf_counter()), prompt, params)

    name = os.path.basename(os.path.realpath(task.model)) if os.path.isdir(task.model) else task.model
    form = Format(name, lambda token_id: str(llm.tokenizer.decode([token_id])), task.token_ids)
    with shown(task, llm, tally, visible=file is not None) as show:
        for ticket, result in llm.complete(jobs()):
            if isinstance(result, GenerationError):
                refuse(ticket.record, refusal(result))
            else:
                if file is not None:
                    file.write(form.answer(ticket.record, result))
                tally.completed(ticket.record, result, time.perf_counter() - ticket.since)
            show()


def agreed(records: Iterable[Record], group: dist.ProcessGroup | None) -> Iterator[Record]:
    """The records, each once all ranks of the group have read the same up to there. A rank that is given another file
    would else take part in other steps than its peers, and all of them wait for ever.

    Raises:
        GroupError: they differ.
    """
    if not is_shared(group):
        yield from records
        return
    channel, digest, count = control_channel(group), hashlib.blake2b(digest_size=16), 0
    each = iter(records)
    while True:
        block: list[Record] = []
        size = 0
        while len(block) < BLOCK_RECORDS and size < BLOCK_BYTES and (record := next(each, None)) is not None:
            block.append(record)
            digest.update(record.digest)
            size += record.size
        count += len(block)
        require(channel, "the input that they read", {"the number of records": count, "a digest": digest.hexdigest()})
        if not block:
            return
        yield from block
