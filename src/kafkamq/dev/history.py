"""Histories: what each process of a run saw and did, one JSON object per line, as it happened.

A line is written in one system call: what a process has written stays, whatever kills it. Times are
of the machine's monotonic clock, which all of its processes share.

Handlers write ``begin``, and ``end`` or ``fail``, with the ``id`` of a message and the ``attempt``;
the programs of fault runs have more to say (`harness.faults.invariants`).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kafkamq.errors import KafkaMQError


class HistoryError(KafkaMQError):
    """A history has a line that no process can have written."""


@dataclass(frozen=True, slots=True)
class Event:
    time_s: float
    process: str
    op: str
    fields: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


class Recorder:
    """Writes the history of one process; thread-safe, and safe against SIGKILL."""

    def __init__(self, folder: Path | str, process: str) -> None:
        path = Path(folder) / f"{process}-{os.getpid()}.jsonl"
        self.process = process
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        # Beside a handler that does nothing, `json.dumps` would cost more than all else does.
        named = json.dumps(process).replace("%", "%%")
        self._call = f'{{"t":%.9f,"process":{named},"op":"%s","id":%s,"attempt":%d}}\n'

    def record(self, op: str, **fields: object) -> None:
        self.record_all(op, [fields])

    def record_all(self, op: str, many: Iterable[dict[str, object]]) -> None:
        now_s = time.monotonic()
        lines = [
            json.dumps({"t": now_s, "process": self.process, "op": op, **fields}) + "\n"
            for fields in many
        ]
        if lines:
            os.write(self._file, "".join(lines).encode())

    def record_call(self, op: str, id_: int | str | None, attempt: int) -> None:
        """Writes a line of a handler's call."""
        id_text = id_ if isinstance(id_, int) else json.dumps(id_)
        os.write(self._file, (self._call % (time.monotonic(), op, id_text, attempt)).encode())

    def close(self) -> None:
        os.close(self._file)


def digest(payload: bytes | None) -> str:
    return "null" if payload is None else hashlib.sha256(payload).hexdigest()[:16]


class HistoryReader:
    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        self._read: dict[Path, int] = {}

    def read(self) -> list[Event]:
        """Return the events that are new, file by file.

        Raises:
            HistoryError: a whole line is broken; what a killed process has begun to write is none.
        """
        events: list[Event] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            done = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(done)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = done + len(whole)
            for line in filter(None, whole.split(b"\n")):
                try:
                    fields = json.loads(line)
                    event = Event(fields.pop("t"), fields.pop("process"), fields.pop("op"), fields)
                except (ValueError, KeyError) as error:
                    raise HistoryError(f"{path} has a line that is no event: {error}") from error
                events.append(event)
        return events


def read_histories(folder: Path | str) -> list[Event]:
    """Return all events of all processes, by time.

    Raises:
        HistoryError: as `HistoryReader.read`.
    """
    return sorted(HistoryReader(folder).read(), key=lambda event: event.time_s)


def under_way(events: Iterable[Event]) -> dict[str, int]:
    """Return how many calls of handlers each process has begun and not ended."""
    begun: dict[str, set[tuple[object, int]]] = {}
    for event in events:
        if event.op in ("begin", "end", "fail"):
            calls = begun.setdefault(event.process, set())
            call = (event["id"], event["attempt"])
            (calls.add if event.op == "begin" else calls.discard)(call)
    return {process: len(calls) for process, calls in begun.items()}
