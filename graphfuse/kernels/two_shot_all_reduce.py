"""Two-shot fused all-reduce: each row goes to its owner, which sums it and pushes the sum back to everybody.

Equivalent eager code: as for one_shot (`graphfuse.kernels.one_shot_all_reduce`), and bitwise the same results: the
owner sums in rank order in float32 and rounds once. Row r belongs to rank r mod world_size, so any token count is split
evenly to within a row. A link carries 2 (n - 1) / n of the message instead of n - 1 times, at the price of a second
crossing: worth it from three ranks on, for messages that fill the links. Only the rounded sum travels back; adding the
residual and normalising is done by every rank for every row, which costs less than sending two values.

All of it is one kernel: rows are independent, so while one waits for its sum, others are being pushed.

Buffer of a rank, in elements: [3 slots][world_size - 1 senders][owned rows][stride] for what it owns, and behind it
[3 slots][rows][stride] for the sums it receives. The protocol is that of `graphfuse.kernels.self_marking`.
"""

from __future__ import annotations

from graphfuse.kernels.norm_epilogue import available

if available():
    import triton
    import triton.language as tl

    from graphfuse.kernels.norm_epilogue import add_norm_store
    from graphfuse.kernels.one_shot_all_reduce import sender_cell
    from graphfuse.kernels.self_marking import clear_row, encode, region, wait_for_row

    @triton.jit
    def two_shot_all_reduce(
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
        """Grid (tokens,), tokens <= rows, and rows a multiple of world_size. Arguments as in `one_shot_all_reduce`."""
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
        owner = (row % WORLD_SIZE).to(tl.int32)
        owned_row = row // WORLD_SIZE
        owned_rows = rows // WORLD_SIZE
        sums = SENDERS * owned_rows * stride * 3  # where the received sums begin

        slot = tl.load(slots_ptr + row)
        done = (slot + 2) % 3
        own = region(pointers, RANK, WORD)
        mine = tl.load(x_ptr + offset + column, mask=inside, other=0.0)
        if owner != RANK:
            cell = sender_cell(slot, tl.where(owner > RANK, RANK, RANK - 1), owned_row, owned_rows, stride, SENDERS)
            tl.store(region(pointers, owner, WORD) + cell + column, encode(mine, WORD), mask=inside)

        residual = mine
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + offset + column, mask=inside, other=0.0)
        weight = mine
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + column, mask=inside, other=0.0)

        result = sums + (slot.to(tl.int64) * rows + row) * stride + column
        if owner == RANK:
            for rank in tl.static_range(WORLD_SIZE):
                if rank == RANK:
                    value = mine
                else:
                    sender = rank if rank < RANK else rank - 1
                    cell = sender_cell(slot, sender, owned_row, owned_rows, stride, SENDERS)
                    bits = wait_for_row(own + cell + column, inside, status_ptr, row, SPIN_LIMIT)
                    value = bits.to(dtype, bitcast=True)
                    old = sender_cell(done, sender, owned_row, owned_rows, stride, SENDERS)
                    clear_row(own + old + column, inside, WORD, BLOCK_SIZE)
                if rank == 0:
                    wide = value.to(tl.float32)
                else:
                    wide += value.to(tl.float32)
            total = wide.to(dtype)
            sum_bits = encode(total, WORD)
            for peer in tl.static_range(WORLD_SIZE):
                if peer != RANK:
                    tl.store(region(pointers, peer, WORD) + result, sum_bits, mask=inside)
        else:
            bits = wait_for_row(own + result, inside, status_ptr, row, SPIN_LIMIT)
            total = bits.to(dtype, bitcast=True)
            old_result = sums + (done.to(tl.int64) * rows + row) * stride + column
            clear_row(own + old_result, inside, WORD, BLOCK_SIZE)
        tl.store(slots_ptr + row, (slot + 1) % 3)

        add_norm_store(
            total,
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
