"""Trying something on every rank of a group, with one outcome: what fails on one rank has failed on all."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from graphfuse.comm.control import ControlChannel
from graphfuse.errors import GroupError

T = TypeVar("T")

# One rank may compile a kernel that the others have in their cache.
PATIENCE = timedelta(minutes=5)


def attempt(channel: ControlChannel, action: Callable[[], T]) -> tuple[T | None, str | None]:
    """(what `action` returns, None), or (None, why it failed), the same kind on every rank. Collective.

    Raises:
        GroupError: a rank did not answer.
    """
    result = reason = None
    try:
        result = action()
    except GroupError:
        raise  # the ranks have parted ways; another exchange would only wait for them
    except Exception as error:  # whatever it was, the peers must hear of it
        lines = str(error).strip().splitlines() or [""]
        reason = f"{type(error).__name__}: {lines[0]}"
    reasons = channel.exchange(reason, PATIENCE)
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text is not None]
    if not failures:
        return result, None
    return None, reasons[0] if len(set(reasons)) == 1 else "; ".join(failures)
