"""`graphfuse generate`: complete a prompt to the terminal, or a file of prompts into another file."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphfuse.cli import launch
from graphfuse.cli.errors import plain_errors
from graphfuse.errors import ConfigError, GenerationError

if TYPE_CHECKING:
    from graphfuse.generation import LLM, Completion, SamplingParams
    from graphfuse.generation.tokenize import Message, Prompt

_DTYPES = ("float32", "bfloat16", "float16")


def generate(
    model: Annotated[str, typer.Option(help="Checkpoint folder or hub id.")],
    tp: Annotated[
        int | None, typer.Option(help="Tensor-parallel ranks. Under torchrun: as many as it started.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Text to answer, streamed to the terminal.")] = None,
    input: Annotated[Path | None, typer.Option(help='JSON Lines of {"id", "prompt"} or {"id", "messages"}.')] = None,
    output: Annotated[
        Path | None, typer.Option(help='JSON Lines of {"id", "text", "token_ids", "finish_reason"} or {"id", "error"}.')
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate for a prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Share of the probability to sample from.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Number of most likely tokens to sample from; 0 is all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Prompt i is sampled with seed + i. Default: a new one.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends a completion; may be given several times.")] = None,
    chat_template: Annotated[
        bool, typer.Option(help="Put prompts through the tokenizer's chat template, if it has one.")
    ] = True,
    max_batch_size: Annotated[int, typer.Option(help="Most prompts that run at once.")] = 32,
    max_length: Annotated[int | None, typer.Option(help="Context length. Default: as long as needed.")] = None,
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(_DTYPES)}. Default: the checkpoint's.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    report: Annotated[bool, typer.Option("--report", help="Show what became of each reduction.")] = False,
    fusion: Annotated[str, typer.Option(help="auto, off or require.")] = "auto",
    executor: Annotated[str, typer.Option(help="auto, inductor or eager.")] = "auto",
    allreduce: Annotated[str, typer.Option(help="auto, flashinfer, symm_mem or reference.")] = "auto",
    disable_rule: Annotated[list[str] | None, typer.Option(help="A rule to leave out; may be repeated.")] = None,
    tier: Annotated[str, typer.Option(help="faithful or relaxed.")] = "faithful",
    verify: Annotated[bool, typer.Option(help="Prove that each partial sum is reduced exactly once.")] = True,
    watch: Annotated[bool, typer.Option(help="Notice ranks that are gone or have failed, and end.")] = True,
    moe_config_dir: Annotated[str | None, typer.Option(help="Folder of tuned MoE kernel configs.")] = None,
    dump: Annotated[str | None, typer.Option(help="Folder for the graphs before and after.")] = None,
) -> None:
    """Generate text with a tensor-parallel model; starts its own ranks unless torchrun has."""
    with plain_errors():
        # Everything that can be wrong on the command line is found here, before any process is started.
        if (prompt is None) == (input is None):
            raise ConfigError("Nothing, or too much, to generate from. Give either --prompt or --input.")
        if (input is None) != (output is None):
            raise ConfigError("--input and --output go together. Give both, or --prompt.")
        if input is not None and output is not None and _overwrites(input, output):
            raise ConfigError(f"--output {output} would overwrite --input {input}. Give another output path.")
        if prompt == "":
            raise GenerationError("--prompt is empty. Give some text to answer.")
        if dtype not in (None, *_DTYPES):
            raise ConfigError(f"--dtype {dtype} is not known. Use {', '.join(_DTYPES)}.")
        num_ranks = launch.check_ranks(tp)
        device_type = launch.pick_device(device, num_ranks)

        from graphfuse.config import FuseConfig
        from graphfuse.generation.sampling import SamplingParams

        params = SamplingParams(
            max_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop or ()
        )
        config = FuseConfig(
            disabled_rules=frozenset(disable_rule or ()),
            fusion=fusion,
            executor=executor,
            allreduce=allreduce,
            tier=tier,
            verify=verify,
            watch=watch,
            moe_config_dir=moe_config_dir,
            dump=dump,
        )
        if num_ranks > 1 and not launch.is_rank():
            raise SystemExit(launch.run_ranks(num_ranks, sys.argv[1:]))

        import torch

        from graphfuse.cli.show import show_report
        from graphfuse.generation import LLM

        with launch.joined(num_ranks, device_type) as (rank_device, group):
            llm = LLM(
                model,
                group,
                dtype=getattr(torch, dtype) if dtype else None,
                device=rank_device,
                config=config,
                max_batch_size=1 if prompt is not None else max_batch_size,
                max_length=max_length,
            )
            if prompt is not None:
                exit_code = _answer(llm, prompt, params, chat_template)
            else:
                assert input is not None and output is not None
                exit_code = _complete_file(llm, input, output, params, chat_template)
            if launch.rank() == 0:
                print(llm.stats.to_text(), file=sys.stderr)
                if report:
                    show_report(llm.report)
            llm.close()
        raise SystemExit(exit_code)


def _overwrites(input: Path, output: Path) -> bool:
    """Whether writing `output`, or its unfinished part, would write over `input`, under whatever name."""
    from graphfuse.generation.jsonl import partial_path

    written = (output, partial_path(output))
    return any(
        path.resolve() == input.resolve() or (path.exists() and input.exists() and path.samefile(input))
        for path in written
    )


def _answer(llm: LLM, prompt: str, params: SamplingParams, chat_template: bool) -> int:
    """Stream the answer to one prompt to stdout; returns the exit code."""
    is_first = launch.rank() == 0
    token_ids = llm.encode(_as_conversation(llm, prompt, chat_template), "--prompt")

    def show(_: int, text: str) -> None:
        print(text, end="", flush=True)

    llm.generate([token_ids], params, on_text=show if is_first else None)
    if is_first:
        print(flush=True)
    return 0


def _complete_file(llm: LLM, input: Path, output: Path, params: SamplingParams, chat_template: bool) -> int:
    """Write a line for each record of `input`, in order. Returns the exit code: 0 if any record could be used."""
    from graphfuse.generation.jsonl import completion_line, error_line, read_records, written_at_once

    records = read_records(input)
    usable: list[int] = []
    prompts: list[list[int]] = []
    for i, record in enumerate(records):
        if record.prompt is None:
            continue
        try:
            prompts.append(llm.encode(_as_conversation(llm, record.prompt, chat_template)))
            usable.append(i)
        except GenerationError as error:
            records[i] = replace(record, prompt=None, error=str(error))
    # By its place in the file, so that a broken line does not change what the ones after it get.
    each = [params if params.seed is None else replace(params, seed=params.seed + i) for i in usable]
    if launch.rank() != 0:
        llm.generate(prompts, each)
        return 0
    with written_at_once(output) as file:
        num_written = 0

        def write_errors(end: int) -> None:
            file.writelines(error_line(record) for record in records[num_written:end])

        def write(j: int, completion: Completion) -> None:
            nonlocal num_written
            write_errors(usable[j])
            file.write(completion_line(records[usable[j]], completion))
            file.flush()
            num_written = usable[j] + 1

        llm.generate(prompts, each, on_completion=write)
        write_errors(len(records))
    if len(usable) < len(records):
        num_failed = len(records) - len(usable)
        print(f'{num_failed} of {len(records)} lines could not be used: see "error" in {output}', file=sys.stderr)
    return 0 if usable or not records else 1


def _as_conversation(llm: LLM, prompt: str | list[Message], chat_template: bool) -> Prompt:
    """A prompt as the user's turn of a conversation, for models that are made for conversations."""
    if isinstance(prompt, str) and prompt and chat_template and llm.has_chat_template:
        return [{"role": "user", "content": prompt}]
    return prompt
