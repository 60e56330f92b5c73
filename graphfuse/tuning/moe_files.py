"""Finding and writing tuned MoE kernel configs.

Files are looked for in the folder that the user names, then among those that come with graphfuse; in either, first in
the folder itself, then in folders of it for one Triton version (`triton_3_4_0/`), as SGLang has them. If there is none
for the device, one of a like device stands in (`moe_file_names.FAMILIES`). Notes say what was found, and what became of
it.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphfuse.errors import ConfigError, brief
from graphfuse.jsonfile import JsonObject, parse_json
from graphfuse.tuning.moe_file_names import FileName, relatives
from graphfuse.tuning.moe_reading import Found, Version, installed_triton, read_file, to_version, version_text
from graphfuse.tuning.moe_schema import Contents, Entry, Provenance
from graphfuse.tuning.moe_shared_memory import Limits
from graphfuse.tuning.moe_table import HEURISTIC, MoeTable
from graphfuse.tuning.moe_tiles import MoeShape

FOLDER = Path(__file__).parent.parent / "configs" / "moe"


def find_table(
    shape: MoeShape,
    device_name: str,
    *,
    folder: str | os.PathLike[str] | None = None,
    shared_memory: int | None = None,
    limits: Limits | None = None,
    triton_version: str | None = None,
) -> Found:
    """The table for a shape on a device, its tiles made to fit.

    Args:
        device_name: torch's name of the device.
        folder: searched before the shipped configs (`FuseConfig.moe_config_dir`).
        shared_memory: bytes that a block of threads may have; None asks the current CUDA device, if there is one.
        limits: instead of `shared_memory`, where operands are not of the usual types (`Limits.of`).
        triton_version: None asks the installed Triton.

    Raises:
        SchemaError: a file that was chosen does not follow the schema.
    """
    if limits is None:
        limits = Limits.of(shape, device_shared_memory() if shared_memory is None else shared_memory)
    running = to_version(triton_version) if triton_version else installed_triton()
    folders = ([] if folder is None else [Path(folder)]) + [FOLDER]
    devices = [device_name, *relatives(device_name)]
    for device in devices:
        for place in folders:
            file, notes = _find_file(place, shape, device, running)
            if file is None:
                continue
            if device != device_name:
                notes.append(f"it was tuned on {device}, as there is none for {device_name}")
            if place != folders[0]:
                notes.append(f"{_shown(folders[0])} has none for this shape and device")
            return read_file(file, shape, limits, running, notes)
    name = FileName.of(shape, device_name)
    note = f"there is no {name} in {' or '.join(map(_shown, folders))}"
    if len(devices) > 1:
        note += f", nor one for {devices[1]} or another GPU like it"
    notes = [note, *(_similar(folders[0], name) if folder is not None else [])]
    return Found(MoeTable(shape, source=HEURISTIC, notes=tuple(notes), limits=limits))


def read_table(file: str | os.PathLike[str], hidden_size: int, top_k: int, *, limits: Limits | None = None) -> MoeTable:
    """The table of one file, for the shape that its name gives.

    Raises:
        ConfigError: its name is not that of a tuned config.
        SchemaError: it does not follow the schema.
    """
    file = Path(file)
    name = FileName.parse(file.name)
    if name is None or name.down:
        raise ConfigError(
            f"{brief(str(file))} is not named like a tuned MoE config. "
            'Call it "E=128,N=384,device_name=NVIDIA_H200.json", with your numbers and device.'
        )
    shape = MoeShape(name.num_experts, name.intermediate_size, hidden_size, top_k, name.dtype, name.block_shape)
    return read_file(file, shape, limits, installed_triton(), []).table


def write_table(folder: str | os.PathLike[str], table: MoeTable, provenance: Provenance) -> Path:
    """Write a table as a file of its own, and the `_down` file beside it if the products differ. Returns the file.

    A reader sees the old files or the new ones, whole in either case.

    Raises:
        SchemaError: the table does not follow the schema; nothing is written.
        ConfigError: it cannot be written.
    """
    us = dict(table.measured_us)
    gate_up = {num_tokens: Entry(tiles.gate_up, us.get(num_tokens)) for num_tokens, tiles in table.entries}
    down = {num_tokens: Entry(tiles.down) for num_tokens, tiles in table.entries}
    name = FileName.of(table.shape, provenance.device)
    file, down_file = (Path(folder, str(n)) for n in (name, replace(name, down=True)))
    texts = [Contents(entries, provenance).to_text() for entries in (gate_up, down)]
    for text in texts:
        Contents.read(JsonObject(parse_json(text.encode()), str(file)))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if any(gate_up[num_tokens].tile != down[num_tokens].tile for num_tokens in gate_up):
            _write(down_file, texts[1])
        else:
            down_file.unlink(missing_ok=True)
        _write(file, texts[0])
    except (OSError, ValueError) as error:
        raise ConfigError(f"The config cannot be written: {brief(error)}. Give another folder.") from error
    return file


def device_shared_memory() -> int | None:
    """Bytes of shared memory that a block may have on the current CUDA device; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(properties.shared_memory_per_block_optin)


def _find_file(folder: Path, shape: MoeShape, device: str, running: Version) -> tuple[Path | None, list[str]]:
    """The file for exactly this device, and notes on how it was chosen."""
    names = [name for kind in (False, True) for name in FileName.of(shape, device, per_channel=kind).spellings()]
    for name in names:
        if os.path.isfile(folder / name):
            return folder / name, []
    versions = {
        version: folder / sub / name
        for sub, version in _triton_folders(folder)
        for name in reversed(names)
        if os.path.isfile(folder / sub / name)
    }
    if not versions:
        return None, []
    not_newer = [version for version in versions if not running or version <= running]
    chosen = max(not_newer) if not_newer else min(versions)
    note = f"it is for Triton {version_text(chosen)}"
    return versions[chosen], [f"{note}; {version_text(running)} runs"] if running and chosen != running else [note]


def _triton_folders(folder: Path) -> list[tuple[str, Version]]:
    try:
        names = sorted(os.listdir(folder))
    except (OSError, ValueError):
        return []
    matches = [re.fullmatch(r"triton_(\d{1,4})_(\d{1,4})_(\d{1,4})", name, re.ASCII) for name in names]
    return [(match[0], (int(match[1]), int(match[2]), int(match[3]))) for match in matches if match]


def _similar(folder: Path, wanted: FileName) -> list[str]:
    """A note on files for the same experts under another name, which the user may have expected to be taken."""
    try:
        names = sorted(os.listdir(folder))
    except (OSError, ValueError):
        return []
    prefix = f"E={wanted.num_experts},N={wanted.intermediate_size}"
    found = [brief(name)[1:-1] for name in names if name.startswith(prefix)]
    return [f"{_shown(folder)} has {', '.join(found[:4])}{', …' if len(found) > 4 else ''}"] if found else []


def _shown(folder: Path) -> str:
    return "the shipped configs" if folder == FOLDER else brief(str(folder))[1:-1]


def _write(file: Path, text: str) -> None:
    """All at once: into a file beside it, which then takes its place."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)
