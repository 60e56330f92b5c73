"""Size tables: which comm backend serves which message size, measured on one kind of host, static at run time.

A table is a file `configs/allreduce/device_name={torch's name, spaces to _},tp={ranks}.json`:

    {
      "schema": 1,
      "device_name": "NVIDIA H200",          torch.cuda.get_device_name()
      "world_size": 2,                        ranks of the tensor-parallel group
      "dtypes": ["bfloat16", "float16"],      element types it holds for
      "hidden_sizes": [                       classes in rising order; the first with hidden size <= up_to counts,
        {"up_to": 2048, "ranges": [           the last one has up_to null: any larger hidden size
          {"max_bytes": 4194304, "backend": "flashinfer", "variant": "oneshot"},
          {"max_bytes": null, "backend": "reference", "variant": null}
        ]}, ...
      ],                                      ranges in rising order of tokens * hidden * itemsize, the last unlimited
      "provenance": {                         where the numbers come from; nothing reads it but people and tests
        "host", "link", "versions", "date", "method", "source", "note",
        "measured": [{"hidden", "tokens", "unfused_us", "flashinfer_us"}, ...]
      }
    }

Unknown keys and values are errors that name the file and the key. Backends are chosen from this table only, never by
timing at start: an auto-tuner's jitter would pick other kernels, and other roundings, from run to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphfuse.jsonfile import JsonObject

SCHEMA = 1
FOLDER = Path(__file__).parent.parent / "configs" / "allreduce"

# Comm backends a table may name, with their variants.
VARIANTS: dict[str, tuple[str | None, ...]] = {"flashinfer": ("oneshot",), "reference": (None,)}

# FlashInfer's kernels find their second and third buffer by 32-bit offsets: ranks * message bytes must stay below this.
FLASHINFER_BUFFER_BYTES = 1 << 30


@dataclass(frozen=True)
class SizeRange:
    """Messages of up to `max_bytes` (None: any size) beyond the range before go to this backend."""

    max_bytes: int | None
    backend: str
    variant: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"max_bytes": self.max_bytes, "backend": self.backend, "variant": self.variant}


REFERENCE_ONLY = (SizeRange(None, "reference"),)


@dataclass(frozen=True)
class SizeTable:
    """One table file. `classes` are (largest hidden size or None, ranges) in rising order."""

    file: str
    device_name: str
    world_size: int
    dtypes: tuple[str, ...]
    classes: tuple[tuple[int | None, tuple[SizeRange, ...]], ...]
    provenance: dict[str, Any]

    def ranges(self, hidden_size: int) -> tuple[SizeRange, ...]:
        """The size ranges for a hidden size."""
        return next(ranges for up_to, ranges in self.classes if up_to is None or hidden_size <= up_to)

    @classmethod
    def read(cls, file: str | Path) -> SizeTable:
        """A table from its file. Raises `SchemaError` naming the file and the key."""
        obj = JsonObject.read(file)
        obj.only("schema", "device_name", "world_size", "dtypes", "hidden_sizes", "provenance")
        if obj.get("schema", int) != SCHEMA:
            raise obj.error("schema", f"is {obj.data['schema']}; this version of graphfuse reads {SCHEMA}")
        dtypes = obj.get("dtypes", list)
        for dtype in dtypes:
            if dtype not in ("bfloat16", "float16", "float32"):
                raise obj.error("dtypes", f"holds {dtype!r}, which is not one of bfloat16, float16, float32")
        return cls(
            file=Path(file).name,
            device_name=obj.get("device_name", str),
            world_size=obj.get("world_size", int),
            dtypes=tuple(dtypes),
            classes=_classes(obj, obj.get("world_size", int)),
            provenance=_provenance(obj.object("provenance")),
        )


def find_table(gpu: str | None, world_size: int, dtype: str, folder: Path = FOLDER) -> SizeTable | None:
    """The table measured on this GPU at this number of ranks, if there is one for the dtype ("bfloat16").

    Raises:
        SchemaError: there is one, and it does not follow the schema.
    """
    if gpu is None:
        return None
    file = folder / f"device_name={gpu.replace(' ', '_')},tp={world_size}.json"
    if not file.is_file():
        return None
    table = SizeTable.read(file)
    return table if dtype in table.dtypes else None


def _classes(obj: JsonObject, world_size: int) -> tuple[tuple[int | None, tuple[SizeRange, ...]], ...]:
    classes: list[tuple[int | None, tuple[SizeRange, ...]]] = []
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
            raise entry.error("backend", f"is {size_range.backend!r}, which is not one of {', '.join(VARIANTS)}")
        if size_range.variant not in VARIANTS[size_range.backend]:
            known = ", ".join(repr(v) if v else "null" for v in VARIANTS[size_range.backend])
            raise entry.error("variant", f"is {size_range.variant!r}; {size_range.backend} has {known}")
        if size_range.backend == "flashinfer" and world_size * (max_bytes or 1 << 62) >= FLASHINFER_BUFFER_BYTES:
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
        row.only("hidden", "tokens", "unfused_us", "flashinfer_us")
        row.get("hidden", int)
        row.get("tokens", int)
        row.get("unfused_us", int | float)
        row.get("flashinfer_us", int | float)
    return obj.data
