"""The messages that a replay sends again, read from the logs themselves.

A message is a first record and the tracker's copies of it, which name it as their origin. One
record of each message goes: the one that its sender wrote, or, where only what is done is meant,
the first acknowledged one that is read, whichever that is in this run. So the ledger knows a
message by its first record. A redriven or replayed record has no origin: it is a message of its
own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from kafkamq.config import ServiceConfig
from kafkamq.errors import WireError
from kafkamq.markers.wire.markers import decode_slim
from kafkamq.queue.dead_letters import REPLAYED_FROM, DeadLetter, Source, dead_letter_of
from kafkamq.queue.wire.keys import CHUNK_OFFSETS
from kafkamq.transport.admin import Admin
from kafkamq.transport.log_reader import scan
from kafkamq.types import MarkerType, Outcome

_Bits = Mapping[tuple[int, int], int]


@dataclass(frozen=True, kw_only=True)
class Messages(Source):
    """The messages that are meant, of those that were there at one moment.

    Args:
        means: Says of a message, as a letter without reason, whether it is.
        since_ms: None is older.
        is_done: Only those that a worker has acknowledged.
        ends: Where their topic ended at that moment, by partition.
        marker_ends: The same of the markers topic.
        check: Called at each record; what it raises ends the reading.
        until_s: Monotonic: reading that takes longer ends with ``DeadlineExceededError``.
    """

    means: Callable[[DeadLetter], bool]
    since_ms: int
    is_done: bool
    ends: Mapping[int, int]
    marker_ends: Mapping[int, int]
    check: Callable[[], None] = lambda: None
    until_s: float = math.inf
    link: str = REPLAYED_FROM

    def read(self, config: ServiceConfig) -> Iterator[DeadLetter]:
        """Yield them as letters that have no reason."""
        with Admin(config) as admin:
            topic_id, starts = admin.require_topic(self.topic).topic_id, None
            if self.since_ms:
                times = dict.fromkeys(self.ends, self.since_ms)
                found = admin.offsets_for_times(self.topic, times)
                starts = {number: at for number, at in found.items() if at < self.ends[number]}
        acked = self._acknowledged(config, topic_id) if self.is_done else {}
        gone: defaultdict[tuple[int, int], int] = defaultdict(int)
        for record in scan(config, self.topic, starts, ends=self.ends, until_s=self.until_s):
            self.check()
            letter = dead_letter_of(record, frozenset(), b"")
            place, origin = (letter.partition, letter.offset), letter.origin
            if place[1] >= self.ends.get(place[0], 0) or letter.raw_key != record.key():
                continue
            if origin is not None and origin.topic != self.topic:
                origin = None
            message = replace(letter, reason="", error="", origin=origin, payload_at=None)
            first = self.place_of(message)
            if self.is_done:
                is_meant = _has(acked, place) and not _has(gone, first)
            else:
                is_meant = origin is None
            if is_meant and self.means(message):
                chunk, at = divmod(first[1], CHUNK_OFFSETS)
                gone[first[0], chunk] |= 1 << at
                yield message

    def place_of(self, letter: DeadLetter) -> tuple[int, int]:
        """Return where the message's first record is."""
        origin = letter.origin or letter
        return origin.partition, origin.offset

    def _acknowledged(self, config: ServiceConfig, topic_id: bytes) -> _Bits:
        """Return which messages were acknowledged, as bits by partition and chunk."""
        found: defaultdict[tuple[int, int], int] = defaultdict(int)
        ends, until_s = self.marker_ends, self.until_s
        for record in scan(config, config.marker_topic, ends=ends, until_s=until_s):
            self.check()
            if (record.offset() or 0) >= ends.get(record.partition() or 0, 0):
                continue
            try:
                marker = decode_slim(record.value())
            except WireError:
                continue
            is_end = marker.type is MarkerType.END and not marker.of_schedule
            if not is_end or marker.outcome is not Outcome.ACK:
                continue
            for batch in marker.named:
                if batch.topic_id in (b"", topic_id):
                    chunk, at = divmod(batch.base_offset, CHUNK_OFFSETS)
                    found[batch.partition, chunk] |= batch.bits << at
        return found


def _has(bits: _Bits, place: tuple[int, int]) -> bool:
    chunk, at = divmod(place[1], CHUNK_OFFSETS)
    return bool(bits.get((place[0], chunk), 0) >> at & 1)
