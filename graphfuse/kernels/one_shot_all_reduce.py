"""One-shot fused all-reduce: each rank pushes its rows to every peer, sums what arrives, adds, normalises.

Equivalent eager code, on every rank:

    total = x_of_rank_0.float()
    for rank in 1 .. world_size - 1: total = total + x_of_rank.float()       # always in rank order: ranks agree bitwise
    total = total.to(dtype)
    normed, r, ... = the epilogue of `graphfuse.kernels.norm_epilogue`

The message crosses each link once, and one kernel does everything: x is read where its producer left it (the push is
the copy into shared memory, so there is no other), and the residual and the weight are loaded while the rows are on
their way. At two ranks the sum is rounded once from an exact float32 addition, as NCCL's is: bitwise equal.

Buffer of a rank, in elements: [3 slots][world_size - 1 senders][rows][stride]. One program is one row. How rows carry
their readiness, and why three slots do: `graphfuse.kernels.self_marking`.
"""

from __future__ import annotations

from graphfuse.kernels.norm_epilogue import available

if available():
    import triton
    import triton.language as tl

    from graphfuse.kernels.norm_epilogue import add_norm_store
    from graphfuse.kernels.self_marking import clear_row, encode, region, wait_for_row

    @triton.jit
    def sender_cell(slot, sender, row, rows, stride, SENDERS: tl.constexpr):
        """Offset of the cell where a sender's row lies."""
        return ((slot * SENDERS + sender).to(tl.int64) * rows + row) * stride

    @triton.jit
    def one_shot_all_reduce(
        x_ptr,
        residual_ptr,
        weight_ptr,
        normed_ptr,
        summed_ptr,
        quantised_ptr,
        scale_ptr,
        pointers,
        slots_ptr,
        status_ptr,
        rows,
        stride,
        hidden_size,
        eps,
        weight_bias,
        WORD: tl.constexpr,
        RANK: tl.constexpr,
        WORLD_SIZE: tl.constexpr,
        HAS_RESIDUAL: tl.constexpr,
        HAS_WEIGHT: tl.constexpr,
        CAST_BEFORE_WEIGHT: tl.constexpr,
        FP8: tl.constexpr,
        SPIN_LIMIT: tl.constexpr,
        DEPENDENT_LAUNCH: tl.constexpr,
        MORE_TO_COME: tl.constexpr,
        BLOCK_SIZE: tl.constexpr,
    ):
        """Grid (tokens,), tokens <= rows. `pointers` are the ranks' buffers, `slots` one int32 a row."""
        if DEPENDENT_LAUNCH:
            tl.extra.cuda.gdc_wait()
            if MORE_TO_COME:
                tl.extra.cuda.gdc_launch_dependents()
        SENDERS: tl.constexpr = WORLD_SIZE - 1
        dtype = normed_ptr.dtype.element_ty
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK_SIZE)
        inside = column < hidden_size
        offset = row * hidden_size

        slot = tl.load(slots_ptr + row)
        mine = tl.load(x_ptr + offset + column, mask=inside, other=0.0)
        bits = encode(mine, WORD)
        for peer in tl.static_range(WORLD_SIZE):
            if peer != RANK:
                cell = sender_cell(slot, RANK if peer > RANK else RANK - 1, row, rows, stride, SENDERS)
                tl.store(region(pointers, peer, WORD) + cell + column, bits, mask=inside)

        residual = mine
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + offset + column, mask=inside, other=0.0)
        weight = mine
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + column, mask=inside, other=0.0)

        own = region(pointers, RANK, WORD)
        done = (slot + 2) % 3
        for rank in tl.static_range(WORLD_SIZE):
            if rank == RANK:
                value = mine
            else:
                sender = rank if rank < RANK else rank - 1
                cell = sender_cell(slot, sender, row, rows, stride, SENDERS)
                value = wait_for_row(own + cell + column, inside, status_ptr, row, SPIN_LIMIT).to(dtype, bitcast=True)
                old = sender_cell(done, sender, row, rows, stride, SENDERS)
                clear_row(own + old + column, inside, WORD, BLOCK_SIZE)
            if rank == 0:
                total = value.to(tl.float32)
            else:
                total += value.to(tl.float32)
        tl.store(slots_ptr + row, (slot + 1) % 3)

        add_norm_store(
            total.to(dtype),
            residual,
            weight,
            row,
            column,
            inside,
            normed_ptr,
            summed_ptr,
            quantised_ptr,
            scale_ptr,
            hidden_size,
            eps,
            weight_bias,
            HAS_RESIDUAL,
            HAS_WEIGHT,
            CAST_BEFORE_WEIGHT,
            True,
            FP8,
            BLOCK_SIZE,
        )
