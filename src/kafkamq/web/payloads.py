"""A message's payload, read from Kafka when somebody looks at it; nothing of it is kept."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass

from kafkamq.config import ServiceConfig
from kafkamq.errors import StateError, WireError
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.transport.log_reader import RecordReader
from kafkamq.web.index.places import LETTERS, MARKERS, MESSAGES

MAX_SHOWN_BYTES = 65_536
MAX_JSON_BYTES = 1 << 20
FORMS = ("text", "json", "hex")
_TURN_S = 15.0
_READ_S = 10.0
_LINE = 16


@dataclass(frozen=True, slots=True)
class Shown:
    """A payload as text for people."""

    form: str  # one of FORMS
    text: str
    size_bytes: int
    is_cut: bool
    note: str = ""


class Payloads:
    """Reads one record at a time; thread-safe."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._topics = {
            MESSAGES: config.message_topic,
            MARKERS: config.marker_topic,
            LETTERS: config.dead_letter_topic,
        }
        self._readers: dict[int, RecordReader] = {}
        self._lock = threading.Lock()

    def read(self, log: int, partition: int, offset: int, form: str) -> Shown:
        """The payload of the record there.

        Raises:
            StateError: Others are being read for too long.
            BrokerError, DeadlineExceededError: It cannot be read.
        """
        if not self._lock.acquire(timeout=_TURN_S):
            raise StateError("other payloads are being read; try again")
        try:
            if log not in self._readers:
                self._readers[log] = RecordReader(self._config, self._topics[log])
            record = self._readers[log].read(partition, offset, timeout_s=_READ_S)
        finally:
            self._lock.release()
        if record is None:
            return Shown(form, "", 0, False, "the record is gone: retention has deleted it")
        value = record.value()
        if log == MARKERS:
            try:
                value = decode_marker(value).value
            except WireError as error:
                return Shown(form, "", 0, False, str(error))
        return show(value, form)

    def close(self) -> None:
        """End its clients."""
        with self._lock:
            for reader in self._readers.values():
                reader.close()


def show(value: bytes | None, form: str) -> Shown:
    """A payload as text, at most 64 KiB of it; what does not have the form is shown as text."""
    if value is None:
        return Shown(form, "", 0, False, "null: there is no payload")
    size, note = len(value), ""
    if form == "json":
        try:
            if size > MAX_JSON_BYTES:
                raise ValueError("too large")
            text = json.dumps(json.loads(value), indent=2, ensure_ascii=False)
            return Shown(form, text[:MAX_SHOWN_BYTES], size, len(text) > MAX_SHOWN_BYTES)
        except (ValueError, RecursionError):
            form, note = "text", "it is no JSON, or too large for it"
    part = value[:MAX_SHOWN_BYTES]
    if form == "hex":
        part = value[: MAX_SHOWN_BYTES // 4]
        return Shown(form, _hex(part), size, size > len(part))
    return Shown("text", part.decode("utf-8", "backslashreplace"), size, size > len(part), note)


def _hex(data: bytes) -> str:
    lines = []
    for first in range(0, len(data), _LINE):
        part = data[first : first + _LINE]
        text = "".join(chr(each) if 32 <= each < 127 else "." for each in part)
        lines.append(f"{first:08x}  {part.hex(' '):<{3 * _LINE}} {text}")
    return "\n".join(lines)
