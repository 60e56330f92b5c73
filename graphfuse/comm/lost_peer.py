"""Errors that come from elsewhere: what a communicator says when a peer is lost, and an error for another thread."""

from __future__ import annotations

import ctypes

import torch.distributed as dist

from graphfuse.errors import GroupError

_SIGNS = ("gloo", "Connection closed by peer", "Connection reset", "NCCL", "Broken pipe")


def is_of_the_communicator(error: BaseException) -> bool:
    """Whether an error is what gloo, NCCL or the store say when a peer is lost."""
    if isinstance(error, GroupError):
        return False
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
    )


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
