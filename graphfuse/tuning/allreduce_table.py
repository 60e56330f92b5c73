"""From measurements to a size table: for each message size the fastest backend, changed only where that is no noise.

Each measured hidden size is a class. Token counts are gone through in rising order:

- What is slower than unfused, by more than the noise, cannot be chosen; the reference can, which is the unfused work.
- The choice of the size before stays unless another is faster by more than the margin (3 %, or twice the spread over
  the rounds where that is larger), and is not slower at the next size either: one odd point makes no range.
- A choice holds up to the last measured count at which it was made. The last one holds for everything beyond, but for
  FlashInfer, whose workspace grows with its limit: what is next best at the last count serves beyond it.

A pure function of the result file, so that a table can be made again, or checked, without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from graphfuse.comm.table import SizeRange, SizeTable
from graphfuse.errors import ConfigError
from graphfuse.tuning.allreduce_candidates import ELIGIBLE, REFERENCE, TUNED, UNFUSED
from graphfuse.tuning.allreduce_result import Result, Row

MARGIN = 0.03
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
NOTE = (
    "Microseconds a call. unfused: NCCL all-reduce, then the add and norm compiled by Inductor. The others: backends "
    "as graphfuse launches them. Types of one size move the same bytes, and share a table."
)


def make_table(result: Result, *, source: str, stands_in_for: Sequence[str] = ()) -> SizeTable:
    """The size table of a result.

    Args:
        result: with the candidates of `graphfuse tune allreduce`.
        source: the command or file that it came from, for the table's provenance.
        stands_in_for: other GPUs that may use the table while they have none.

    Raises:
        ConfigError: nothing was measured that a table could choose.
    """
    itemsize = ITEMSIZE[result.dtype]
    hidden_sizes = sorted({row.hidden for row in result.rows})
    classes: list[tuple[int | None, tuple[SizeRange, ...]]] = []
    for hidden in hidden_sizes:
        rows = sorted((row for row in result.rows if row.hidden == hidden), key=lambda row: row.tokens)
        up_to = hidden if hidden != hidden_sizes[-1] else None
        classes.append((up_to, choose_ranges(rows, itemsize, result.world_size)))
    return SizeTable(
        device_name=result.device_name,
        world_size=result.world_size,
        dtypes=tuple(name for name, size in ITEMSIZE.items() if size == itemsize),
        classes=tuple(classes),
        stands_in_for=tuple(stands_in_for),
        provenance={
            "host": result.host,
            "link": result.link,
            "versions": result.versions,
            "date": result.date,
            "method": f"{result.what}; {result.method}",
            "source": source,
            "note": f"Measured in {result.dtype}. {NOTE}",
            "measured": [
                {"hidden": row.hidden, "tokens": row.tokens, "us": {n: row.us[n] for n in TUNED if n in row.us}}
                for row in sorted(result.rows, key=lambda row: (row.hidden, row.tokens))
            ],
        },
    )


def choose_ranges(rows: Sequence[Row], itemsize: int, world_size: int) -> tuple[SizeRange, ...]:
    """The ranges of one hidden size from its rows in rising order of tokens."""
    ranges: list[SizeRange] = []
    current: str | None = None
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        current = _choose(row, current, ELIGIBLE, following)
        num_bytes = row.tokens * row.hidden * itemsize
        if ranges and ranges[-1].label == current:
            ranges.pop()
        ranges.append(_range(num_bytes, current))
    if ranges[-1].backend == "flashinfer":
        beyond = _choose(rows[-1], None, [name for name in ELIGIBLE if not name.startswith("flashinfer")])
        return (*ranges, _range(None, beyond))
    return (*ranges[:-1], _range(None, ranges[-1].label))


def _choose(row: Row, current: str | None, names: Iterable[str], following: Row | None = None) -> str:
    """The candidate for one size: the fastest, or `current` where none is faster by more than the margin, or the one
    that is falls behind again at the `following` size."""
    allowed = [name for name in names if name in row.us and (name == REFERENCE or not _slower(row, name, UNFUSED))]
    if not allowed:
        if REFERENCE not in row.us and UNFUSED in row.us:
            return REFERENCE  # not measured apart from the unfused work that it is
        raise ConfigError(
            f"Nothing that a size table could choose was measured at {row.tokens} tokens of hidden size {row.hidden}. "
            "Measure with graphfuse tune allreduce."
        )
    best = min(allowed, key=lambda name: row.us[name])
    if current not in allowed:
        return best
    lasts = following is None or following.us.get(best, 0.0) <= following.us.get(current, math.inf)
    return best if lasts and _slower(row, current, best) else current


def _slower(row: Row, name: str | None, other: str) -> bool:
    """Whether `name` takes longer than `other` by more than the margin."""
    if name is None or other not in row.us:
        return False
    margin = max(MARGIN, 2 * max(row.spread.get(name, 0.0), row.spread.get(other, 0.0)))
    return row.us[other] < row.us[name] * (1 - margin)


def _range(max_bytes: int | None, name: str) -> SizeRange:
    backend, _, variant = name.partition("/")
    return SizeRange(max_bytes, backend, variant or None)
