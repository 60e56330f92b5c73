"""Compile Triton kernels for this GPU in other processes, ahead of their first launch.

    collect(launch)    the kernels that a function would compile, found by letting Triton stop short of compiling
    Compilers          a process a core: each compiles into Triton's cache on disk, and never touches the GPU
    first launch       finds its kernel in the cache

Processes, because half of the time goes into Triton's Python code, which threads of one process would take turns in,
and because a compiler that aborts must not end the tuner.

`jit_cache_hook` and `preload` are what Triton (3.6 to 3.9) has for this; `preload` asks the driver for the device to
compile for, so the processes put one in its place that only names it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from graphfuse.errors import brief

PATIENCE = 120.0
"""Seconds after which a kernel counts as one that cannot be compiled."""


@dataclass(frozen=True)
class Kernel:
    """A kernel to compile: where its function is, and what Triton says of the arguments."""

    module: str
    function: str
    specialization: str
    target: tuple[str, Any, int]
    """Backend, architecture and warp size."""


def collect(launch: Callable[[], object]) -> list[Kernel]:
    """The kernels that `launch` would have to compile. None of these is compiled or launched; others are launched, so
    call this where launches do nothing, as in the capture of a CUDA graph that is thrown away."""
    from triton import knobs
    from triton.runtime.driver import driver

    target = driver.active.get_current_target()
    found: dict[Kernel, None] = {}

    def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        settle_key(fn.jit_function)
        kernel = Kernel(
            fn.module, fn.name, compile["specialization_data"], (target.backend, target.arch, target.warp_size)
        )
        found[kernel] = None
        return True  # do not compile

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = hook
    try:
        launch()
    finally:
        knobs.runtime.jit_cache_hook = before
    return list(found)


class Compilers:
    """Processes that compile."""

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._pool: ProcessPoolExecutor | None = None
        self._futures: dict[Kernel, Future[str]] = {}
        self._outcomes: dict[Kernel, str] = {}

    def submit(self, kernels: Iterable[Kernel]) -> None:
        """Begin with these, if nothing else is waiting."""
        for kernel in kernels:
            if kernel not in self._futures and kernel not in self._outcomes:
                self._pool = self._pool or _new_pool(self._num_processes)
                try:
                    self._futures[kernel] = self._pool.submit(compile_kernel, kernel)
                except BrokenProcessPool:  # found out by whoever waits
                    self._futures[kernel] = Future()
                    self._futures[kernel].set_exception(BrokenProcessPool())

    def wait(self, kernels: Iterable[Kernel]) -> dict[Kernel, str]:
        """For each kernel, when all are done, what kept it from being compiled, or ""."""
        kernels = list(dict.fromkeys(kernels))
        self.submit(kernels)
        suspects = [kernel for kernel in kernels if not self._is_done(kernel)]
        if suspects:
            # One of the kernels under way ended its process, and with it the pool. Each by itself tells which it was.
            self.close()
            with ThreadPoolExecutor(self._num_processes) as threads:
                self._outcomes.update(zip(suspects, threads.map(_compile_apart, suspects), strict=True))
        return {kernel: self._outcomes[kernel] for kernel in kernels}

    def close(self) -> None:
        """End the processes, whatever they are at."""
        pool, self._pool = self._pool, None
        self._futures.clear()
        if pool is not None:
            processes = list((pool._processes or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()

    def _is_done(self, kernel: Kernel) -> bool:
        """Whether there is an outcome, after waiting for it; there is none if the pool broke."""
        if kernel not in self._outcomes:
            try:
                self._outcomes[kernel] = _result(self._futures.pop(kernel))
            except BrokenProcessPool:
                return False
        return True


def compile_kernel(kernel: Kernel) -> str:
    """Compile into the cache on disk; returns what went wrong, or ""."""
    from triton.runtime.jit import JITFunction

    try:
        function = getattr(importlib.import_module(kernel.module), kernel.function)
        while not isinstance(function, JITFunction):  # behind decorators such as triton.heuristics
            function = function.fn
        _set_target(kernel.target)
        settle_key(function)
        function.preload(kernel.specialization)
    except Exception as error:
        return f"{type(error).__name__}: {brief(error, 300)}"
    return ""


def settle_key(function: Any) -> str:
    """The key of a function in Triton's cache, after those of all that it calls.

    Triton 3.6 makes another key of a function if those that it calls have none yet: a process that ran other kernels
    before would not find what a compiler stored.
    """
    from triton.runtime.jit import JITCallable

    for name in function.fn.__code__.co_names:
        called = function.fn.__globals__.get(name)
        if isinstance(called, JITCallable) and called is not function:
            settle_key(called)
    return function.cache_key


class _Target:
    """In place of Triton's driver: says what to compile for, and has no device."""

    def __init__(self, target: tuple[str, Any, int]) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget(*target)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _set_target(target: tuple[str, Any, int]) -> None:
    from triton.runtime.driver import driver

    driver.set_active(_Target(target))


def _new_pool(num_processes: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("forkserver")  # imports torch once, and has no GPU to lose in a fork
    context.set_forkserver_preload(["torch", "triton", __name__])
    ours = {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}
    return ProcessPoolExecutor(num_processes, context, initializer=_begin, initargs=(ours,))


def _compile_apart(kernel: Kernel) -> str:
    compilers = Compilers(1)
    try:
        compilers.submit([kernel])
        return _result(compilers._futures[kernel])
    except BrokenProcessPool:
        return "the compiler ended its process"
    finally:
        compilers.close()


def _result(future: Future[str]) -> str:
    try:
        return future.result(PATIENCE)
    except TimeoutError:
        return f"it compiles for more than {PATIENCE:.0f} s"


def _begin(environment: dict[str, str]) -> None:
    """Compile as this process would (the server's environment is that of its start). Leave Ctrl-C to the tuner, and end
    with it."""
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
