"""Compile a model of transformers, sharded by its own tensor-parallel plan, and compare with the model as it is.

    torchrun --nproc-per-node 2 examples/compile_transformers.py [CHECKPOINT]

Without a checkpoint a tiny random Llama is made. Loading over several ranks needs the package `accelerate`.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed.configuration_utils import DistributedConfig

import graphfuse


def make_tiny_checkpoint(folder: str) -> str:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def main() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with tempfile.TemporaryDirectory() as folder:
        path = sys.argv[1] if len(sys.argv) > 1 else make_tiny_checkpoint(folder)  # each rank its own
        dist.init_process_group()
        plan = DistributedConfig(tp_size=dist.get_world_size())
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=plan).eval().requires_grad_(False)
    input_ids = torch.arange(1, 9, device=model.device)[None]  # [1, 8]
    with graphfuse.compile(model, dist.group.WORLD) as compiled:
        logits = compiled(input_ids, use_cache=False).logits  # [1, 8, V]
        difference = (logits - model(input_ids, use_cache=False).logits).abs().max()
        if dist.get_rank() == 0:
            print(compiled.report)
            print(f"largest difference of a logit: {difference.item():.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
