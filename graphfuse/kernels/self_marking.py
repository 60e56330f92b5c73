"""Rows that carry their own readiness: how data crosses between GPUs in one trip, without flags.

A rank stores its row straight into a peer's memory. The peer knows that an element has arrived when the element is no
longer EMPTY, so no flag follows the data, nothing orders one element against another, and one crossing of the link is
all a value costs.

**The mark.** EMPTY is the bit pattern with all bits set. In float16, bfloat16 and float32 that is a NaN. `encode`
sends a value with that pattern as the NaN with the sign bit clear; every other pattern, negative zero and other NaNs
included, crosses as it is. No sum can tell: NaN plus anything is the same NaN on a GPU, whatever its sign or payload.
So each element of each dtype and each bit pattern is its own mark, and odd hidden sizes need no care.

**Three slots per row.** A row's cells rotate: call e of this row uses slot e mod 3, the number lives on the GPU beside
the buffer (`slots`, one int32 a row, so captured graphs replay correctly and calls with other token counts in between
do no harm: a row counts its own calls), and in call e a reader clears the slot of call e - 1 in its own memory, which
call e + 2 will use next.

**Why no store can be lost or read twice.** Let A clear the cell of call e - 1 in its kernel for call e, and let B be
the rank that writes this cell again, in call e + 2.
  1. A's clearing stores are in A's memory before A's kernel for call e + 1 starts: both run in one stream, and the
     stores of a kernel are performed before the next kernel of its stream starts. Ours, launched as programmatic
     dependents, read and write nothing before `griddepcontrol.wait`, which returns when the kernels before have ended;
     so must any kernel between ours that is launched in that way (the rule for all of them).
  2. B's kernel for call e + 2 starts after B's kernel for call e + 1 ended, for the same reason.
  3. B's kernel for call e + 1 ended only after it had seen a row that A stores in *its* kernel for call e + 1
     (one_shot: every rank waits for every other; two_shot: an owner waits for each contributor and each contributor for
     its owner, and only these pairs write to each other).
  So: clearing (A, call e) → start of call e + 1 on A → its store, seen by B → start of call e + 2 on B → B's store.
  Each arrow is stream order, program order, or reading what was written; and A reads the cell of call e - 1 only in its
  kernel for call e - 1, before the clearing. Within one kernel a row's cell is used once. With two slots instead of
  three the chain would lack step 3: B might write what A has yet to clear.

**What a reader sees.** Loads in the waiting loop are volatile (relaxed, system scope): never kept in a register or in
L1. Stores are plain and aligned, at most 16 bytes a thread; each 16- or 32-bit element arrives whole. The values are
themselves what is waited for, so there is no second location whose order would need a fence: none is issued. Formally
a plain store races with a relaxed load in the PTX model; that an aligned element is stored and loaded in one piece is
how NVIDIA GPUs behave, and what tests/gpu/symm_mem_order.py checks.

**Progress.** Program r of a rank waits only for program r of its peers. Programs of a grid start in rising order (what
single-pass scans rely on too), so the lowest unfinished row is running, or about to, on every rank.

Every rank makes the same calls in the same order on one stream at a time, as with any collective. `SPIN_LIMIT` above 0
bounds the waiting, for debugging: the row number + 1 is stored to `status`, and the result is unspecified.
"""

from __future__ import annotations

from graphfuse.kernels.norm_epilogue import available

SLOTS = 3
EMPTY = -1
"""All bits set, as the signed integer of the element's width."""
STRIDE_ELEMENTS = 16
"""A row's cell begins at a multiple of this many elements, so that 16-byte accesses are aligned."""

if available():
    import triton
    import triton.language as tl

    @triton.jit
    def encode(value, WORD: tl.constexpr):
        """The bits to send for a row's values: what would read as EMPTY is sent as the positive NaN."""
        bits = value.to(WORD, bitcast=True)
        positive = 32767 if WORD.primitive_bitwidth == 16 else 2147483647
        return tl.where(bits == -1, positive, bits).to(WORD)

    @triton.jit
    def region(pointers, rank, WORD: tl.constexpr):
        """The buffer of a rank, as this process addresses it."""
        base = tl.load(pointers + rank).to(tl.pointer_type(WORD))
        return tl.multiple_of(base, 16)

    @triton.jit
    def wait_for_row(cell, inside, status_ptr, row, SPIN_LIMIT: tl.constexpr):
        """The bits of a row once all of them have arrived. `cell` is a block of pointers, masked columns read as 0."""
        bits = tl.load(cell, mask=inside, other=0, volatile=True)
        missing = tl.max((bits == -1).to(tl.int32), axis=0)
        spins = 0
        while missing != 0:
            bits = tl.load(cell, mask=inside, other=0, volatile=True)
            missing = tl.max((bits == -1).to(tl.int32), axis=0)
            if SPIN_LIMIT > 0:
                spins += 1
                if spins >= SPIN_LIMIT:
                    tl.store(status_ptr, row.to(tl.int32) + 1)
                    missing = 0
        return bits

    @triton.jit
    def clear_row(cell, inside, WORD: tl.constexpr, BLOCK_SIZE: tl.constexpr):
        """Make a cell EMPTY for the call after the next."""
        tl.store(cell, tl.full((BLOCK_SIZE,), -1, WORD), mask=inside)
