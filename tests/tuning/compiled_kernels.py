"""Small kernels for the tests of compiling ahead."""

import os

import triton
import triton.language as tl


@triton.jit
def double(x, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < size, 0.0) * 2, at < size)


@triton.jit
def wrong(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), tl.arange(0, BLOCK) + tl.arange(0, 2 * BLOCK))


STEP = tl.constexpr(2)


@triton.jit
def stepped(value):
    return value + STEP


@triton.jit
def step(x):
    tl.store(x, stepped(tl.load(x)))


@triton.jit
def step_back(x):
    tl.store(x, stepped(tl.load(x)) - 2 * STEP)


class _Aborts:
    """What a compiler does that meets its own assertion."""

    @property
    def fn(self):
        os.abort()


aborts = _Aborts()
