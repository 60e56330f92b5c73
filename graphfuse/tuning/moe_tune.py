"""A tuning run over all GPUs of a host: numbers of tokens dealt out, trials into the journal, winners into the table.

    one GPU: in this process          more: a process for each ─► events ─► this process, which alone writes files

The table is written anew after each number of tokens, so that whatever ends the run leaves a valid one.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from graphfuse.errors import BackendUnavailableError, ConfigError, GraphfuseError
from graphfuse.jsonfile import JsonObject
from graphfuse.tuning.moe_cost import Device
from graphfuse.tuning.moe_file_names import FileName
from graphfuse.tuning.moe_files import read_table, write_table
from graphfuse.tuning.moe_journal import Journal, Trial, journal_file
from graphfuse.tuning.moe_schema import Contents, Provenance
from graphfuse.tuning.moe_search import Best, Effort
from graphfuse.tuning.moe_shapes import Workload
from graphfuse.tuning.moe_share import Event, MakeMeter, Meter, Share, TimeUp, deal, run_share
from graphfuse.tuning.moe_table import MoeTable

TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 8192)
SECONDS_TO_END = 10.0


@dataclass(frozen=True)
class Host:
    """What a run needs of the host."""

    device_name: str
    gpus: tuple[int, ...]
    """Their numbers; all are of one kind."""

    device: Device
    versions: dict[str, str]
    make_meter: MakeMeter

    @classmethod
    def here(cls) -> Host:
        """This host's GPUs, those that are like the first one. Raises `BackendUnavailableError` if there is none."""
        import torch

        from graphfuse.probe import version_of
        from graphfuse.tuning.moe_timing import check_gpu

        check_gpu()
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        versions = {name: version_of(name) or "unknown" for name in ("graphfuse", "triton")}
        return cls(
            names[0],
            tuple(index for index, name in enumerate(names) if name == names[0]),
            Device.of_current(),
            {"torch": torch.__version__, **versions, "kernels": kernels_version()},
            gpu_meter,
        )


