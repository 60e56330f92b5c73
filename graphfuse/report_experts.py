"""What became of every layer of routed experts of a model, for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

LOWERED, DECLINED = "lowered", "declined"


@dataclass(frozen=True)
class ExpertsReport:
    """One layer of experts. Sizes are those of a rank; None where the layer was not recognised so far."""

    module: str
    status: str
    """"lowered": to Triton kernels; "declined": it runs on PyTorch's kernels."""

    experts: int | None = None
    intermediate: int | None = None
    hidden: int | None = None
    top_k: int | None = None
    dtype: str | None = None
    """The tokens' dtype, or for quantised experts what tuning files call it, such as fp8_w8a8."""

    block_shape: tuple[int, int] | None = None
    config: str | None = None
    """The file that launch parameters come from, or "heuristic"; None where it was declined."""

    files: tuple[str, ...] = ()
    """Paths of all files that were read."""

    notes: tuple[str, ...] = ()
    """What stood in for a file that is not there, what was ignored or made smaller."""

    declines: tuple[Any, ...] = ()
    """The reasons, by rule (`DeclineReport`)."""

    def to_json(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "status": self.status,
            "experts": self.experts,
            "intermediate": self.intermediate,
            "hidden": self.hidden,
            "top_k": self.top_k,
            "dtype": self.dtype,
            "block_shape": list(self.block_shape) if self.block_shape else None,
            "config": self.config,
            "files": list(self.files),
            "notes": list(self.notes),
            "declines": [{"rule": d.rule, "reason": d.reason} for d in self.declines],
        }

    def outcome(self) -> str:
        """What happened, in one line."""
        if self.status == LOWERED:
            return f"Triton kernels, {self.config}" + "".join(f"; {note}" for note in self.notes)
        return "not lowered: " + "; ".join(dict.fromkeys(d.reason for d in self.declines))

    def sizes(self) -> str:
        """What the layer is, in a few words."""
        if self.hidden is None:
            return "of another form"
        blocks = f" in blocks of {self.block_shape[0]}x{self.block_shape[1]}" if self.block_shape else ""
        return (
            f"of {self.experts} experts, intermediate {self.intermediate}, hidden {self.hidden}, top {self.top_k}, "
            f"{self.dtype}{blocks}"
        )


def summary(layers: Iterable[ExpertsReport]) -> list[str]:
    """A line for each (sizes, outcome), with the number of its layers."""
    counts = Counter((layer.sizes(), layer.outcome()) for layer in layers)
    return [
        f"experts: {count} layer{'s' if count > 1 else ''} {sizes}: {outcome}"
        for (sizes, outcome), count in counts.items()
    ]
