"""Size tables: which comm backend serves which message size, measured on one kind of host, static at run time.

A table is a file `configs/allreduce/device_name={torch's name, spaces to _},tp={ranks}.json`:

    {
      "schema": 2,
      "device_name": "NVIDIA H200",          torch.cuda.get_device_name()
      "world_size": 2,                        ranks of the tensor-parallel group
      "dtypes": ["bfloat16", "float16"],      element types it holds for
      "stands_in_for": ["NVIDIA H100 ..."],   other GPUs with like links and SMs, which take it while they have no own
      "hidden_sizes": [                       classes in rising order; the first with hidden size <= up_to counts,
        {"up_to": 2048, "ranges": [           the last one has up_to null: any larger hidden size
          {"max_bytes": 4194304, "backend": "flashinfer", "variant": "oneshot"},
          {"max_bytes": null, "backend": "reference", "variant": null}
        ]}, ...
      ],                                      ranges in rising order of tokens * hidden * itemsize, the last unlimited
      "provenance": {                         where the numbers come from, for people, reports and tests
        "host", "link", "versions", "date", "method", "source", "note",
        "measured": [{"hidden", "tokens", "us": {"unfused": 10.7, "flashinfer/oneshot": 6.8, ...}}, ...]
      }                                       microseconds a call; a range's candidate is named backend/variant
    }

Unknown keys and values are errors that name the file and the key. Backends are chosen from a table only, never by
timing at start: an auto-tuner's jitter would pick other kernels, and other roundings, from run to run. A folder of your
own tables, named by the environment variable GRAPHFUSE_ALLREDUCE_TABLES, is looked at before the shipped one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphfuse.errors import ConfigError, brief
from graphfuse.jsonfile import JsonObject

SCHEMA = 2
FOLDER = Path(__file__).parent.parent / "configs" / "allreduce"
TABLE_FOLDER_VARIABLE = "GRAPHFUSE_ALLREDUCE_TABLES"

# Comm backends a table may name, with their variants.
VARIANTS: dict[str, tuple[str | None, ...]] = {
    "flashinfer": ("oneshot",),
    "symm_mem": ("one_shot", "two_shot"),
    "reference": (None,),
}

# FlashInfer's kernels find their second and third buffer by 32-bit offsets: ranks * message bytes must stay below this.
FLASHINFER_BUFFER_BYTES = 1 << 30


@dataclass(frozen=True)
class SizeRange:
    """Messages of up to `max_bytes` (None: any size) beyond the range before go to this backend."""

    max_bytes: int | None
    backend: str
    variant: str | None = None

    @property
    def label(self) -> str:
        """The candidate's name among measurements: "symm_mem/one_shot", "reference"."""
        return f"{self.backend}/{self.variant}" if self.variant else self.backend

    def to_json(self) -> dict[str, Any]:
        return {"max_bytes": self.max_bytes, "backend": self.backend, "variant": self.variant}


REFERENCE_ONLY = (SizeRange(None, "reference"),)

HiddenSizeClass = tuple[int | None, tuple[SizeRange, ...]]


@dataclass(frozen=True)
class Measurement:
    """What one size took: microseconds a call, by candidate (`SizeRange.label`, or "unfused")."""

    hidden_size: int
    tokens: int
    us: Mapping[str, float]


