"""Records folded into rows: the one writer of the index.

What is open follows from ``RedeliveryTracker``, the rules that trackers run. It is not written:
after a start each marker partition is read again from where all that is open began (R20), and
records below ``next_offset`` make no rows a second time.
"""

from __future__ import annotations

import sqlite3
from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress

from kafkamq.config import ServiceConfig
from kafkamq.errors import WireError
from kafkamq.markers.rules.hold import HELD, PAGE_BITS, STATE
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.queue.dead_letters import dead_letter_of
from kafkamq.queue.wire.headers import ID
from kafkamq.transport.record import LOG_APPEND_TIME, Record, headers_of, take_only
from kafkamq.types import Headers, Marker, MarkerType, MessageBatch, Outcome
from kafkamq.web.index.packs import (
    MAX_PACK_BYTES,
    PACK_OFFSETS,
    Pack,
    bytes_of,
    pack_event,
    places_of,
    selectors,
)
from kafkamq.web.index.rows import (
    CHUNK_BITS,
    CHUNK_OFFSETS,
    LETTERS,
    MARKERS,
    MAX_ERROR_CHARACTERS,
    MAX_KEY_BYTES,
    MESSAGES,
    OFFSET_BITS,
    Rows,
    form_of,
    ids_of,
    pack_headers,
    place_of,
)

STARTED, END_BASE = 1, 10
MAX_NAMES = 200_000
OTHER = "(other)"
_SENT, _STARTED, _ACKED, _FAILED, _DEAD, _TIMED, _HELD_MS = range(7)
_MESSAGES, _BEGUN, _LETTERS, _REDRIVEN = range(4)
_COLUMN = {Outcome.ACK: _ACKED, Outcome.NACK: _FAILED, Outcome.REJECT: _FAILED}
MAX_CHUNKS = 2048
_EMPTY = bytes(4 * CHUNK_OFFSETS)
_MASK = CHUNK_OFFSETS - 1
_WHOLE = (1 << CHUNK_OFFSETS) - 1


class Chunk:
    """A chunk knows which messages of 4096 offsets were STARTed, and of which queues they are.

    So a START of a thousand messages costs a few operations on long integers, and each message is
    counted as waiting once: from when it was read until its first START, whichever is read first.
    ``queues`` has 0 where no message was read.
    """

    __slots__ = ("known", "last_ms", "queues", "started")

    def __init__(self, started: int = 0, last_ms: int = 0) -> None:
        self.queues = array("I", _EMPTY)
        self.known = 0
        self.started = started
        self.last_ms = last_ms

    def add(self, bits: int, queues: Sequence[int]) -> None:
        self.known |= bits
        end = bits.bit_length()
        begin = end - len(queues)
        if bits == (1 << end) - (1 << begin):
            self.queues[begin:end] = array("I", queues)
        else:
            for at, queue in zip(places_of(0, bits), queues, strict=True):
                self.queues[at] = queue

    def queues_of(self, bits: int) -> Sequence[int]:
        """Return the queues of these messages, of those that were read."""
        bits &= self.known
        if not bits:
            return ()
        begin = (bits & -bits).bit_length() - 1
        found = self.queues[begin : bits.bit_length()]
        if bits.bit_count() == len(found):
            return found
        return list(compress(found, selectors(bits >> begin)))

    def by_queue(self, bits: int) -> dict[int, int]:
        """Return which of these messages are of which queue."""
        bits &= self.known
        queues = self.queues_of(bits)
        if len(set(queues)) == 1:
            return {queues[0]: bits}
        found: defaultdict[int, int] = defaultdict(int)
        for at, queue in zip(places_of(0, bits), queues, strict=True):
            found[queue] |= 1 << at
        return found


