"""Complete a list of prompts; the same program runs on every rank.

python examples/generate_offline.py CHECKPOINT                             # one process
torchrun --nproc-per-node 2 examples/generate_offline.py CHECKPOINT        # two ranks
"""

import os
import sys

import torch
import torch.distributed as dist

import graphfuse

PROMPTS = ["Once upon a time", "The three primary colours are", "To make tea, first"]


def main(path: str) -> None:
    tp_group = None
    if "WORLD_SIZE" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
        tp_group = dist.group.WORLD
    params = graphfuse.SamplingParams(max_tokens=32, temperature=0.8, top_p=0.95, seed=0)
    with graphfuse.LLM(path, tp_group, max_batch_size=16) as llm:
        completions = llm.generate(PROMPTS, params)
        if tp_group is None or dist.get_rank() == 0:
            for prompt, completion in zip(PROMPTS, completions, strict=True):
                print(f"{prompt!r} -> {completion.text!r} ({completion.finish_reason})")
            print(llm.stats.to_text())
    if tp_group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
