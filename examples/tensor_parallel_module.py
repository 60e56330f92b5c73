"""A hand-written module, sharded by torch's own tensor parallelism: nothing in it knows of graphfuse.

torchrun --nproc-per-node 2 examples/tensor_parallel_module.py
"""

import copy
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphfuse

HIDDEN, LAYERS = 64, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))
    torch.manual_seed(0)  # the same weights on every rank
    whole = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.RMSNorm(HIDDEN, eps=1e-6)).to(device)
    whole.requires_grad_(False)
    plan = {f"{i}.{name}": style() for i in range(LAYERS) for name, style in STYLES.items()}
    model = parallelize_module(copy.deepcopy(whole), mesh, plan)
    x = torch.randn(3, 5, HIDDEN, device=device)
    with graphfuse.compile(model, mesh) as compiled:
        difference = (compiled(x) - whole(x)).abs().max()
        if dist.get_rank() == 0:
            print(compiled.report)
            print(f"largest difference from the whole model: {difference.item():.1e}")
    dist.destroy_process_group()


STYLES = {"up": ColwiseParallel, "down": RowwiseParallel}

if __name__ == "__main__":
    main()