@dataclass(frozen=True)
class Plan:
    """One table to make."""

    workload: Workload
    token_counts: tuple[int, ...]
    effort: Effort
    folder: Path
    command: str
    """For the table's provenance."""

    deadline: float = math.inf
    """By `time.time()`: nothing is measured after it."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    file: Path
    journal: Path
    done: dict[int, Best]
    """By number of tokens, rising."""

    missing: tuple[int, ...] = ()
    """Numbers of tokens that there was no time for."""


def tune(
    plan: Plan, host: Host, *, each: Callable[[Event], object] = lambda event: None, date: str | None = None
) -> Outcome:
    """Tune one table, or go on with it.

    Args:
        each: called with every trial and winner as it comes.
        date: for the provenance; today's by default.

    Raises:
        ConfigError: files in the folder belong to another shape or were measured otherwise, or cannot be written.
        SchemaError: a file in the folder is damaged.
        BackendUnavailableError: the kernels, or all candidates for a number of tokens, do not run here.
    """
    shape = plan.workload.shape
    file = plan.folder / str(FileName.of(shape, host.device_name))
    provenance = Provenance(
        hidden_size=shape.hidden_size,
        top_k=shape.top_k,
        device=host.device_name,
        versions=host.versions,
        date=date or datetime.date.today().isoformat(),
        method=_method(plan.effort, plan.workload),
        effort=plan.effort.name,
        command=plan.command,
    )
    kept, their_effort = _kept(file, plan, provenance)
    done = dict(kept)
    origin = {"workload": plan.workload.title, "device": host.device_name, **host.versions}
    token_counts = tuple(sorted(set(plan.token_counts)))
    found: set[int] = set()
    with Journal(journal_file(file), origin) as journal:

        def take(event: Event) -> None:
            if isinstance(event, Trial):
                journal.add(event)
            else:
                done[event.num_tokens] = event.best
                found.add(event.num_tokens)
                theirs = their_effort.split(" and ") if kept.keys() - found else []
                effort = " and ".join(dict.fromkeys([*theirs, plan.effort.name]))
                write_table(plan.folder, _table(plan, done), replace(provenance, effort=effort))
            each(event)

        dealt = deal(shape, token_counts, len(host.gpus), host.device)
        shares = [
            Share(gpu, len(dealt), plan.workload, counts, plan.effort, host.device, plan.deadline, journal.known)
            for gpu, counts in zip(host.gpus, dealt, strict=False)
        ]
        if len(shares) == 1:
            with contextlib.suppress(TimeUp):
                run_share(shares[0], host.make_meter, take)
        else:
            _run_processes(shares, host.make_meter, take)
    missing = tuple(num_tokens for num_tokens in token_counts if num_tokens not in found)
    return Outcome(file, journal_file(file), dict(sorted(done.items())), missing)


def gpu_meter(workload: Workload, gpu: int, num_gpus: int) -> Meter:
    from graphfuse.tuning.moe_meter import GpuMeter, num_compilers

    return GpuMeter(workload, gpu, num_compilers(num_gpus))


def kernels_version() -> str:
    """Changes with the source of what is timed: trials of other kernels say nothing of these."""
    package = Path(__file__).parent.parent
    kernels = package / "kernels"
    files = [*kernels.glob("moe_*.py"), kernels / "quantise.py", *(package / "ops").glob("moe_launch*.py")]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _method(effort: Effort, workload: Workload) -> str:
    return (
        f"{workload.form}; median of {effort.rounds[-1]} replays of a CUDA graph of calls on uniform and skewed "
        "routings in turn; both products in one call; successive halving behind a cost model"
    )


def _table(plan: Plan, done: dict[int, Best]) -> MoeTable:
    found = sorted(done.items())
    return MoeTable(
        plan.workload.shape,
        tuple((num_tokens, best.tiles) for num_tokens, best in found),
        measured_us=tuple((num_tokens, best.us) for num_tokens, best in found if math.isfinite(best.us)),
    )


def _kept(file: Path, plan: Plan, provenance: Provenance) -> tuple[dict[int, Best], str]:
    """What an existing table has for numbers of tokens that this run may not come to, if it was measured alike, and
    with what effort.

    Raises:
        ConfigError: it is for another shape of the same name: hidden size and top-k are not part of it.
        SchemaError: it is damaged.
    """
    if not file.is_file():
        return {}, ""
    found = Contents.read(JsonObject.read(file)).provenance
    if found is None or (found.hidden_size, found.top_k) != (provenance.hidden_size, provenance.top_k):
        of = f"hidden size {found.hidden_size} and top-{found.top_k}" if found else "a shape that it does not name"
        raise ConfigError(
            f"{file} is there already, for {of}; this run is for hidden size {provenance.hidden_size} and "
            f"top-{provenance.top_k}. Give another --output, or move the file away."
        )
    if found.versions != provenance.versions or found.method.split(";")[0] != plan.workload.form:
        return {}, ""
    table = read_table(file, found.hidden_size, found.top_k)
    us = dict(table.measured_us)
    return {n: Best(tiles, us.get(n, math.inf)) for n, tiles in table.entries}, found.effort


@dataclass(frozen=True)
class _End:
    """A process has nothing more to say."""

    error: GraphfuseError | None = None


def _run_processes(shares: Sequence[Share], make_meter: MakeMeter, take: Callable[[Event], object]) -> None:
    """A process for each share. If one fails the others are ended, and what it raised is raised here."""
    context = multiprocessing.get_context("spawn")  # CUDA does not outlive a fork
    running: dict[Connection, SpawnProcess] = {}
    try:
        for share in shares:
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_run_process, args=(share, make_meter, send))
            process.start()
            send.close()  # so that the end of the process is the end of the pipe
            running[receive] = process
        open_ends = list(running)
        while open_ends:
            for end in wait(open_ends):
                assert isinstance(end, Connection)
                try:
                    event = end.recv()
                except EOFError:
                    running[end].join()
                    gpu = shares[list(running).index(end)].gpu
                    raise BackendUnavailableError(
                        f"The process for GPU {gpu} ended with code {running[end].exitcode}. The lines above may say "
                        "why; start again to go on from what is measured."
                    ) from None
                if isinstance(event, _End):
                    open_ends.remove(end)
                    if event.error is not None:
                        raise event.error
                else:
                    take(event)
    finally:
        _end(list(running.values()))


def _end(processes: Sequence[SpawnProcess]) -> None:
    """SIGTERM lets a process end those that compile for it; one that does not is killed."""
    for process in processes:
        process.terminate()
    until = time.monotonic() + SECONDS_TO_END
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _run_process(share: Share, make_meter: MakeMeter, send: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that writes the files
    signal.signal(signal.SIGTERM, _exit)
    try:
        run_share(share, make_meter, send.send)
    except TimeUp:
        send.send(_End())
    except GraphfuseError as error:
        send.send(_End(error))
    else:
        send.send(_End())
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from here on it ends by itself


def _exit(*_: object) -> None:
    raise SystemExit(0)
