"""What measurements have in common: statistics over rounds, and result files that are read and compared by people."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphfuse.errors import ConfigError


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def spread(values: Sequence[float]) -> float:
    """Half the interquartile range as a share of the median."""
    ordered = sorted(values)
    return (ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]) / 2 / median(ordered)


def write_result(file: Path, head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write JSON: `head`, then "rows" with one line for each. Raises `ConfigError` where that cannot be."""
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    text = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}") + f',\n "rows": [\n{lines}\n ]\n}}\n'
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The result cannot be written: {error}. Give another file.") from error
