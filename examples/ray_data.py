"""Complete a data set with Ray Data, a tensor-parallel group in each actor (pip install "graphfuse[ray]").

python examples/ray_data.py CHECKPOINT 2        # two ranks an actor: on GPUs where there are any
"""

import sys

import ray
import torch

from graphfuse import SamplingParams
from graphfuse.integrations.ray_data import TextGenerator


def main(path: str, tp: int) -> None:
    rows = [{"number": i, "prompt": f"Tell me about the number {i}."} for i in range(8)]
    answers = ray.data.from_items(rows).map_batches(
        TextGenerator,
        fn_constructor_kwargs={"model": path, "tp": tp, "params": SamplingParams(max_tokens=16)},
        num_gpus=tp if torch.cuda.is_available() else 0,
        concurrency=1,  # as many actors, each with a model of its own
        batch_size=4,
    )
    for row in answers.take_all():
        print(f"{row['number']}: {row['text']!r} ({row['finish_reason'] or row['error']})")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
