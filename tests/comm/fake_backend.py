"""A made-up comm backend on gloo ranks, for the pool and dispatch: it fails where it is told to."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from graphfuse.comm.table import SizeRange
from graphfuse.errors import BackendUnavailableError
from graphfuse.gate import Decision
from graphfuse.kernels.norm_epilogue import quantize_fp8

ROW = 8 * 4  # hidden size 8 in float32
FLOAT = {"dtype": torch.float32, "hidden_size": 8, "device": torch.device("cpu")}
REFERENCE = SizeRange(None, "reference")


def decision(max_tokens=4):
    return Decision(
        True, (SizeRange(max_tokens * ROW, "flashinfer", "oneshot"), REFERENCE), ("measured",), "table.json"
    )


@dataclass
class FakeWorkspace:
    group: object
    capacity: int
    fails: tuple = (None, None)
    quantises: bool = False
    reserved: list = field(default_factory=list)
    calls: list = field(default_factory=list)
    closed: bool = False
    breaks: bool = False

    @property
    def num_bytes(self):
        return sum(ROW for _ in self.reserved)

    def reserve(self, request, channel):
        """One exchange, as one that shares memory takes."""
        if self.fails == (channel.rank, "reserve"):
            raise RuntimeError("out of memory")
        channel.exchange("reserved")
        if self.fails == (channel.rank, "end of reserve"):
            raise RuntimeError("out of memory")
        self.reserved.append((request.hidden_size, request.max_bytes, request.variants))

    def accepts(self, call):
        return call.x.dtype == torch.float32

    def run(self, call, variant):
        """A recognisable result: not a norm at all."""
        if self.breaks:
            raise BackendUnavailableError("broken in the middle")
        self.calls.append((variant, call.fp8))
        x = call.x.clone()
        dist.all_reduce(x, group=self.group)
        normed = torch.full_like(x, 42.0)
        return (normed, x) if call.fp8 is None else (normed, x, *quantize_fp8(-normed, call.fp8, call.scale))

    def close(self):
        self.closed = True


@dataclass
class FakeBackend:
    """Creation takes two exchanges, as real ones do. `fails` is (rank, where): refusal, raise, before, between, after
    the exchanges, reserve, end of reserve."""

    fails: tuple = (None, None)
    keeps_workspaces: bool = True
    quantises: bool = False
    made: list = field(default_factory=list)

    def _fail(self, group, where):
        return self.fails == (dist.get_rank(group), where)

    def refusal(self, request):
        if self._fail(request.group, "raise"):
            raise ImportError("no module")
        return "Not enough memory." if self._fail(request.group, "refusal") else None

    def create(self, request, channel):
        for where in ("before", "between"):
            if self._fail(request.group, where):
                raise RuntimeError("out of memory")
            channel.exchange(where)
        if self._fail(request.group, "after"):
            raise RuntimeError("out of memory")
        self.made.append(FakeWorkspace(request.group, request.capacity, self.fails, self.quantises))
        return self.made[-1]
