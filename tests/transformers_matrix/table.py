"""docs/transformers.md: one row an architecture, written and read back."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import transformers

from tests.documents import ROOT
from tests.transformers_matrix.measure import LIMIT, SHAPES, TP, Outcome

PATH = ROOT / "docs" / "transformers.md"
HEADER = "| architecture | graphs | all-reduces | fused | merged | declined | experts | largest difference |"
_ROW = re.compile(r"^\| `([\w-]+)` \| (.*) \|$", re.MULTILINE)

INTRODUCTION = """# Models of transformers

`graphfuse.compile(model, tp_group)` takes any model of transformers {version} whose config has a tensor-parallel plan,
shards it by that plan if it is whole, and rewrites its graph:

```python
import torch
from transformers import AutoModelForCausalLM

import graphfuse

model = AutoModelForCausalLM.from_pretrained("path/to/checkpoint").requires_grad_(False)
model = graphfuse.compile(model, tp_group)
print(model.generate(torch.tensor([[1, 2, 3]], device=model.device), max_new_tokens=8))
```

`generate` takes a static cache unless it is told otherwise. Prompts of all lengths run one graph, and the steps behind
them another, on GPUs as a CUDA graph; a batch of another size is compiled anew. On GPUs experts run on graphfuse's
kernels meanwhile, and a chat pipeline around the model uses all of it. Where heads cannot be divided over the ranks the
model is refused, and `generate_batch` (continuous batching) is transformers' own, without these graphs.

Each architecture below was made tiny with random weights, sharded by its own plan at TP {tp}, compiled over gloo ranks
in float32 and run on batches of {shapes} tokens. *graphs*: how many these two took; none had a graph break.
*all-reduces*: in the traced graph; *fused* with a norm behind them; *merged* into another one, so that fewer are left;
*declined*: left as they were, with the reason. *experts*: layers of routed experts that were recognised; on GPUs they
run on graphfuse's kernels. *difference*: of any logit from the whole model's in eager mode, in standard deviations of
the logits; the limit is {limit:g}. Both proofs of graphfuse passed for each.

`python -m tests.transformers_matrix` writes this page; with names of architectures, only their rows.
"""


def row(name: str, outcome: Outcome) -> str:
    return f"| `{name}` | {cells(outcome)} |"


def cells(outcome: Outcome) -> str:
    """A row without its name. Of the difference only the order of magnitude: the rest is not the same everywhere."""
    reasons = "; ".join(f"{count} × {text(reason)}" for reason, count in outcome.declined.items())
    assert outcome.difference is not None
    experts = str(outcome.experts or "")
    difference = "< 1e-5" if outcome.difference < 1e-5 else f"{outcome.difference:.0e}"
    counts = (outcome.num_graphs, outcome.all_reduces, outcome.fused, outcome.merged, reasons)
    return " | ".join([*map(str, counts), experts, difference])


def text(reason: str) -> str:
    """What may stand in a cell."""
    return reason.replace("|", "\\|").replace("\n", " ")


def rows() -> dict[str, str]:
    """The cells of each row of the page as it is."""
    table = PATH.read_text() if PATH.exists() else ""
    return dict(_ROW.findall(table.partition(FAILED)[0]))


def failures() -> dict[str, str]:
    """The architectures that could not be made tiny or compiled, and why, as the page says."""
    table = PATH.read_text() if PATH.exists() else ""
    return dict(_ROW.findall(table.partition(FAILED)[2]))


FAILED = "## Not compiled, and why"


def write(found: dict[str, str], failed: dict[str, str], path: Path = PATH) -> None:
    """The page with these rows."""
    shapes = " and ".join(f"{batch} × {length}" for batch, length in SHAPES)
    lines = [
        INTRODUCTION.format(version=transformers.__version__, tp=TP, shapes=shapes, limit=LIMIT),
        f"## {len(found)} architectures, torch {torch.__version__.split('+')[0]}",
        "",
        HEADER,
        "|---" * HEADER.count(" |") + "|",
        *(f"| `{name}` | {found[name]} |" for name in sorted(found)),
    ]
    if failed:
        lines += ["", FAILED, "", "| architecture | reason |", "|---|---|"]
        lines += [f"| `{name}` | {failed[name]} |" for name in sorted(failed)]
    path.write_text("\n".join(lines) + "\n")
