"""Where a record stands in the index, and its row; pure and total, as records may hold anything.

A place is one integer, a row's number in the database. From the highest bit: which log (2 bits),
partition (16 bits), offset (42 bits). Records of one chunk of 4096 offsets share
``place >> CHUNK_BITS``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from kafkamq.config import ServiceConfig
from kafkamq.errors import WireError
from kafkamq.queue.dead_letters import REDRIVEN_FROM
from kafkamq.queue.wire.headers import ID, Origin, read_message_headers
from kafkamq.types import Headers

MESSAGES, MARKERS, LETTERS = 0, 1, 2
CHUNK_BITS = 12
CHUNK_OFFSETS = 1 << CHUNK_BITS
_OFFSET_BITS = 42
_PARTITION_BITS = 16
MAX_OFFSET = (1 << _OFFSET_BITS) - 1
MAX_PARTITION = (1 << _PARTITION_BITS) - 1
MAX_KEY_BYTES = 1024  # what is longer is cut, here and below
MAX_HEADERS_BYTES = 2048
MAX_PLAIN_ID_BYTES = 256
MAX_ERROR_CHARACTERS = 500
MAX_FORM_CHARACTERS = 120
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|[0-9a-fA-F]*\d[0-9a-fA-F-]{3,}|\d+")

MessageRow = tuple[
    int, int, int, "bytes | None", "bytes | None", int, "int | None", "int | None", "bytes | None"
]
"""place, queue, at_ms, id, key, attempt, origin, letter, headers."""


def place_of(log: int, partition: int, offset: int) -> int:
    """Return one integer for a record's place; total: what is too large or too small is cut."""
    partition = max(-1, min(partition, MAX_PARTITION))
    offset = max(-1, min(offset, MAX_OFFSET))
    return (log << _PARTITION_BITS | partition) << _OFFSET_BITS | offset


def split_place(place: int) -> tuple[int, int, int]:
    """Return log, partition and offset."""
    log_and_partition = place >> _OFFSET_BITS
    return (
        log_and_partition >> _PARTITION_BITS,
        log_and_partition & MAX_PARTITION,
        place & MAX_OFFSET,
    )


class Rows:
    """It makes rows, and knows which topics a namespace has."""

    def __init__(self, config: ServiceConfig) -> None:
        self._logs = {
            config.message_topic: MESSAGES,
            config.marker_topic: MARKERS,
            config.dead_letter_topic: LETTERS,
        }

    def place(self, origin: Origin | None) -> int | None:
        """Return where an origin points; None: to another topic, or there is none."""
        log = None if origin is None else self._logs.get(origin.topic)
        if origin is None or log is None:
            return None
        return place_of(log, origin.partition, origin.offset)

    def message(
        self,
        place: int,
        queue: int,
        at_ms: int,
        key: bytes | None,
        headers: Sequence[tuple[str, bytes | None]],
    ) -> MessageRow:
        """Return the row of a message of this queue, with the sender's key."""
        if key is not None and len(key) > MAX_KEY_BYTES:
            key = key[:MAX_KEY_BYTES]
        if len(headers) == 1:  # most messages: no more than their id
            name, value = headers[0]
            if name == ID and value and len(value) <= MAX_PLAIN_ID_BYTES and value.isascii():
                return place, queue, at_ms, value, key, 1, None, None, None
        read = read_message_headers(headers)
        if not read.id and not read.user:
            return place, queue, at_ms, None, key, read.delivery_count, None, None, None
        letter, user = None, read.user
        if user and any(name == REDRIVEN_FROM for name, _ in user):
            letter = self._letter(user)
            user = tuple(each for each in user if each[0] != REDRIVEN_FROM)
        return (
            place,
            queue,
            at_ms,
            read.id.encode() or None,
            key,
            read.delivery_count,
            self.place(read.origin),
            letter,
            pack_headers(user) if user else None,
        )

    def _letter(self, headers: Headers) -> int | None:
        value = dict(headers)[REDRIVEN_FROM]
        try:
            return None if value is None else self.place(Origin.decode(value))
        except WireError:
            return None


def pack_headers(headers: Headers) -> bytes | None:
    """Return headers as they are kept: a JSON list of pairs, as many as fit; None: no pair."""
    room, kept = MAX_HEADERS_BYTES, []
    for name, value in headers:
        text = None if value is None else value[:room].decode("utf-8", "backslashreplace")
        room -= len(name) + len(value or b"")
        if room < 0:
            break
        kept.append([name, text])
    return json.dumps(kept, ensure_ascii=False).encode("utf-8", "replace") if kept else None


def unpack_headers(kept: bytes | None) -> list[tuple[str, str | None]]:
    """Reverse ``pack_headers``; values are text."""
    return [] if kept is None else [(name, value) for name, value in json.loads(kept)]


def form_of(error: str) -> str:
    """Return what errors of one kind have in common: the first line without numbers and ids.

    No control characters are in it: browsers would send others in their place.
    """
    line = _CONTROLS.split(error.lstrip(), maxsplit=1)[0][: 4 * MAX_FORM_CHARACTERS]
    return _NUMBERS.sub("#", line)[:MAX_FORM_CHARACTERS].rstrip()
