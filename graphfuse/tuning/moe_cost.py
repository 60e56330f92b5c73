"""How long a grouped product may take with a tile: a roofline, for ranking tiles before any is compiled.

    arithmetic   blocks of rows, the empty rest of each included, over what the tensor cores do with blocks so shaped
    memory       weights of the touched experts and activations once, over the bandwidth that loads in flight sustain
    L2 cache     what all programs load together, over its bandwidth
    programs     their number in whole waves, and what each costs to begin and end

Rows of an expert are Poisson-distributed with mean M * K / E, as a uniform router makes them.

Legend: M tokens, K choices per token, E experts, I intermediate, H hidden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from graphfuse.tuning.moe_shared_memory import Limits, shared_memory_bytes
from graphfuse.tuning.moe_tiles import MoeShape, Tile

LATENCY = 0.8e-6
"""Seconds from a load of an H200 to its arrival."""

PROGRAM = 1.5e-6
"""Seconds in which a program begins and ends: addresses, the first load, the last store."""

STEP = 0.04e-6
"""Seconds that a program waits for its own warps in each step over inputs."""

WGMMA_ROWS = 64
"""Rows of Hopper's asynchronous products. Blocks with fewer fall back to the tensor cores' older instructions."""

OLD_INSTRUCTIONS = 0.45
"""Share of the peak that these reach."""

SHARPNESS = 3.0
"""How little of the smaller terms adds to the largest: parts overlap, but never wholly."""


@dataclass(frozen=True)
class Device:
    """What the model knows of a GPU; an H200 unless said otherwise."""

    num_sms: int = 132
    shared_memory: int = 232_448
    """Bytes that a block of threads may have."""

    memory_bandwidth: float = 4.3e12
    l2_bandwidth: float = 7e12
    bf16_flops: float = 790e12

    @classmethod
    def of_current(cls) -> Device:
        """The current CUDA device. Rates grow with its SMs, which is enough for a ranking."""
        import torch

        from graphfuse.tuning.moe_files import device_shared_memory

        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        share = properties.multi_processor_count / cls.num_sms
        return cls(
            properties.multi_processor_count,
            device_shared_memory() or cls.shared_memory,
            cls.memory_bandwidth * share,
            cls.l2_bandwidth * share,
            cls.bf16_flops * share,
        )


@dataclass(frozen=True)
class Product:
    """One of a layer's two grouped products: `[rows, columns]` from `[rows, depth]`."""

    columns: int
    depth: int

    @classmethod
    def of(cls, shape: MoeShape, name: str) -> Product:
        if name == "gate_up":
            return cls(2 * shape.intermediate_size, shape.hidden_size)
        return cls(shape.hidden_size, shape.intermediate_size)


def seconds(shape: MoeShape, num_tokens: int, name: str, tile: Tile, device: Device) -> float:
    """Time of the product `name` ("gate_up" or "down"), as far as a model of a few lines can tell."""
    product, limits = Product.of(shape, name), Limits.of(shape)
    bm, bn, bk = tile.block_size_m, tile.block_size_n, tile.block_size_k
    token_bytes, weight_bytes = limits.token_bytes, limits.weight_bytes
    rows = num_tokens * shape.top_k
    steps = math.ceil(product.depth / bk)
    programs = row_blocks(rows / shape.num_experts, bm) * shape.num_experts * math.ceil(product.columns / bn)
    resident = programs_on_an_sm(tile, limits, device)

    flops = device.bf16_flops * (2 if weight_bytes == 1 else 1) / device.num_sms
    products = math.ceil(programs / device.num_sms) * 2 * bm * bn * bk * steps
    arithmetic = products / (flops * tensor_core_share(tile, name))

    busy = min(device.num_sms, programs)
    at_once = min(resident, max(1, programs / device.num_sms))
    in_flight = busy * at_once * max(tile.num_stages - 1, 0.5) * (bm * token_bytes + bn * weight_bytes) * bk
    sustained = in_flight / LATENCY
    once = (
        touched_experts(shape, num_tokens) * product.columns * product.depth * weight_bytes
        + rows * product.depth * token_bytes
        + rows * product.columns * 2
    )
    memory = once / min(device.memory_bandwidth, sustained)
    cache = programs * (bm * token_bytes + bn * weight_bytes) * bk * steps / min(device.l2_bandwidth, 1.5 * sustained)

    waves = programs / (device.num_sms * resident)
    uneven = math.sqrt(math.ceil(waves) / waves) if waves > 1 else 1.0
    parts = (arithmetic, memory * uneven, cache * uneven)
    return sum(part**SHARPNESS for part in parts) ** (1 / SHARPNESS) + (PROGRAM + STEP * steps) * math.ceil(waves)


def touched_experts(shape: MoeShape, num_tokens: int) -> float:
    """Experts that at least one of the tokens chooses, on average."""
    return shape.num_experts * (1 - (1 - shape.top_k / shape.num_experts) ** num_tokens)


@lru_cache(maxsize=1024)
def row_blocks(mean_rows: float, block_size_m: int) -> float:
    """Blocks of rows that an expert needs, on average."""
    top = math.ceil(mean_rows + 8 * math.sqrt(mean_rows) + 8)
    return sum(
        math.ceil(rows / block_size_m) * math.exp(rows * math.log(mean_rows) - mean_rows - math.lgamma(rows + 1))
        for rows in range(1, top)
    )


def columns_at_once(tile: Tile, name: str) -> int:
    """Columns that an instruction may work on: gate_up multiplies gates and ups apart."""
    return tile.block_size_n // 2 if name == "gate_up" else tile.block_size_n


def tensor_core_share(tile: Tile, name: str) -> float:
    """Share of the tensor cores' peak that a block's shape allows."""
    rows, columns = tile.block_size_m, columns_at_once(tile, name)
    if tile.swap_ab:
        rows, columns = columns, rows
    if rows < WGMMA_ROWS:
        return OLD_INSTRUCTIONS
    # Both operands come from shared memory: few columns for 64 rows keep it busier than the tensor cores.
    return min(1.0, 2 * columns / (WGMMA_ROWS + columns))


def accumulators(tile: Tile) -> float:
    """Registers of a thread that hold the block of results."""
    return tile.block_size_m * tile.block_size_n / (32 * tile.num_warps)


def programs_on_an_sm(tile: Tile, limits: Limits, device: Device) -> int:
    """Programs that fit beside each other: by shared memory, by registers, and by threads."""
    by_memory = device.shared_memory // max(shared_memory_bytes(tile, limits), 1)
    by_registers = 65_536 / (32 * tile.num_warps * min(accumulators(tile) + 64, 255))
    return max(1, min(by_memory, int(by_registers), 2048 // (32 * tile.num_warps)))
