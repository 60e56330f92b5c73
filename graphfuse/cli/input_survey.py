"""Reading a whole input without a model: what a resume would go on with, and what `--dry-run` tells."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from graphfuse.errors import GenerationError, SchemaError
from graphfuse.generation.answer_file import Answered, family, read_answered, replica_path
from graphfuse.generation.jsonl import read_records
from graphfuse.generation.record import Record, refusal
from graphfuse.generation.sampling import SamplingParams

if TYPE_CHECKING:
    from graphfuse.generation.tokenize import Prompt, PromptEncoder

_NO_WEIGHTS = ("*.json", "*.model", "*.txt", "*.jinja")
_MOST_SHOWN = 10


@dataclass(frozen=True)
class Task:
    """What to do with which files."""

    model: str
    input: Path
    output: Path | None
    """None: of a dry run without one."""

    params: SamplingParams
    chat_template: bool = True
    token_ids: bool = False
    overwrite: bool = False
    replica: int = 0
    num_replicas: int = 1

    def files(self) -> list[Path]:
        """Those that may hold answers."""
        return family(self.output) if self.output is not None else []

    def own_files(self) -> list[Path]:
        """Those of the replicas of this run, in order."""
        assert self.output is not None
        return [replica_path(self.output, replica, self.num_replicas) for replica in range(self.num_replicas)]


@dataclass
class Survey:
    """What an input holds."""

    num_records: int = 0
    num_answered: int = 0
    """Records that a resume skips."""

    num_errors: int = 0
    """Of the others, those that cannot be used."""

    errors: list[str] = field(default_factory=list)
    """The first few of their messages."""

    num_tokens: int = 0
    """Of the prompts that are left and can be used."""

    longest: int = 0
    num_cut: int = 0
    """Prompts whose answer the context may end before its `max_tokens`."""

    @property
    def num_left(self) -> int:
        return self.num_records - self.num_answered

    def refused(self, message: str) -> None:
        self.num_errors += 1
        if len(self.errors) < _MOST_SHOWN:
            self.errors.append(message)


def prompt_of(record: Record, chat_template: bool) -> Prompt:
    """What the model is asked. Text is the user's turn of a conversation, for models that are made for those."""
    assert record.prompt is not None
    if isinstance(record.prompt, str) and chat_template and not record.is_raw:
        return [{"role": "user", "content": record.prompt}]
    return record.prompt


class Reader:
    """A model's tokenizer, and how much it takes."""

    def __init__(self, model: str, *limits: int | None) -> None:
        """Raises `CheckpointError`."""
        from graphfuse.generation.tokenize import PromptEncoder, load_tokenizer
        from graphfuse.weights.config import read_config, text_config
        from graphfuse.weights.load import local_folder

        folder = local_folder(model, _NO_WEIGHTS)
        config = text_config(read_config(folder))
        self.max_length = min([int(config.max_position_embeddings), *filter(None, limits)])
        self._encoder: PromptEncoder = PromptEncoder(
            load_tokenizer(folder), vocab_size=config.vocab_size, max_length=self.max_length
        )

    def count(self, record: Record, chat_template: bool) -> int:
        """The number of tokens of its prompt. Raises `GenerationError` if it cannot be used."""
        return len(self._encoder.encode(prompt_of(record, chat_template and self._encoder.has_chat_template)))


def survey(task: Task, answered: Answered, reader: Reader | None = None) -> Survey:
    """Read the whole input. With a `reader`, all prompts are counted in tokens; without, a sample of those that have
    their answer.

    Raises:
        SchemaError: the input cannot be read, or `answered` holds answers to another one.
    """
    found, num_ids, num_compared, num_other = Survey(), 0, 0, 0
    tokenizer = reader
    for record in read_records(task.input):
        found.num_records += 1
        if record.key not in answered.keys:
            if reader is not None:
                _count(found, record, task, reader)
            continue
        found.num_answered += 1
        num_ids += record.id is not None
        if record.key in answered.sample and record.error is None:
            tokenizer = tokenizer or Reader(task.model)
            with suppress(GenerationError):  # too long for a context that is shorter than it was
                num_other += tokenizer.count(record, task.chat_template) != answered.sample[record.key]
                num_compared += 1
    if num_ids < answered.num_ids:
        raise _another(task, f"{_answers(answered.num_ids - num_ids)} to ids that {task.input} lacks")
    if 2 * num_other > num_compared:  # some templates put the date of the day into the prompt
        raise _another(task, "answers to prompts of other lengths, with the same ids")
    return found


def _count(found: Survey, record: Record, task: Task, reader: Reader) -> None:
    if record.error is not None:
        found.refused(record.error)
        return
    try:
        params = record.params(task.params)
        length = reader.count(record, task.chat_template)
    except GenerationError as error:
        found.refused(f"Line {record.line}: {refusal(error)}")
        return
    found.num_tokens += length
    found.longest = max(found.longest, length)
    found.num_cut += length + params.max_tokens > reader.max_length


def _answers(num: int) -> str:
    return f"{num} answer" if num == 1 else f"{num} answers"


def _another(task: Task, what: str) -> SchemaError:
    return SchemaError(
        f"{task.output} holds {what}: it is of another input, model or chat template. Give another --output, or "
        "--overwrite if nothing in it is needed."
    )


def dry_run(task: Task, *limits: int | None) -> tuple[str, int]:
    """What a run would do, with texts of at most so many tokens, and its exit code. No weights are loaded."""
    answered = read_answered([] if task.overwrite else task.files())
    reader = Reader(task.model, *limits)
    found = survey(task, answered, reader)
    usable = found.num_left - found.num_errors
    lines = [
        f"{found.num_records} records: {usable} to complete, {found.num_answered} done already, "
        f"{found.num_errors} that cannot be used",
        f"{found.num_tokens} prompt tokens to read; the longest prompt has {found.longest} of a context of "
        f"{reader.max_length}, which may cut {_answers(found.num_cut)} short",
        *found.errors,
    ]
    if found.num_errors > len(found.errors):
        lines.append(f"… and {found.num_errors - len(found.errors)} more")
    return "\n".join(lines), 0 if usable or found.num_answered or not found.num_records else 1
