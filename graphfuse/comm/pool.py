"""The workspaces of this process: made together or not at all, shared between compiled models, kept for the next one.

`prepare` is collective. The ranks compare their ranges, which size tables on some ranks only would part, then vote
twice: before making a workspace ("I can"), and after ("I did"). A rank that cannot, or fails halfway, posts that into
the vote its peers wait in, so that all of them fall back to the reference backend at once and for the same reason. A
rank that does not answer at all is an error on the others, not a fallback: what it does later is unknown.

    equal? ──► vote: can ──► create (reuse when large enough on every rank) ──► vote: did ──► active ranges for dispatch

Workspaces are keyed by the group's ranks, dtype and comm backend, and grow for a second model that needs more; the
smaller one stays alive, since captured CUDA graphs of the first model hold its addresses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes

from graphfuse.comm.control import ARRIVAL_TIMEOUT, STEP_TIMEOUT, ControlChannel, PeerFailed, control_channel
from graphfuse.comm.flashinfer import FlashInferBackend
from graphfuse.comm.symm_mem import SymmMemBackend
from graphfuse.comm.table import REFERENCE_ONLY, TABLE_FOLDER_VARIABLE, SizeRange
from graphfuse.comm.workspace import Backend, Workspace, WorkspaceRequest
from graphfuse.errors import ConfigError, GroupError
from graphfuse.gate import Decision

ActiveKey = tuple[str, torch.dtype, int]
WorkspaceKey = tuple[tuple[int, ...], torch.dtype, str]


@dataclass
class Active:
    """What dispatch finds for one (group name, dtype, hidden size), and how many compiled models want it."""

    requested: tuple[SizeRange, ...]
    ranges: tuple[SizeRange, ...]
    workspaces: dict[str, Workspace]
    users: int = 0


@dataclass
class Pool:
    """Workspaces and active ranges. One per process (`process_pool`); tests make their own."""

    backends: Mapping[str, Backend]
    _workspaces: dict[WorkspaceKey, Workspace] = field(default_factory=dict)
    _active: dict[ActiveKey, Active] = field(default_factory=dict)

    def prepare(
        self,
        group: ProcessGroup,
        decision: Decision,
        *,
        dtype: torch.dtype,
        hidden_size: int,
        device: torch.device | None = None,
    ) -> Decision:
        """Make ready what the decision's ranges need, and activate them for dispatch. See `prepare` below."""
        # The ranks of a fake group (tests, `explain`) do not exist: nothing to vote with, nothing to make.
        if not decision.allowed or dist.get_backend(group) == "fake":
            return decision
        key = (group.group_name, dtype, hidden_size)
        conflict = self._conflict(key, decision)
        wanted = _wanted(decision.ranges, hidden_size * dtype.itemsize)
        device = device or _current_device()
        if not wanted and device.type == "cpu":  # no rank on the CPU has anything else: nothing to vote about
            if conflict:
                raise ConfigError(conflict)
            self._activate(key, decision.ranges, decision.ranges, {})
            return decision
        channel = control_channel(group)
        answers = channel.exchange((decision.ranges, conflict))
        _require_equal([ranges for ranges, _ in answers])
        conflicts = [other for _, other in answers if other]
        if conflicts:
            raise ConfigError(conflicts[0])
        made: dict[str, Workspace] = {}
        outcome = decision
        for name, variants in wanted.items():
            request = WorkspaceRequest(group, dtype, hidden_size, _largest(variants), device, variants)
            try:
                made_or_reason = self._vote_and_make(name, request, channel)
            except BaseException:
                self._close_unused(made)
                raise
            if isinstance(made_or_reason, str):
                reason = f"All ranks use the reference backend, because {name} could not be set up: {made_or_reason}"
                outcome = dataclasses.replace(
                    decision, ranges=REFERENCE_ONLY, reasons=(*decision.reasons, reason), table=None
                )
                self._close_unused(made)
                made = {}
                break
            made[name] = made_or_reason
        self._activate(key, decision.ranges, outcome.ranges, made)
        return dataclasses.replace(outcome, workspace_bytes={name: w.num_bytes for name, w in made.items()})

    def release(self, group: ProcessGroup, *, dtype: torch.dtype, hidden_size: int) -> None:
        """One compiled model less needs these ranges. The last one takes them, and workspaces nobody uses, away."""
        key = (group.group_name, dtype, hidden_size)
        active = self._active.get(key)
        if active is None:
            return
        active.users -= 1
        if active.users > 0:
            return
        del self._active[key]
        self._close_unused(active.workspaces)

    def _close_unused(self, workspaces: dict[str, Workspace]) -> None:
        used = [id(workspace) for active in self._active.values() for workspace in active.workspaces.values()]
        for name, workspace in workspaces.items():
            if id(workspace) not in used and not self.backends[name].keeps_workspaces:
                workspace.close()
                self._workspaces = {k: w for k, w in self._workspaces.items() if w is not workspace}

    def active(self, group_name: str, dtype: torch.dtype, hidden_size: int) -> Active | None:
        """What is active for a fused op's tensors, if anything."""
        return self._active.get((group_name, dtype, hidden_size))

    def _conflict(self, key: ActiveKey, decision: Decision) -> str | None:
        active = self._active.get(key)
        if active is None or active.requested == decision.ranges:
            return None
        return (
            f"Another compiled model uses the same group, dtype {key[1]} and hidden size {key[2]} with other comm "
            "backends. Close it first (model.close()), or compile both with the same allreduce setting."
        )

    def _activate(
        self,
        key: ActiveKey,
        requested: tuple[SizeRange, ...],
        ranges: tuple[SizeRange, ...],
        workspaces: dict[str, Workspace],
    ) -> None:
        users = self._active[key].users if key in self._active else 0
        self._active[key] = Active(requested, ranges, workspaces, users + 1)

    def _vote_and_make(self, name: str, request: WorkspaceRequest, channel: ControlChannel) -> Workspace | str:
        """The workspace, or the reason (equal on every rank) why no rank has it."""
        backend = self.backends[name]
        key = (tuple(dist.get_process_group_ranks(request.group)), request.dtype, name)
        workspace = self._workspaces.get(key)
        try:
            refusal = _refusal(backend, request)
            if refusal:
                return channel.fail(refusal, ARRIVAL_TIMEOUT)
            capacities = channel.exchange(workspace.capacity if workspace else 0)
        except PeerFailed as failure:
            return str(failure)
        fresh = None
        try:
            # Compilers have fake-tensor modes on around this; the workspace is real memory.
            with _disable_current_modes(), torch.no_grad():
                if workspace is None or min(capacities) < request.capacity:
                    workspace = fresh = backend.create(request, channel)
                workspace.reserve(request, channel)
            channel.exchange("did", STEP_TIMEOUT)
            self._workspaces[key] = workspace
            fresh = None
            return workspace
        except PeerFailed as failure:
            return str(failure)
        except GroupError:
            raise
        except Exception as error:  # out of memory, a driver error: whatever it was, the peers must hear of it
            return channel.fail(f"{type(error).__name__}: {error}")
        finally:  # also after Ctrl-C
            if fresh is not None:
                fresh.close()


