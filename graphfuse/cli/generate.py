"""`graphfuse generate`: complete a prompt to the terminal, or a file of prompts into another file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphfuse.cli import launch
from graphfuse.cli.errors import plain_errors
from graphfuse.errors import ConfigError, GenerationError

if TYPE_CHECKING:
    from graphfuse.cli.input_survey import Task
    from graphfuse.generation import LLM, SamplingParams

_DTYPES = ("float32", "bfloat16", "float16")


def generate(
    model: Annotated[str, typer.Option(help="Checkpoint folder or hub id.")],
    tp: Annotated[
        int | None,
        typer.Option(help="Tensor-parallel ranks. Under torchrun: all it started, or a part: then there are replicas."),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Text to answer, streamed to the terminal.")] = None,
    input: Annotated[
        Path | None,
        typer.Option(help='JSON Lines of {"id", "prompt"} or {"id", "messages"}, or in OpenAI\'s batch format.'),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Gets a line for each record. A file with answers is gone on with."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Drop what is in the output, and start anew.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only read and check the input, and say what there is to do.")
    ] = False,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Write the ids of generated tokens too.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate for a prompt.")] = 128,
    min_tokens: Annotated[int, typer.Option(help="Tokens before a completion may end.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Share of the probability to sample from.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Number of most likely tokens to sample from; 0 is all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Leave out tokens below this share of the likeliest one's.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: against tokens that were there before.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Prompt i is sampled with seed + i. Default: a new one.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends a completion; may be given several times.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="As --stop, by token id.")] = None,
    n: Annotated[int, typer.Option("--n", help="Completions of each record.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option(help="Write each token's log probability, and this many likeliest tokens', up to 20.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="File with a JSON schema that every text satisfies (extra: guided).")
    ] = None,
    chat_template: Annotated[
        bool, typer.Option(help="Put prompts through the tokenizer's chat template, if it has one.")
    ] = True,
    max_batch_size: Annotated[int, typer.Option(help="Most completions that run at once.")] = 32,
    max_length: Annotated[int | None, typer.Option(help="Longest text in tokens. Default: the model's.")] = None,
    cache_tokens: Annotated[
        int | None, typer.Option(help="Tokens that the cache holds. Default: as many as fit.")
    ] = None,
    max_step_tokens: Annotated[
        int | None, typer.Option(help="Most tokens that a step computes. Default: 16384 on GPUs, else 2048.")
    ] = None,
    page_size: Annotated[int, typer.Option(help="Tokens of a page of the cache: a power of two, on GPUs from 8.")] = 16,
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
        if (input is None) != (output is None) and not (dry_run and output is None):
            raise ConfigError("--input and --output go together. Give both, or --prompt.")
        if input is not None and output is not None and _overwrites(input, output):
            raise ConfigError(f"--output {output} would overwrite --input {input}. Give another output path.")
        if prompt == "":
            raise GenerationError("--prompt is empty. Give some text to answer.")
        if prompt is not None and (overwrite or dry_run or token_ids or n != 1 or logprobs is not None):
            raise ConfigError(
                "--overwrite, --dry-run, --token-ids, --n and --logprobs are about files. Leave them out with --prompt."
            )
        if dtype not in (None, *_DTYPES):
            raise ConfigError(f"--dtype {dtype} is not known. Use {', '.join(_DTYPES)}.")
        num_ranks = launch.check_ranks(tp, replicas=input is not None)
        device_type = launch.pick_device(device, num_ranks)

        from graphfuse.config import FuseConfig
        from graphfuse.generation.sampling import SamplingParams

        params = SamplingParams(
            max_tokens=max_new_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop=stop or (),
            stop_token_ids=stop_token_id or (),
            n=n,
            logprobs=logprobs,
            json_schema=_schema(json_schema) if json_schema else None,
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
        sizes: dict[str, Any] = {
            "max_batch_size": 1 if prompt is not None else max_batch_size,
            "max_length": max_length,
            "cache_tokens": cache_tokens,
            "max_step_tokens": max_step_tokens,
            "page_size": page_size,
        }
        task = None
        if input is not None:
            from graphfuse.cli.input_survey import Task
            from graphfuse.generation.jsonl import open_input

            open_input(input).close()
            replicas = launch.place(num_ranks)
            task = Task(model, input, output, params, chat_template, token_ids, overwrite, *replicas)
            if dry_run:
                whole_pages = cache_tokens and max(1, cache_tokens // max(1, page_size) * page_size)
                raise SystemExit(_say_what_there_is(task, max_length, whole_pages))
        if num_ranks > 1 and not launch.is_rank():
            raise SystemExit(launch.run_ranks(num_ranks, sys.argv[1:]))

        import torch

        from graphfuse.cli.show import show_report
        from graphfuse.generation import LLM

        with launch.joined(num_ranks, device_type) as (rank_device, group):

            def start() -> LLM:
                as_dtype = getattr(torch, dtype) if dtype else None
                return LLM(model, group, dtype=as_dtype, device=rank_device, config=config, **sizes)

            if task is not None:
                from graphfuse.cli.generate_file import complete_file
                from graphfuse.cli.progress import summary

                llm, tally = complete_file(task, group, launch.everyone(), start)
                said = summary(task, llm, tally)
            else:
                assert prompt is not None
                llm = start()
                _answer(llm, prompt, params, chat_template)
                said = llm.stats.to_text()
            if launch.rank() % num_ranks == 0:
                print(said, file=sys.stderr)
                if report and llm is not None:
                    show_report(llm.report)
            if llm is not None:
                llm.close()
        if task is not None and tally.found_no_use and task.num_replicas == 1:
            raise GenerationError(f'No record of {input} could be used. See "error" in {output}.')


def _overwrites(input: Path, output: Path) -> bool:
    """Whether `input` is one of the files that hold answers of `output`, under whatever name."""
    from graphfuse.generation.answer_file import family

    return any(path.resolve() == input.resolve() or _same(path, input) for path in (output, *family(output)))


def _same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def _schema(file: Path) -> dict[str, Any]:
    """The JSON schema in a file. Raises `SchemaError`."""
    from graphfuse.jsonfile import JsonObject

    return JsonObject.read(file).data


def _say_what_there_is(task: Task, *limits: int | None) -> int:
    """What a run would do, with texts of at most so many tokens; returns the exit code."""
    if launch.rank():
        return 0
    from graphfuse.cli.input_survey import dry_run

    text, exit_code = dry_run(task, *limits)
    print(text)
    return exit_code


def _answer(llm: LLM, prompt: str, params: SamplingParams, chat_template: bool) -> None:
    """Stream the answer to one prompt to stdout."""
    is_first = launch.rank() == 0
    wraps = chat_template and llm.has_chat_template
    token_ids = llm.encode([{"role": "user", "content": prompt}] if wraps else prompt, "--prompt")

    def show(_: int, text: str) -> None:
        print(text, end="", flush=True)

    llm.generate([token_ids], params, on_text=show if is_first else None)
    if is_first:
        print(flush=True)
