"""Compile the Triton kernels of many candidates at once.

Compiling is mostly MLIR passes and ptxas, both of which run without Python's lock, so threads share it out over the
cores (Triton 3.6: two cores compiled 12 kernels in 1.7 s instead of 3.1; a sixth of the time is Python, so that many
cores end it five times as soon at most). Each call is made, not only compiled: what needs more shared memory than there
is fails here, and is known before anything is timed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

MAX_THREADS = 16
"""More would mostly wait for Python's lock, and each may hold a call's intermediate results."""


def precompile(calls: Sequence[Callable[[], object]], *, max_threads: int | None = None) -> list[Exception | None]:
    """Make each call once, in threads, on the current device and its default stream.

    The first one that succeeds is made alone: it compiles what all have in common, such as the kernels' launchers.

    Args:
        calls: those that need the same kernel should stand here once, or each compiles it.

    Returns:
        What each call raised, in their order; None where it went well.
    """
    outcomes: list[Exception | None] = []
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def attempt(call: Callable[[], object]) -> Exception | None:
        try:
            with torch.no_grad():  # both belong to a thread
                if device is not None:
                    torch.cuda.set_device(device)
                call()
        except Exception as error:  # whatever is wrong with one candidate, the others go on
            return error
        return None

    while len(outcomes) < len(calls) and (not outcomes or outcomes[-1] is not None):
        outcomes.append(attempt(calls[len(outcomes)]))
    threads = max_threads or min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        outcomes += pool.map(attempt, calls[len(outcomes) :])
    if device is not None:
        torch.cuda.synchronize()
    return outcomes