def _current_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _refusal(backend: Backend, request: WorkspaceRequest) -> str | None:
    """The backend's refusal, or the error it met while looking, which must not keep this rank from the vote."""
    try:
        return backend.refusal(request)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _require_equal(ranges_of_ranks: list[tuple[SizeRange, ...]]) -> None:
    """Raise `ConfigError`, alike on every rank, unless all ranks decided on the same ranges."""
    ranks_with: dict[tuple[SizeRange, ...], list[int]] = {}
    for rank, ranges in enumerate(ranges_of_ranks):
        ranks_with.setdefault(ranges, []).append(rank)
    if len(ranks_with) == 1:
        return
    sides = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: "
        + ", ".join(r.label if r.max_bytes is None else f"{r.label} up to {r.max_bytes} bytes" for r in ranges)
        for ranges, ranks in ranks_with.items()
    )
    raise ConfigError(
        f"The ranks chose different comm backends ({sides}). Give every rank the same allreduce setting, and let "
        f"{TABLE_FOLDER_VARIABLE} name the same tables on each of them, or on none."
    )


def _wanted(ranges: tuple[SizeRange, ...], row_bytes: int) -> dict[str, tuple[tuple[str | None, int | None], ...]]:
    """The backends that need a workspace, each with its variants and their largest messages (None: any size).

    A range that ends below one row, which a table measured at a smaller hidden size can have, counts as one row.
    """
    wanted: dict[str, dict[str | None, int | None]] = {}
    for size_range in ranges:
        if size_range.backend != "reference":
            limit = None if size_range.max_bytes is None else max(size_range.max_bytes, row_bytes)
            wanted.setdefault(size_range.backend, {})[size_range.variant] = limit
    return {backend: tuple(variants.items()) for backend, variants in wanted.items()}


def _largest(variants: tuple[tuple[str | None, int | None], ...]) -> int | None:
    limits = [limit for _, limit in variants if limit is not None]
    return max(limits) if len(limits) == len(variants) else None


process_pool = Pool({"flashinfer": FlashInferBackend(), "symm_mem": SymmMemBackend()})


def prepare(
    group: ProcessGroup,
    decision: Decision,
    *,
    dtype: torch.dtype,
    hidden_size: int,
    device: torch.device | None = None,
) -> Decision:
    """Make the workspaces of a decision and activate its ranges. Collective, outside CUDA-graph capture.

    Args:
        group: the tensor-parallel group; each of its ranks calls with an equal decision. Only on the CPU, with the
            reference at every size, is no other rank waited for.
        decision: from `graphfuse.gate.decide`. One that is not allowed is returned as it is.
        dtype, hidden_size: of the reduced tensors.
        device: where this rank computes; default: the current CUDA device, if there is one.

    Returns:
        The decision in force, equal on every rank: as given, or reference only, with the reason, when a rank could not
        make its workspace. Each call is undone by one `release`.

    Raises:
        ConfigError: another open model uses the same group, dtype and hidden size with other ranges, or the ranks'
            decisions differ.
        GroupError: a rank did not answer.
    """
    return process_pool.prepare(group, decision, dtype=dtype, hidden_size=hidden_size, device=device)


def release(group: ProcessGroup, *, dtype: torch.dtype, hidden_size: int) -> None:
    """Undo one `prepare`. Local: no other rank is waited for."""
    process_pool.release(group, dtype=dtype, hidden_size=hidden_size)
