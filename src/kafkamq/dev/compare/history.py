"""What worker processes did, in files that a SIGKILL leaves whole: one write for each event."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

from kafkamq.dev.compare.facts import Event, Kind

_FORM = struct.Struct("<QQBB")
_KINDS = {kind.value: kind for kind in Kind}


class HistoryWriter:
    """Appends events; thread-safe, as each is one write."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: Kind, number: int, attempt: int, at_ns: int) -> None:
        """One event; ``at_ns``: the machine's monotonic clock."""
        os.write(self._file, _FORM.pack(number, at_ns, kind.value, min(attempt, 255)))


class HistoryReader:
    """Reads what one process has written, as it grows."""

    def __init__(self, path: Path, process: int) -> None:
        self._path = path
        self._process = process
        self._read = 0

    def read(self) -> Iterator[Event]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return
        whole = len(data) - len(data) % _FORM.size
        self._read += whole
        for number, at_ns, kind, attempt in _FORM.iter_unpack(data[:whole]):
            yield Event(number, at_ns, _KINDS[kind], attempt, self._process)
