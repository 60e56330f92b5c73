"""Symmetric memory for ranks on the CPU: files that every rank maps. It stands in for the GPUs' peer access."""

import tempfile
from pathlib import Path

import torch

from graphfuse.comm.control import STEP_TIMEOUT
from graphfuse.comm.symmetric_memory import SymmetricBuffer


def allocate(num_elements, dtype, group, device, channel):
    """As `graphfuse.comm.symmetric_memory.allocate`, over mapped files."""
    folder = channel.exchange(tempfile.mkdtemp() if channel.rank == 0 else None, STEP_TIMEOUT)[0]
    file = Path(folder) / str(channel.rank)
    file.write_bytes(b"\xff" * (num_elements * dtype.itemsize))
    channel.exchange("filled", STEP_TIMEOUT)
    mapped = [
        torch.from_file(str(Path(folder) / str(rank)), shared=True, size=num_elements, dtype=dtype)
        for rank in range(channel.size)
    ]
    channel.exchange("mapped", STEP_TIMEOUT)
    file.unlink()
    pointers = torch.tensor([tensor.data_ptr() for tensor in mapped], dtype=torch.int64)
    return SymmetricBuffer(mapped[channel.rank], pointers, mapped)
