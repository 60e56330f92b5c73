"""The ranks of one model as child processes: for programs that are no rank themselves, as an actor of Ray is none.

    LocalRanks("path/to/checkpoint", tp=2)  ─►  rank 0: LLM on GPU 0   ─► results
              .complete(prompts, params)    ─►  rank 1: LLM on GPU 1

GPUs are those that this process sees. The children end with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from graphfuse.errors import ConfigError, GenerationError, GraphfuseError, GroupError, brief

if TYPE_CHECKING:
    from graphfuse.generation.sampling import SamplingParams
    from graphfuse.generation.tokenize import Prompt

_SECONDS_TO_END = 5.0


class LocalRanks:
    """`tp` processes, each with its part of the model."""

    def __init__(self, model: str, tp: int = 1, *, device: str = "auto", **options: Any) -> None:
        """Start them, and wait until they have loaded the model.

        Args:
            model: a checkpoint folder or a hub id.
            tp: how many ranks.
            device: "cuda", "cpu", or "auto": the GPUs where there are any.
            options: further arguments of `graphfuse.LLM`.

        Raises:
            GroupError: fewer GPUs than ranks, or a rank has ended.
            GraphfuseError: whatever the ranks raised while they loaded.
        """
        import torch
        import torch.distributed as dist
        import torch.multiprocessing as mp

        from graphfuse.cli.launch import pick_device

        if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
            raise ConfigError(f"tp={tp!r} is no number of ranks. Give 1 or more.")
        device_type = pick_device(device, tp)
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._ranks: list[tuple[Any, Connection]] = []
        context = mp.get_context("spawn")
        threads = max(1, torch.get_num_threads() // tp)
        try:
            for rank in range(tp):
                here, there = context.Pipe()
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": tp, "MASTER_PORT": self._store.port}
                arguments = (there, place, device_type, threads, model, options)
                process = context.Process(target=_serve, args=arguments, daemon=True, name=f"graphfuse rank {rank}")
                process.start()
                there.close()
                self._ranks.append((process, here))
            self._answers()
        except BaseException:
            self.close()
            raise

    def complete(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Any]:
        """A list of completions for each prompt, or the `GenerationError` that says why there is none.

        Raises:
            GenerationError: not as many `params` as prompts.
            GroupError: a rank has ended. All have then.
            GraphfuseError: whatever else ended the generation.
        """
        if not self._ranks:
            raise ConfigError("These ranks are closed. Make new ones.")
        if len(prompts) != len(params):
            raise GenerationError(
                f"There are {len(prompts)} prompts but {len(params)} SamplingParams. Give one for each prompt."
            )
        try:
            for _, connection in self._ranks:
                with contextlib.suppress(OSError):  # the rank has ended, which is found below
                    connection.send((list(prompts), list(params)))
            return self._answers()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        for _, connection in self._ranks:
            connection.close()
        for process, _ in self._ranks:
            process.join(_SECONDS_TO_END)
            if process.is_alive():
                process.kill()
                process.join()
        self._ranks = []

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _answers(self) -> Any:
        """Rank 0's answer, once every rank has one."""
        answers: dict[int, Any] = {}
        while len(answers) < len(self._ranks):
            open_ends = {rank: end for rank, (_, end) in enumerate(self._ranks) if rank not in answers}
            ready = wait(list(open_ends.values()))
            for rank in [rank for rank, end in open_ends.items() if end in ready]:
                try:
                    good, value = open_ends[rank].recv()
                except (EOFError, OSError):
                    raise GroupError(self._obituary(rank)) from None
                if not good:
                    raise value
                answers[rank] = value
        return answers[0]

    def _obituary(self, rank: int) -> str:
        process = self._ranks[rank][0]
        process.join(_SECONDS_TO_END)
        code = process.exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return f"Rank {rank} ended with {how}. See what it has written to stderr; start the ranks again."


def _serve(
    connection: Connection, place: dict[str, int], device_type: str, threads: int, model: str, options: dict[str, Any]
) -> None:
    """A child: load, then complete what comes until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one, which closes
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="localhost", TORCHELASTIC_USE_AGENT_STORE="True")

    import torch
    import torch.distributed as dist

    from graphfuse.generation.llm import LLM

    torch.set_num_threads(threads)
    rank, tp = place["RANK"], place["WORLD_SIZE"]
    group = None
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
            if tp > 1 and device_type == "cuda":
                torch.cuda.set_device(device)
                dist.init_process_group("nccl", device_id=device)
            elif tp > 1:
                dist.init_process_group("gloo")
            group = dist.group.WORLD if tp > 1 else None
            llm = LLM(model, group, device=device, **options)
            connection.send((True, None))
            while True:
                prompts, params = connection.recv()
                connection.send((True, _completed(llm, prompts, params)))
        except GraphfuseError as error:
            connection.send((False, error))
        except (EOFError, OSError):
            raise
        except Exception as error:
            connection.send((False, GenerationError(f"Rank {rank}: {type(error).__name__}: {brief(error, 400)}")))
            raise


def _completed(llm: Any, prompts: Sequence[Any], params: Sequence[Any]) -> list[Any]:
    from graphfuse.generation.job import Job

    jobs = (Job(i, prompt, param) for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)))
    found = dict(llm.complete(jobs))
    return [found[i] for i in range(len(prompts))]
