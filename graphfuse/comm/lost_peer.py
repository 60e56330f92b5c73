"""What shows that a peer is lost: errors of the communicator, a GPU that does not finish. And how to tell a thread."""

from __future__ import annotations

import contextlib
import ctypes

import torch
import torch.distributed as dist

from graphfuse.errors import GroupError

_SIGNS = ("gloo", "Connection closed by peer", "Connection reset", "Broken pipe", "NCCL", "CUDA error")


def is_of_the_communicator(error: BaseException) -> bool:
    """Whether an error is what gloo, NCCL, the store or a GPU say when a peer is lost; perhaps for another reason."""
    if isinstance(error, GroupError):
        return False
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
    )


def is_idle(stream: torch.cuda.Stream) -> bool:
    """Whether all work of a stream has ended; not so if it does not say."""
    try:
        return stream.query()
    except RuntimeError:  # an error of the GPU, or a graph is being captured
        return False


def synchronize(device: int) -> None:
    """Wait until a GPU has finished what it had been given, for as long as that takes: to be run in a thread."""
    with contextlib.suppress(RuntimeError):  # an error of the GPU is an end too
        torch.cuda.synchronize(device)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, shortened."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""


def raise_in(thread_id: int, message: str) -> None:
    """Raise `GroupError` in another thread, at its next line of Python. What is not Python is not interrupted."""

    class Told(GroupError):
        def __init__(self) -> None:
            super().__init__(message)

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(Told, name, getattr(GroupError, name))
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(Told))
