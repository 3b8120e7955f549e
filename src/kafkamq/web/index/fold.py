"""Records folded into rows: the one writer of the index.

What is open follows from ``RedeliveryTracker``, the rules that trackers run. It is not written:
after a start each marker partition is read again from where all that is open began (R20), and
records below ``next_offset`` make no rows a second time.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

from kafkamq.config import ServiceConfig
from kafkamq.errors import WireError
from kafkamq.markers.rules.hold import HELD, PAGE_BITS, STATE
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.queue.dead_letters import dead_letter_of
from kafkamq.queue.wire.keys import split_key
from kafkamq.transport.record import LOG_APPEND_TIME, Record, all_headers
from kafkamq.types import Marker, MarkerType, MessageBatch, Outcome
from kafkamq.web.index.rows import (
    CHUNK_BITS,
    CHUNK_OFFSETS,
    LETTERS,
    MARKERS,
    MAX_ERROR_CHARACTERS,
    MAX_KEY_BYTES,
    MESSAGES,
    MessageRow,
    Rows,
    form_of,
    pack_headers,
    place_of,
)

STARTED, END_BASE = 1, 10  # kinds of events: a START, or 10 and the END's outcome
MAX_NAMES = 200_000
OTHER = "(other)"
_SENT, _STARTED, _ACKED, _FAILED, _DEAD, _TIMED, _HELD_MS = range(7)
_COLUMN = {Outcome.ACK: _ACKED, Outcome.NACK: _FAILED, Outcome.REJECT: _FAILED}
MAX_CHUNKS = 2048  # in memory: 16 KiB each
_EMPTY = bytes(4 * CHUNK_OFFSETS)
_MASK = CHUNK_OFFSETS - 1


class Chunk:
    """A chunk knows which messages of 4096 offsets were STARTed, and of which queues they are.

    So a START of a thousand messages costs a few operations on long integers, and each message is
    counted as waiting once: from when it was read until its first START, whichever is read first.
    ``queues`` has 0 where no message was read.
    """

    __slots__ = ("known", "last_ms", "queues", "started")

    def __init__(self, started: int = 0, last_ms: int = 0) -> None:
        self.queues = array("I", _EMPTY)
        self.known = 0  # bits of messages that were read
        self.started = started
        self.last_ms = last_ms

    def add(self, at: int, queue: int) -> bool:
        """Take in a message, and return whether it waits now."""
        bit = 1 << at
        if self.known & bit:
            return False
        self.known |= bit
        self.queues[at] = queue
        return not self.started & bit

    def start(self, bits: int) -> Counter[int]:
        """Note that these were STARTed, and return how many of them had waited, by queue."""
        fresh = bits & self.known & ~self.started
        self.started |= bits
        return self.by_queue(fresh)

    def by_queue(self, bits: int) -> Counter[int]:
        """Return how many of these messages each queue has, of those that were read."""
        bits &= self.known
        if not bits:
            return Counter()
        if bits & bits - 1 == 0:
            return Counter((self.queues[bits.bit_length() - 1],))
        first = (bits & -bits).bit_length() - 1
        chosen = map(int, bin(bits >> first)[:1:-1])
        return Counter(compress(self.queues[first : bits.bit_length()], chosen))

    def bits_of(self, queue: int, bits: int) -> int:
        """Return those of these messages that are the queue's."""
        found, left = 0, bits & self.known
        while left:
            bit = left & -left
            if self.queues[bit.bit_length() - 1] == queue:
                found |= bit
            left ^= bit
        return found


