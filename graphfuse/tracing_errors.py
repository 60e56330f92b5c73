"""What Dynamo says when it cannot trace a model, in words for its author: where, why, and what to do."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import torch
from torch._dynamo import exc
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

TRACING_ERRORS = (exc.TorchDynamoException, GuardOnDataDependentSymNode)
_TORCH = str(Path(torch.__file__).parent)


def model_may_have_raised(error: BaseException) -> bool | None:
    """Whether the model itself raises an error on these inputs: True, False, or None for perhaps (an op that fails on
    tensors without data may work with data)."""
    if isinstance(error.__cause__ or error.__context__, exc.ObservedException):
        return True
    if str(error).lstrip().startswith("Data-dependent assertion failed"):
        return True
    return None if isinstance(error, exc.TorchRuntimeError) else False


def break_text(error: BaseException) -> str:
    """The message of a `GraphBreakError`."""
    remedy = "Rewrite that line with tensor operations, or move it out of forward." if _place(_lines(error)) else ""
    return (
        f"The model cannot be traced as one graph: {summary(error)} {remedy} "
        "torch._dynamo.explain(model)(*inputs) lists every such place."
    )


def summary(error: BaseException) -> str:
    """What went wrong and at which line of the model, in a sentence or two."""
    lines = _lines(error)
    what = lines[0].rstrip(".") if lines else type(error).__name__
    where = f", at {place}" if (place := _place(lines)) else ""
    why = next((line.removeprefix("Explanation:") for line in lines if line.startswith("Explanation:")), "")
    if ": got " in why:  # first the op and its operands, then the error that matters
        why = " " + why.split(": got ", 1)[1].split("\\n", 1)[0]
    return textwrap.shorten(re.sub(r" at 0x[0-9a-f]+", "", f"{what}{where}.{why}"), 500, placeholder=" ...")


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()]


def _place(lines: list[str]) -> str | None:
    """The innermost line of the traced code that is not torch's own: `model.py:12 in forward (x = y.item())`."""
    frames = []
    for line, code in zip(lines, [*lines[1:], ""], strict=True):
        found = re.fullmatch(r'File "(.+)", line (\d+), in (.+)', line)
        if found:
            frames.append((*found.groups(), code))
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)] or frames
    if not own:
        return None
    path, number, function, code = own[-1]
    return f"{path}:{number} in {function} ({code})"