class Chunks:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._chunks: OrderedDict[int, Chunk] = OrderedDict()
        self._changed: set[int] = set()
        self._last = -1, Chunk()

    def get(self, number: int, *, changes: bool = True) -> Chunk:
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
        for place, bits, queues in self._connection.execute(
            "SELECT place, bits, queues FROM pack WHERE place >= ? AND place < ?",
            (first, first + CHUNK_OFFSETS),
        ):
            chunk.add(int.from_bytes(bits, "little") << place - first, array("I", queues))
        return chunk

    def write(self) -> None:
        rows = []
        for number in self._changed:
            chunk = self._chunks[number]
            waiting = (chunk.known & ~chunk.started).bit_count()
            rows.append((number, bytes_of(chunk.started), waiting, chunk.last_ms))
        self._connection.executemany("INSERT OR REPLACE INTO chunk VALUES (?, ?, ?, ?)", rows)
        self._changed.clear()
        self._last = -1, Chunk()
        while len(self._chunks) > MAX_CHUNKS:
            self._chunks.popitem(last=False)

    def drop(self, number: int) -> None:
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
        # The id of the messages topic now: messages of others are gone (R13).
        self.topic_id = b""
        self._rows = Rows(config)
        self._names: dict[str, int] = dict(connection.execute("SELECT text, number FROM name"))
        self._queue_number = lru_cache(MAX_NAMES)(
            lambda queue_id: self.name(queue_id.decode("utf-8", "replace"))
        )
        self._new_names: list[tuple[int, str]] = []
        self._packs: dict[int, Pack] = {}
        self._events: defaultdict[int, bytearray] = defaultdict(bytearray)
        self._queues: list[Counter[int]] = [Counter() for _ in range(4)]
        self._groups: dict[tuple[int, int, int], list[int]] = {}
        self._minutes: defaultdict[int, list[Counter[int]]] = defaultdict(
            lambda: [Counter() for _ in range(7)]
        )
        self.pending = 0

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
        first = place_of(MESSAGES, partition, 0)
        begin, end = (first + (records[at].offset() or 0) for at in (0, -1))
        places: Sequence[int] = range(begin, end + 1)
        if len(places) != len(records):
            # Some offsets are no message's.
            places = [first + (record.offset() or 0) for record in records]
        begin = 0
        while begin < len(records):
            end = bisect_left(places, (places[begin] | PACK_OFFSETS - 1) + 1, begin)
            part = records[begin:end]
            found, others = take_only(ID, part)
            ids, more = ids_of(found), {at: headers_of(part[at]) for at in others}
            times = [each.timestamp()[1] for each in part]
            keys = [each.key() or b"" for each in part]
            self._add(places[begin:end], times, keys, ids, more)
            begin = end

    def _add(
        self,
        places: Sequence[int],
        times: list[int],
        keys: Sequence[bytes],
        ids: list[bytes],
        more: Mapping[int, Headers],
        *,
        is_scheduled: bool = False,
    ) -> None:
        """Take in messages of one pack, by operations on all of them: those on each are dear."""
        first = places[0]
        bits = (1 << len(places)) - 1
        if places[-1] - first >= len(places):
            bits = sum([1 << place - first for place in places])
        ends = [len(key) if (at := key.find(b"\0")) < 0 else at for key in keys]
        queues = [self._queue_number(key[:end]) for key, end in zip(keys, ends, strict=True)]
        pack = self._pack_at(first)
        pack.bits |= bits << first - pack.place
        pack.queues.extend(queues)
        pack.times.extend(times)
        pack.keys += [key[at : at + 1 + MAX_KEY_BYTES] for key, at in zip(keys, ends, strict=True)]
        pack.headers += [b""] * len(ids)
        for at, headers in more.items():
            ids[at], pack.headers[at - len(ids)], copy = self._rows.read(headers)
            if copy != (1, None, None):
                insert = "INSERT INTO copy VALUES (?, ?, ?, ?)"
                self.connection.execute(insert, (places[at], *copy))
        pack.ids += ids
        chunk, bits = self.chunks.get(first >> CHUNK_BITS), bits << (first & _MASK)
        last_ms = max(times)
        chunk.last_ms = max(chunk.last_ms, last_ms)
        chunk.add(bits, queues)
        if is_scheduled:
            chunk.started |= bits
        _count(self._queues[_BEGUN], chunk.queues_of(bits & chunk.started))
        if min(times) // 60_000 == last_ms // 60_000:
            _count(self._minutes[last_ms // 60_000][_SENT], queues)
        else:
            for at_ms, queue in zip(times, queues, strict=True):
                self._minutes[at_ms // 60_000][_SENT][queue] += 1

    def _pack_at(self, place: int) -> Pack:
        """Return the pack to which this place belongs; of each log one is in memory."""
        log, first = place >> OFFSET_BITS, place & -PACK_OFFSETS
        pack = self._packs.get(log)
        if pack is None or not first <= pack.place <= place:
            if pack is not None:
                self._write_packs([pack])
            row = self.connection.execute(
                "SELECT * FROM pack WHERE place BETWEEN ? AND ? ORDER BY place DESC LIMIT 1",
                (first, place),
            ).fetchone()
            if row is None or sum(map(len, row[3:])) > MAX_PACK_BYTES:
                row = (place,)
            pack = self._packs[log] = Pack(*row)
        return pack

    def _write_packs(self, packs: Iterable[Pack]) -> None:
        self.connection.executemany(
            "INSERT OR REPLACE INTO pack VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (pack.row() for pack in packs),
        )

    # ---- markers

    def marker(self, partition: int, record: Record) -> None:
        """Take in one marker; a malformed one only moves the clock (R21)."""
        log, offset = self.markers[partition], record.offset() or 0
        kind, at_ms = record.timestamp()
        try:
            marker = decode_marker(record.value(), partition=partition, offset=offset)
        except WireError:
            marker = None
        named: Sequence[MessageBatch] = ()
        if marker is not None and offset >= log.next_offset:
            named = self._named(marker)
            if marker.type is MarkerType.END and not marker.of_schedule:
                # What it ends is open as yet.
                self._time(log.tracker, at_ms, marker, named)
        log.tracker.apply(offset, at_ms if kind == LOG_APPEND_TIME else -1, marker)
        if offset < log.next_offset:
            return
        log.next_offset = offset + 1
        if marker is None:
            return
        place = place_of(MARKERS, partition, offset)
        if marker.type is MarkerType.SCHEDULE:
            if not marker.carried_forward and marker.message_id is None:
                self._add(
                    [place], [at_ms], [marker.key], [b""], {0: marker.headers}, is_scheduled=True
                )
        elif marker.type in (MarkerType.START, MarkerType.END):
            for batch in named:
                self._event(place, at_ms, marker, batch)

    def _named(self, marker: Marker) -> Sequence[MessageBatch]:
        """Return what a marker names, but for messages of a topic that is gone (R13)."""
        if not self.topic_id:
            return marker.named
        return [each for each in marker.named if each.topic_id in (b"", self.topic_id)]

    def _time(
        self, tracker: RedeliveryTracker, at_ms: int, marker: Marker, named: Sequence[MessageBatch]
    ) -> None:
        """Add for how long the messages of a worker's verdict were in its hands."""
        if marker.outcome not in _COLUMN:
            return
        counts = self._minutes[at_ms // 60_000]
        for batch in named:
            place = place_of(MESSAGES, batch.partition, batch.base_offset)
            chunk = self.chunks.get(place >> CHUNK_BITS)
            for begin_ms, bits in _held(tracker, batch).items():
                queues = chunk.queues_of(bits)
                _count(counts[_TIMED], queues)
                _count(counts[_HELD_MS], queues, max(0, at_ms - begin_ms))

    def _event(self, place: int, at_ms: int, marker: Marker, batch: MessageBatch) -> None:
        log = MARKERS if marker.of_schedule else MESSAGES
        number, first = divmod(place_of(log, batch.partition, batch.base_offset), CHUNK_OFFSETS)
        bits = batch.bits << first & _WHOLE
        chunk = self.chunks.get(number)
        # Its messages may be read later, and it is not older than they are.
        chunk.last_ms = max(chunk.last_ms, at_ms)
        queues = chunk.queues_of(bits)
        if marker.type is MarkerType.START:
            kind, column = STARTED, _STARTED
            fresh = bits & ~chunk.started
            _count(self._queues[_BEGUN], queues if fresh == bits else chunk.queues_of(fresh))
            chunk.started |= bits
        else:
            kind, column = END_BASE + marker.outcome, _COLUMN.get(marker.outcome, -1)
        if column >= 0:
            _count(self._minutes[at_ms // 60_000][column], queues)
        consumer = self.name(marker.consumer_id) if marker.consumer_id else 0
        reason = self.name(marker.reason[:MAX_ERROR_CHARACTERS]) if marker.reason else 0
        facts = kind, consumer, reason, marker.redeliver_after_ms
        self._events[number] += pack_event(place, at_ms, first, *facts, batch.bits)
        self.pending += 1

    # ---- dead letters and the ledger

    def letter(self, record: Record) -> None:
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
        self._queues[_LETTERS][queue] += 1
        self._queues[_REDRIVEN][queue] += redriven
        self._minutes[at_ms // 60_000][_DEAD][queue] += 1

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
            self._queues[_REDRIVEN][found[0]] += 1

    # ---- writing

    def write(self, positions: Iterable[tuple[str, int, int, int]]) -> None:
        """Write all rows, and (topic, partition, next, restart) behind them; the caller commits."""
        many = self.connection.executemany
        many("INSERT INTO name VALUES (?, ?)", self._new_names)
        self._write_packs(self._packs.values())
        self._packs.clear()
        many("INSERT INTO event (chunk, events) VALUES (?, ?)", self._events.items())
        self.chunks.write()
        for counts in self._minutes.values():
            self._queues[_MESSAGES].update(counts[_SENT])
        many(
            "INSERT INTO queue VALUES (?1, ?2, ?2 - ?3, ?4, ?5) ON CONFLICT DO UPDATE SET"
            " messages = messages + excluded.messages, waiting = waiting + excluded.waiting,"
            " letters = letters + excluded.letters, redriven = redriven + excluded.redriven",
            _by_queue(self._queues),
        )
        many(
            "INSERT INTO minute VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
            " sent = sent + excluded.sent, started = started + excluded.started,"
            " acked = acked + excluded.acked, failed = failed + excluded.failed,"
            " dead = dead + excluded.dead, timed = timed + excluded.timed,"
            " held_ms = held_ms + excluded.held_ms",
            [
                (minute, *row)
                for minute, counts in self._minutes.items()
                for row in _by_queue(counts)
            ],
        )
        self._write_groups()
        many("INSERT OR REPLACE INTO position VALUES (?, ?, ?, ?)", positions)
        self._new_names.clear()
        self._events.clear()
        self._minutes.clear()
        for counter in self._queues:
            counter.clear()
        self.pending = 0

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
        """Delete the oldest messages, all of them written; what still waited is counted no more."""
        execute = self.connection.execute
        for number in numbers:
            chunk = self.chunks.get(number, changes=False)
            self._queues[_MESSAGES].subtract(chunk.queues_of(chunk.known))
            self._queues[_BEGUN].subtract(chunk.queues_of(chunk.started))
            first = number << CHUNK_BITS
            for table in ("pack", "copy"):
                execute(
                    f"DELETE FROM {table} WHERE place >= ? AND place < ?",
                    (first, first + CHUNK_OFFSETS),
                )
            for table in ("event", "chunk"):
                execute(f"DELETE FROM {table} WHERE chunk = ?", (number,))
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
            self._queues[_LETTERS][queue] -= 1
            self._queues[_REDRIVEN][queue] -= is_redriven
        execute("DELETE FROM letter_group WHERE letters <= 0")


def _count(counter: Counter[int], queues: Sequence[int], each: int = 1) -> None:
    if len(queues) == 1:
        counter[queues[0]] += each
    elif each == 1:
        counter.update(queues)
    else:
        for queue, number in Counter(queues).items():
            counter[queue] += number * each


def _by_queue(counters: Sequence[Counter[int]]) -> list[tuple[int, ...]]:
    return [
        (queue, *[counter.get(queue, 0) for counter in counters])
        for queue in set().union(*counters)
    ]


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
