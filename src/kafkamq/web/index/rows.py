"""Where a record stands in the index, and its row; pure and total, as records may hold anything.

A place is one integer, a row's number in the database. From the highest bit: which log (2 bits),
partition (16 bits), offset (42 bits). Records of one chunk of 4096 offsets share
``place >> CHUNK_BITS``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from json.encoder import encode_basestring

from kafkamq.config import ServiceConfig
from kafkamq.queue.dead_letters import REDRIVEN_FROM
from kafkamq.queue.wire.headers import ID, Origin, read_message_headers
from kafkamq.types import Header, Headers

MESSAGES, MARKERS, LETTERS = 0, 1, 2
CHUNK_BITS = 12
CHUNK_OFFSETS = 1 << CHUNK_BITS
OFFSET_BITS = 42
_PARTITION_BITS = 16
MAX_OFFSET = (1 << OFFSET_BITS) - 1
MAX_PARTITION = (1 << _PARTITION_BITS) - 1
MAX_KEY_BYTES = 1024
MAX_HEADERS_BYTES = 2048
MAX_PLAIN_ID_BYTES = 256
MAX_ERROR_CHARACTERS = 500
MAX_FORM_CHARACTERS = 120
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|[0-9a-fA-F]*\d[0-9a-fA-F-]{3,}|\d+")


def place_of(log: int, partition: int, offset: int) -> int:
    """Return one integer for a record's place; total: what is too large or too small is cut."""
    if not (0 <= partition <= MAX_PARTITION and 0 <= offset <= MAX_OFFSET):
        partition = max(-1, min(partition, MAX_PARTITION))
        offset = max(-1, min(offset, MAX_OFFSET))
    return (log << _PARTITION_BITS | partition) << OFFSET_BITS | offset


def split_place(place: int) -> tuple[int, int, int]:
    log_and_partition = place >> OFFSET_BITS
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
        if origin is None or origin.topic not in self._logs:
            return None
        return place_of(self._logs[origin.topic], origin.partition, origin.offset)

    def read(
        self, headers: Sequence[tuple[str, bytes | None]]
    ) -> tuple[bytes, bytes, tuple[int, int | None, int | None]]:
        """Return id, packed headers, and of which record it is a copy: attempt, origin, letter."""
        read, letter, user = read_message_headers(headers), None, []
        for name, value in read.user:
            if name != REDRIVEN_FROM:
                user.append((name, value))
                continue
            letter = self.place(origin) if (origin := Origin.read(value)) else letter
        copy = read.delivery_count, self.place(read.origin), letter
        return read.id.encode(), pack_headers(user), copy


def ids_of(taken: Sequence[bytes | Headers | None]) -> list[bytes]:
    """Return ids as ``read`` does; where all are plain, as most are, at a tenth of the price."""
    ids = [each if isinstance(each, bytes) else b"" for each in taken]
    if b"".join(ids).isascii() and max(map(len, ids)) <= MAX_PLAIN_ID_BYTES:
        return ids
    return [read_message_headers(((ID, each),)).id.encode() for each in ids]


def pack_headers(headers: Sequence[Header]) -> bytes:
    """Return headers as they are kept: a JSON list of pairs, as many as fit; empty: no pair."""
    room, kept = MAX_HEADERS_BYTES, []
    for name, value in headers:
        text = "null"
        if value is not None:
            text = encode_basestring(value[:room].decode("utf-8", "backslashreplace"))
        pair = f"[{encode_basestring(name[:room])}, {text}]".encode("utf-8", "replace")
        room -= len(pair) + 2
        if room < 0:
            break
        kept.append(pair)
    return b"[%b]" % b", ".join(kept) if kept else b""


def unpack_headers(kept: bytes) -> list[tuple[str, str | None]]:
    """Reverse ``pack_headers``; values are text."""
    return [(name, value) for name, value in json.loads(kept)] if kept else []


def form_of(error: str) -> str:
    """Return what errors of one kind have in common: the first line without numbers and ids.

    No control characters are in it: browsers would send others in their place.
    """
    line = _CONTROLS.split(error.lstrip(), maxsplit=1)[0][: 4 * MAX_FORM_CHARACTERS]
    return _NUMBERS.sub("#", line)[:MAX_FORM_CHARACTERS].rstrip()
