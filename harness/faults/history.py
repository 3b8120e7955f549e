"""Histories: what each process saw and did, one JSON object per line, as it happened.

A line is written before the deed that it announces and after the one that it reports, in one
system call: what a killed process has written stays. Times are of the machine's monotonic clock,
which all processes of one machine share.

| op | of | says |
| --- | --- | --- |
| send | sender | it will send ``id``; ``sha`` of the payload |
| sent | sender | confirmed: ``id`` stands at ``topic``, ``partition``, ``offset`` |
| unsent | sender | failed; ``known``: it cannot be in the log, else perhaps |
| received | worker | handed out: ``id``, ``partition``, ``offset``, ``count``, ``sha`` |
| verdict | worker | it will give ``outcome`` on ``partition``, ``offset`` |
| confirmed | worker | the verdicts on ``places`` are in the log, in time as far as it was told |
| late | worker | it was told that those on ``places`` came too late, or that it lost them |
| position | observer | ``offset`` of ``group`` in ``topic``, ``partition``; ``end`` of the log |
| fault | test | ``kind`` happened to ``target``; only ``felt_by`` felt it; without: everybody may |
| healed | test | all faults are over |
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kafkamq.errors import KafkaMQError


class HistoryError(KafkaMQError):
    """A history that nobody can have written."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line."""

    time_s: float
    process: str
    op: str
    fields: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


class Recorder:
    """Writes the history of one process; thread-safe, and safe against SIGKILL."""

    def __init__(self, folder: Path | str, process: str) -> None:
        path = Path(folder) / f"{process}-{os.getpid()}.jsonl"
        self.process = process
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def record(self, op: str, **fields: object) -> None:
        """One line more."""
        self.record_all(op, [fields])

    def record_all(self, op: str, many: Iterable[dict[str, object]]) -> None:
        """Lines of the same kind, in one write."""
        now_s = time.monotonic()
        lines = [
            json.dumps({"t": now_s, "process": self.process, "op": op, **fields}) + "\n"
            for fields in many
        ]
        if lines:
            os.write(self._file, "".join(lines).encode())

    def close(self) -> None:
        """End it."""
        os.close(self._file)


def digest(payload: bytes | None) -> str:
    """What stands for a payload in a history."""
    return "null" if payload is None else hashlib.sha256(payload).hexdigest()[:16]


def read_histories(folder: Path | str) -> list[Event]:
    """All events of all processes, by time.

    Raises:
        HistoryError: a line other than a killed process's last one is broken.
    """
    events: list[Event] = []
    for path in sorted(Path(folder).glob("*.jsonl")):
        lines = path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines):
            if not line:
                continue
            try:
                fields = json.loads(line)
                event = Event(fields.pop("t"), fields.pop("process"), fields.pop("op"), fields)
            except (ValueError, KeyError) as error:
                if number == len(lines) - 1:
                    continue  # it was killed while it wrote
                raise HistoryError(f"{path}:{number + 1} is no event: {error}") from error
            events.append(event)
    events.sort(key=lambda event: event.time_s)
    return events