class Chunks:
    """It has chunks by their numbers, the last used of them in memory."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._chunks: OrderedDict[int, Chunk] = OrderedDict()
        self._changed: set[int] = set()
        self._last = -1, Chunk()  # the last one that was to change

    def get(self, number: int, *, changes: bool = True) -> Chunk:
        """Return the chunk; a new one if nothing is known of it."""
        if number == self._last[0] and changes:
            return self._last[1]
        chunk = self._chunks.get(number)
        if chunk is None:
            chunk = self._chunks[number] = self._load(number)
        else:
            self._chunks.move_to_end(number)
        if changes:
            self._changed.add(number)
            self._last = number, chunk
        return chunk

    def _load(self, number: int) -> Chunk:
        found = self._connection.execute(
            "SELECT started, last_ms FROM chunk WHERE chunk = ?", (number,)
        ).fetchone()
        if found is None:
            return Chunk()
        chunk = Chunk(int.from_bytes(found[0], "little"), found[1])
        first = number << CHUNK_BITS
        for place, queue in self._connection.execute(
            "SELECT place, queue FROM message WHERE place >= ? AND place < ?",
            (first, first + CHUNK_OFFSETS),
        ):
            at = place & _MASK
            chunk.queues[at] = queue
            chunk.known |= 1 << at
        return chunk

    def write(self) -> None:
        """Write what has changed; the caller commits."""
        rows = []
        for number in self._changed:
            chunk = self._chunks[number]
            size = (chunk.started.bit_length() + 7) // 8
            rows.append(
                (
                    number,
                    chunk.started.to_bytes(size, "little"),
                    chunk.known.bit_count(),
                    (chunk.known & ~chunk.started).bit_count(),
                    chunk.last_ms,
                )
            )
        self._connection.executemany("INSERT OR REPLACE INTO chunk VALUES (?, ?, ?, ?, ?)", rows)
        self._changed.clear()
        self._last = -1, Chunk()
        while len(self._chunks) > MAX_CHUNKS:
            self._chunks.popitem(last=False)

    def drop(self, number: int) -> None:
        """Forget a chunk whose rows are deleted."""
        self._last = -1, Chunk()
        self._chunks.pop(number, None)
        self._changed.discard(number)


@dataclass(slots=True)
class MarkerLog:
    """What a tracker would know of a marker partition, and where new rows begin."""

    tracker: RedeliveryTracker
    next_offset: int


class Fold:
    """It takes records in the order of each partition, and writes rows; one owner thread."""

    def __init__(self, connection: sqlite3.Connection, config: ServiceConfig) -> None:
        self.connection = connection
        self.chunks = Chunks(connection)
        self.markers: dict[int, MarkerLog] = {}
        self.topic_id = b""  # of the messages topic now: others' messages are gone (R13)
        self._rows = Rows(config)
        self._names: dict[str, int] = dict(connection.execute("SELECT text, number FROM name"))
        self._queue_numbers: dict[bytes, int] = {}
        self._new_names: list[tuple[int, str]] = []
        self._messages: list[MessageRow] = []
        self._events: list[tuple[object, ...]] = []
        self._queues: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        self._groups: dict[tuple[int, int, int], list[int]] = {}
        self._minutes: defaultdict[tuple[int, int], list[int]] = defaultdict(lambda: [0] * 7)

    def name(self, text: str) -> int:
        """Return the number of a name, which is written once."""
        number = self._names.get(text)
        if number is None:
            if len(self._names) >= MAX_NAMES and text != OTHER:
                return self.name(OTHER)
            number = self._names[text] = len(self._names) + 1
            self._new_names.append((number, text))
        return number

    # ---- the messages topic

    def messages(self, partition: int, records: Sequence[Record]) -> None:
        """Take in messages of one partition, in their order."""
        first = place_of(MESSAGES, partition, 0)
        for record, headers in zip(records, all_headers(records), strict=True):
            place = first + (record.offset() or 0)
            self._message(place, record.timestamp()[1], record.key(), headers)

    def _message(
        self,
        place: int,
        at_ms: int,
        key: bytes | None,
        headers: Sequence[tuple[str, bytes | None]],
        *,
        is_scheduled: bool = False,
    ) -> None:
        queue_id, user_key = split_key(key)
        queue = self._queue_numbers.get(queue_id)
        if queue is None:
            queue = self.name(queue_id.decode("utf-8", "replace"))
            if len(self._queue_numbers) < MAX_NAMES:
                self._queue_numbers[queue_id] = queue
        self._messages.append(self._rows.message(place, queue, at_ms, user_key, headers))
        chunk = self.chunks.get(place >> CHUNK_BITS)
        if at_ms > chunk.last_ms:
            chunk.last_ms = at_ms
        if is_scheduled:  # a tracker takes it, nobody STARTs it
            chunk.started |= 1 << (place & _MASK)
        is_waiting = chunk.add(place & _MASK, queue)
        counts = self._queues[queue]
        counts[0] += 1
        counts[1] += is_waiting
        self._minutes[at_ms // 60_000, queue][_SENT] += 1

    # ---- markers

    def marker(self, partition: int, record: Record) -> None:
        """Take in one marker; a malformed one only moves the clock (R21)."""
        log, offset = self.markers[partition], record.offset() or 0
        kind, at_ms = record.timestamp()
        try:
            marker = decode_marker(record.value(), partition=partition, offset=offset)
        except WireError:
            marker = None
        if marker is not None and marker.type is MarkerType.END and offset >= log.next_offset:
            self._time(log.tracker, at_ms, marker)  # what it ends is open as yet
        log.tracker.apply(offset, at_ms if kind == LOG_APPEND_TIME else -1, marker)
        if offset < log.next_offset:
            return
        log.next_offset = offset + 1
        if marker is None:
            return
        place = place_of(MARKERS, partition, offset)
        if marker.type is MarkerType.SCHEDULE:
            if not marker.carried_forward and marker.message_id is None:
                self._message(place, at_ms, marker.key, marker.headers, is_scheduled=True)
        elif marker.type in (MarkerType.START, MarkerType.END):
            self._event(place, at_ms, marker)

    def _time(self, tracker: RedeliveryTracker, at_ms: int, marker: Marker) -> None:
        """Add for how long the messages of a worker's verdict were in its hands."""
        if marker.of_schedule or marker.outcome not in _COLUMN:
            return
        minute, one = at_ms // 60_000, marker.message_id
        if one is not None and not self._is_gone(one.topic_id):
            hold = tracker.hold_of(one)
            if hold is not None and hold.flags & STATE == HELD:
                place = place_of(MESSAGES, one.partition, one.offset)
                queue = self.chunks.get(place >> CHUNK_BITS).queues[place & _MASK]
                if queue:
                    self._add_time(minute, queue, 1, at_ms - hold.begin_ms)
        for batch in marker.batches:
            if self._is_gone(batch.topic_id):
                continue
            place = place_of(MESSAGES, batch.partition, batch.base_offset)
            chunk = self.chunks.get(place >> CHUNK_BITS)
            for begin_ms, bits in _held(tracker, batch).items():
                for queue, count in chunk.by_queue(bits).items():
                    self._add_time(minute, queue, count, at_ms - begin_ms)

    def _add_time(self, minute: int, queue: int, count: int, took_ms: int) -> None:
        counts = self._minutes[minute, queue]
        counts[_TIMED] += count
        counts[_HELD_MS] += count * max(0, took_ms)

    def _event(self, place: int, at_ms: int, marker: Marker) -> None:
        log = MARKERS if marker.of_schedule else MESSAGES
        one = marker.message_id
        if one is not None:
            if self._is_gone(one.topic_id):
                return
            at = place_of(log, one.partition, one.offset)
            self._event_in(place, at_ms, marker, at >> CHUNK_BITS, at & _MASK, 1)
        for batch in marker.batches:
            if not self._is_gone(batch.topic_id):
                first = place_of(log, batch.partition, batch.base_offset)
                self._event_in(place, at_ms, marker, first >> CHUNK_BITS, first & _MASK, batch.bits)

    def _is_gone(self, topic_id: bytes) -> bool:
        return bool(topic_id and self.topic_id) and topic_id != self.topic_id

    def _event_in(
        self, place: int, at_ms: int, marker: Marker, number: int, first: int, bits: int
    ) -> None:
        chunk = self.chunks.get(number)
        is_start = marker.type is MarkerType.START
        whole = bits << first & (1 << CHUNK_OFFSETS) - 1
        if is_start:
            column: int | None = _STARTED
            for queue, count in chunk.start(whole).items():
                self._queues[queue][1] -= count
        else:
            column = _COLUMN.get(marker.outcome)
        if column is not None:
            for queue, count in chunk.by_queue(whole).items():
                self._minutes[at_ms // 60_000, queue][column] += count
        self._events.append(
            (
                number,
                place,
                first,
                None if bits == 1 else bits.to_bytes((bits.bit_length() + 7) // 8, "little"),
                STARTED if is_start else END_BASE + marker.outcome,
                at_ms,
                self.name(marker.consumer_id) if marker.consumer_id else None,
                self.name(marker.reason[:MAX_ERROR_CHARACTERS]) if marker.reason else None,
                marker.redeliver_after_ms or None,
            )
        )

    # ---- dead letters and the ledger

    def letter(self, record: Record) -> None:
        """Take in one record of the dead letters topic."""
        letter = dead_letter_of(record, frozenset(), b"")
        place = place_of(LETTERS, letter.partition, letter.offset)
        queue, reason = self.name(letter.queue_id), self.name(letter.reason)
        form = self.name(form_of(letter.error))
        execute = self.connection.execute
        added = execute(
            "INSERT OR IGNORE INTO letter VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                place,
                queue,
                letter.timestamp_ms,
                letter.id.encode("utf-8", "replace"),
                None if letter.user_key is None else letter.user_key[:MAX_KEY_BYTES],
                reason,
                form,
                letter.error[:MAX_ERROR_CHARACTERS],
                letter.delivery_count,
                self._rows.place(letter.origin),
                pack_headers(letter.headers),
            ),
        )
        if not added.rowcount:
            return
        is_redriven = execute("SELECT 1 FROM redriven WHERE place = ?", (place,)).fetchone()
        redriven = int(is_redriven is not None)
        at_ms = letter.timestamp_ms
        group = self._groups.setdefault((queue, reason, form), [0, 0, at_ms, at_ms])
        group[0] += 1
        group[1] += redriven
        group[2:] = min(group[2], at_ms), max(group[3], at_ms)
        self._queues[queue][2] += 1
        self._queues[queue][3] += redriven
        self._minutes[at_ms // 60_000, queue][_DEAD] += 1

    def redriven(self, partition: int, offset: int, at_ms: int) -> None:
        """Take in that a dead letter was sent back, as the ledger has it."""
        place = place_of(LETTERS, partition, offset)
        execute = self.connection.execute
        if not execute("INSERT OR IGNORE INTO redriven VALUES (?, ?)", (place, at_ms)).rowcount:
            return
        found = execute(
            "SELECT queue, reason, form FROM letter WHERE place = ?", (place,)
        ).fetchone()
        if found is not None:
            self._groups.setdefault(found, [0, 0, at_ms, 0])[1] += 1
            self._queues[found[0]][3] += 1

    # ---- writing

    @property
    def pending(self) -> int:
        """Return how many rows are not written."""
        return len(self._messages) + len(self._events)

    def write(self, positions: Iterable[tuple[str, int, int, int]]) -> None:
        """Write all rows, and (topic, partition, next, restart) behind them; the caller commits."""
        many = self.connection.executemany
        many("INSERT INTO name VALUES (?, ?)", self._new_names)
        many("INSERT OR IGNORE INTO message VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", self._messages)
        many("INSERT OR IGNORE INTO event VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", self._events)
        self.chunks.write()
        many(
            "INSERT INTO queue VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
            " messages = messages + excluded.messages, waiting = waiting + excluded.waiting,"
            " letters = letters + excluded.letters, redriven = redriven + excluded.redriven",
            [(queue, *counts) for queue, counts in self._queues.items()],
        )
        many(
            "INSERT INTO minute VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
            " sent = sent + excluded.sent, started = started + excluded.started,"
            " acked = acked + excluded.acked, failed = failed + excluded.failed,"
            " dead = dead + excluded.dead, timed = timed + excluded.timed,"
            " held_ms = held_ms + excluded.held_ms",
            [(*which, *counts) for which, counts in self._minutes.items()],
        )
        self._write_groups()
        many("INSERT OR REPLACE INTO position VALUES (?, ?, ?, ?)", positions)
        for rows in (self._new_names, self._messages, self._events):
            rows.clear()
        self._queues.clear()
        self._minutes.clear()

    def _write_groups(self) -> None:
        self.connection.executemany(
            "INSERT INTO letter_group VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
            " letters = letters + excluded.letters, redriven = redriven + excluded.redriven,"
            " first_ms = min(first_ms, excluded.first_ms),"
            " last_ms = max(last_ms, excluded.last_ms)",
            [(*which, *group) for which, group in self._groups.items()],
        )
        self._groups.clear()

    def forget_chunks(self, numbers: Iterable[int]) -> None:
        """Delete the oldest messages; those that still waited are counted no more."""
        execute = self.connection.execute
        for number in numbers:
            chunk = self.chunks.get(number, changes=False)
            gone = Counter(queue for queue in chunk.queues if queue)
            waited = chunk.by_queue(chunk.known & ~chunk.started)
            for queue, count in gone.items():
                self._queues[queue][0] -= count
                self._queues[queue][1] -= waited[queue]
            first = number << CHUNK_BITS
            execute(
                "DELETE FROM message WHERE place >= ? AND place < ?", (first, first + CHUNK_OFFSETS)
            )
            execute("DELETE FROM event WHERE chunk = ?", (number,))
            execute("DELETE FROM chunk WHERE chunk = ?", (number,))
            self.chunks.drop(number)

    def forget_letters(self, most: int) -> None:
        """Delete the oldest dead letters beyond so many."""
        self._write_groups()
        execute = self.connection.execute
        last = execute("SELECT max(number) FROM letter").fetchone()[0] or 0
        for number, queue, reason, form, is_redriven in execute(
            "SELECT number, queue, reason, form, redriven.place IS NOT NULL FROM letter"
            " LEFT JOIN redriven USING (place) WHERE number <= ? LIMIT 20000",
            (last - most,),
        ).fetchall():
            execute("DELETE FROM letter WHERE number = ?", (number,))
            execute(
                "UPDATE letter_group SET letters = letters - 1, redriven = redriven - ?"
                " WHERE queue = ? AND reason = ? AND form = ?",
                (is_redriven, queue, reason, form),
            )
            self._queues[queue][2] -= 1
            self._queues[queue][3] -= is_redriven
        execute("DELETE FROM letter_group WHERE letters <= 0")


def _held(tracker: RedeliveryTracker, batch: MessageBatch) -> dict[int, int]:
    """Return what is held, as bits in its chunk, by the times of the first STARTs."""
    found: defaultdict[int, int] = defaultdict(int)
    page, shift = divmod(batch.base_offset, PAGE_BITS)
    at, bits = (batch.base_offset & _MASK) - shift, batch.bits << shift
    key = False, batch.topic_id, batch.leader_epoch, batch.partition
    log = tracker.table.find(key, page)
    while bits and log is not None:
        leaf = log.leaf(page)
        for hold in () if leaf is None else leaf.at(page):
            if hold.flags & STATE == HELD:
                found[hold.begin_ms] |= (hold.bits & bits) << at
        bits, page, at = bits >> PAGE_BITS, page + 1, at + PAGE_BITS
    return found