@dataclass(frozen=True)
class SizeTable:
    """One table. `classes` are (largest hidden size or None, ranges) in rising order; `path` is where it was read."""

    device_name: str
    world_size: int
    dtypes: tuple[str, ...]
    classes: tuple[HiddenSizeClass, ...]
    provenance: dict[str, Any]
    stands_in_for: tuple[str, ...] = ()
    path: Path | None = field(default=None, compare=False)

    @property
    def file(self) -> str:
        """The table's file name."""
        return self.path.name if self.path else _file_name(self.device_name, self.world_size)

    @property
    def measured(self) -> tuple[Measurement, ...]:
        """The measurements the table was made of."""
        return tuple(Measurement(row["hidden"], row["tokens"], row["us"]) for row in self.provenance["measured"])

    def ranges(self, hidden_size: int) -> tuple[SizeRange, ...]:
        """The size ranges for a hidden size."""
        return next(ranges for up_to, ranges in self.classes if up_to is None or hidden_size <= up_to)

    def to_json(self) -> dict[str, Any]:
        """Plain data, as a table file holds it."""
        return {
            "schema": SCHEMA,
            "device_name": self.device_name,
            "world_size": self.world_size,
            "dtypes": list(self.dtypes),
            "stands_in_for": list(self.stands_in_for),
            "hidden_sizes": [
                {"up_to": up_to, "ranges": [r.to_json() for r in ranges]} for up_to, ranges in self.classes
            ],
            "provenance": self.provenance,
        }

    def write(self, target: str | Path) -> Path:
        """Write the table to a file (`*.json`), or into a folder under its own name. Returns the file.

        Raises:
            SchemaError: the table does not follow the schema; nothing is written.
            ConfigError: the file cannot be written.
        """
        target = Path(target)
        file = target if target.suffix == ".json" else target / _file_name(self.device_name, self.world_size)
        text = _to_text(self.to_json())
        _parse(JsonObject(json.loads(text), str(file)), file)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"The size table cannot be written: {brief(error)}. Give another file or folder."
            ) from error
        return file

    @classmethod
    def read(cls, file: str | Path) -> SizeTable:
        """A table from its file. Raises `SchemaError` naming the file and the key."""
        return _parse(JsonObject.read(file), Path(file))


def table_folders() -> tuple[Path, ...]:
    """Where tables are looked for, in order: the user's folder, if the environment names one, then the shipped one.

    Raises:
        ConfigError: what the environment names is no folder.
    """
    own = os.environ.get(TABLE_FOLDER_VARIABLE)
    if not own:
        return (FOLDER,)
    if not os.path.isdir(own):  # unlike Path's, it takes names that no folder can have
        raise ConfigError(f"{TABLE_FOLDER_VARIABLE}={brief(own)} is not a folder. Give an existing one, or unset it.")
    return (Path(own), FOLDER)


def find_table(gpu: str | None, world_size: int, dtype: str, folders: Sequence[Path] | None = None) -> SizeTable | None:
    """The table for this GPU at this number of ranks that holds for the dtype ("bfloat16"), if there is one.

    One measured on this GPU comes first; else one that was measured on another (its `device_name`) and names this GPU
    among those it stands in for. `folders` default to `table_folders()`; an earlier one comes first.

    Raises:
        SchemaError: a table that was looked at does not follow the schema.
        ConfigError: from `table_folders`.
    """
    if gpu is None:
        return None
    folders = table_folders() if folders is None else folders
    for file in (folder / _file_name(gpu, world_size) for folder in folders):
        if os.path.isfile(file):
            table = SizeTable.read(file)
            if dtype in table.dtypes:
                return table
    for file in (file for folder in folders for file in sorted(folder.glob(f"device_name=*,tp={world_size}.json"))):
        table = SizeTable.read(file)
        if gpu in table.stands_in_for and dtype in table.dtypes:
            return table
    return None


def _file_name(device_name: str, world_size: int) -> str:
    """A name that stays in its folder whatever the device is called, in facts or results from elsewhere."""
    name = re.sub(r"[\s/\\\0]", "_", device_name)
    return f"device_name={name},tp={world_size}.json"


def _to_text(data: dict[str, Any]) -> str:
    """JSON with one line for each range, list and measured size, so that a changed number is a changed line."""
    text = json.dumps(data, indent=2)
    plain = r"[^{}\[\]]*"
    innermost = rf"\{{{plain}\}}|\[{plain}\]"
    with_one_inside = rf"\{{{plain}\{{{plain}\}}{plain}\}}"  # a measured size and its "us"
    for pattern in (innermost, with_one_inside):
        text = re.sub(pattern, lambda match: re.sub(r"\s*\n\s*", " ", match[0]), text)
    return text + "\n"


