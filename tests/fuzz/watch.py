"""Whether anything in a folder was opened, by whatever code and language: Linux tells (inotify)."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from pathlib import Path

_OPEN = 0x20


class Watch:
    """Collects the names of files of one folder that are opened. On other systems than Linux it sees nothing."""

    def __init__(self, folder: Path) -> None:
        self._file: int | None = None
        if not sys.platform.startswith("linux"):
            return
        libc = ctypes.CDLL(None, use_errno=True)
        self._file = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file < 0 or libc.inotify_add_watch(self._file, os.fsencode(folder), _OPEN) < 0:
            raise OSError(ctypes.get_errno(), "inotify")

    def opened(self) -> list[str]:
        """What was opened since the last call; "" stands for the folder itself."""
        if self._file is None:
            return []
        try:
            events = os.read(self._file, 1 << 16)
        except BlockingIOError:
            return []
        names, at = [], 0
        while at < len(events):
            _, _, _, length = struct.unpack_from("iIII", events, at)
            names.append(events[at + 16 : at + 16 + length].rstrip(b"\0").decode())
            at += 16 + length
        return names