def _parse(obj: JsonObject, path: Path) -> SizeTable:
    obj.only("schema", "device_name", "world_size", "dtypes", "stands_in_for", "hidden_sizes", "provenance")
    if obj.get("schema", int) != SCHEMA:
        raise obj.error("schema", f"is {obj.data['schema']}; this version of graphfuse reads {SCHEMA}")
    dtypes = obj.get("dtypes", list)
    for dtype in dtypes:
        if dtype not in ("bfloat16", "float16", "float32"):
            raise obj.error("dtypes", f"holds {brief(dtype)}, which is not one of bfloat16, float16, float32")
    stands_in_for = obj.get("stands_in_for", list)
    if not all(isinstance(name, str) for name in stands_in_for):
        raise obj.error("stands_in_for", "holds something that is not a string")
    return SizeTable(
        device_name=obj.get("device_name", str),
        world_size=obj.positive("world_size"),
        dtypes=tuple(dtypes),
        classes=_classes(obj, obj.positive("world_size")),
        provenance=_provenance(obj.object("provenance")),
        stands_in_for=tuple(stands_in_for),
        path=path,
    )


def _classes(obj: JsonObject, world_size: int) -> tuple[HiddenSizeClass, ...]:
    classes: list[HiddenSizeClass] = []
    entries = obj.objects("hidden_sizes")
    for index, entry in enumerate(entries):
        entry.only("up_to", "ranges")
        up_to = entry.get("up_to", int | None)
        _check_rising(entry, "up_to", up_to, classes[-1][0] if classes else 0, last=index == len(entries) - 1)
        classes.append((up_to, _ranges(entry, world_size)))
    return tuple(classes)


def _ranges(obj: JsonObject, world_size: int) -> tuple[SizeRange, ...]:
    ranges: list[SizeRange] = []
    entries = obj.objects("ranges")
    for index, entry in enumerate(entries):
        entry.only("max_bytes", "backend", "variant")
        max_bytes = entry.get("max_bytes", int | None)
        size_range = SizeRange(max_bytes, entry.get("backend", str), entry.get("variant", str | None))
        if size_range.backend not in VARIANTS:
            raise entry.error("backend", f"is {brief(size_range.backend)}, which is not one of {', '.join(VARIANTS)}")
        if size_range.variant not in VARIANTS[size_range.backend]:
            known = ", ".join(repr(v) if v else "null" for v in VARIANTS[size_range.backend])
            raise entry.error("variant", f"is {brief(size_range.variant)}; {size_range.backend} has {known}")
        fits = max_bytes is not None and world_size * max_bytes < FLASHINFER_BUFFER_BYTES
        if size_range.backend == "flashinfer" and not fits:
            raise entry.error("max_bytes", f"is {max_bytes}; flashinfer takes less than 1 GiB / {world_size} ranks")
        previous = ranges[-1].max_bytes if ranges else 0
        _check_rising(entry, "max_bytes", size_range.max_bytes, previous, last=index == len(entries) - 1)
        ranges.append(size_range)
    return tuple(ranges)


def _check_rising(obj: JsonObject, key: str, value: int | None, previous: int | None, *, last: bool) -> None:
    """Limits rise, and exactly the last one is null: every size and every hidden size has an answer."""
    if last != (value is None):
        raise obj.error(key, "must be null in the last entry" if last else "may be null only in the last entry")
    if value is not None and previous is not None and value <= previous:
        raise obj.error(key, f"is {value}, which is not above the {previous} before it")


def _provenance(obj: JsonObject) -> dict[str, Any]:
    obj.only("host", "link", "versions", "date", "method", "source", "note", "measured")
    for key in ("host", "link", "date", "method", "source", "note"):
        obj.get(key, str)
    obj.get("versions", dict)
    for row in obj.objects("measured"):
        row.only("hidden", "tokens", "us")
        row.positive("hidden")
        row.positive("tokens")
        times = row.object("us")
        for candidate in times.data:
            times.positive(candidate, int | float)
    return obj.data
