"""Where a queue's workers are, kept for longer than Kafka keeps a group's offsets.

Kafka drops the committed offsets of a group that has been empty for ``offsets.retention.minutes``
(7 days). A queue that nobody worked on for so long would begin at the log's start, and hand out
again what was acked. So workers also write their positions to the namespace's compacted ledger, at
most once a second and never while anybody waits for it. A query on Spark does so behind its STARTs.
Who finds nothing committed looks there. A killed worker may leave the ledger a moment behind; the
STARTs since then say what it had begun, and what is STARTed is the tracker's to answer for. So it
is with what is committed: the STARTs behind it are those of a worker that was killed just then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, KafkaMQError, WireError
from kafkamq.markers.rules.batching import MessageSet
from kafkamq.markers.rules.leases import Overtaken
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.markers.wire.records import (
    GroupPosition,
    decode_group_position,
    encode_group_position,
    position_prefix,
)
from kafkamq.queue.wire.keys import CHUNK_OFFSETS, key_partition, marker_partition, split_key
from kafkamq.transport.admin import Admin
from kafkamq.transport.errors import (
    KafkaError,
    Meaning,
    broker_error,
    is_retriable,
    meaning,
)
from kafkamq.transport.log_reader import RecordReader, scan
from kafkamq.transport.producer import IdempotentProducer
from kafkamq.transport.record import Record
from kafkamq.transport.settings import producer_settings
from kafkamq.types import Marker, MarkerType, Outcome

# Brokers' clocks differ, and STARTs come behind the latest one that is known.
MARGIN_MS = 60_000
REFUSED_S = 60.0
# What has not changed is written again: a former owner's record may come late.
AGAIN_S = 600.0
LOOK_BACK_MS = 600_000
_LOOK_CHUNKS = 4
# What a worker's polls wait for a look, with all of its steps.
_LOOK_S = 2.0
_WITHOUT = (Meaning.FORBIDDEN, Meaning.NO_TOPIC)
"""Without the right to read, or a ledger, a worker goes on: it only knows less."""
_log = logging.getLogger(__name__)


class Positions:
    """The positions of one consumer's group; noted by its owner, written by its keeper."""

    def __init__(self, config: ServiceConfig, group: str, queue_id: str) -> None:
        self._config = config
        self._group = group
        self._queue_key = queue_id.encode()
        self._prefix = position_prefix(group)
        self._lock = threading.Lock()
        # By partition: the latest that is known; those that are to be written; and of these, those
        # that are to be written once, if that succeeds.
        self._known: dict[int, GroupPosition] = {}
        self._pending: set[int] = set()
        self._leaving: set[int] = set()
        self._started_ms = 0
        self._producer: IdempotentProducer | None = None
        self._retry_s = 0.0
        self._again_s = time.monotonic() + AGAIN_S
        self._has_warned = False
        self._is_closed = False

    # What the owner of the consumer says.

    def note(self, offsets: Mapping[int, int], topic_id: bytes) -> None:
        """These offsets are committed, in the topic of that id."""
        at_ms = self._started_ms or time.time_ns() // 1_000_000
        with self._lock:
            for partition, offset in offsets.items():
                self._leaving.discard(partition)
                known = self._known.get(partition)
                if known is None or (known.offset, known.topic_id) != (offset, topic_id):
                    self._known[partition] = GroupPosition(topic_id, offset, at_ms)
                    self._pending.add(partition)

    def started(self, log_ms: int) -> None:
        self._started_ms = max(self._started_ms, log_ms)

    def is_known(self, partition: int) -> bool:
        return partition in self._known

    def forget(self, partitions: Collection[int]) -> None:
        """They are another member's: what was noted is written once, and never again later."""
        with self._lock:
            for partition in partitions:
                if partition in self._pending:
                    self._leaving.add(partition)
                else:
                    self._known.pop(partition, None)

    # What the keeper does.

    def write(self) -> None:
        """Queue what was noted since the last call; waits for nothing."""
        if self._producer is not None:
            self._serve(0.0)
        now_s = time.monotonic()
        if now_s >= self._again_s:
            self._again_s = now_s + AGAIN_S
            with self._lock:
                self._pending.update(self._known)
        if not self._pending or self._is_closed or now_s < self._retry_s:
            return
        positions: dict[int, GroupPosition] = {}
        try:
            with self._lock:
                for number in self._pending:
                    # All STARTs that were told are below it: those above it will be newer.
                    known = self._known[number]
                    at_ms = self._started_ms or known.at_ms
                    positions[number] = replace(known, at_ms=at_ms)
                self._pending.clear()
                for number in self._leaving:
                    self._known.pop(number, None)
                self._leaving.clear()
            if self._producer is None:
                settings = producer_settings(self._config, partitioner="murmur2_random")
                self._producer = IdempotentProducer(self._config, settings)
            for number, position in positions.items():
                self._producer.produce(
                    self._config.ledger_topic,
                    encode_group_position(position),
                    self._prefix + b"%d" % number,
                    -1,
                    None,
                    partial(self._written, number),
                )
        except BrokerError as error:
            self._refused(positions, error)
            return
        except BaseException:
            # It is an interrupt: the next call writes them.
            self._wait_again(positions)
            raise
        self._serve(0.0)

    def _wait_again(self, partitions: Collection[int]) -> None:
        with self._lock:
            self._pending.update(number for number in partitions if number in self._known)

    def _serve(self, timeout_s: float) -> None:
        assert self._producer is not None, "there is something to serve"
        try:
            self._producer.serve(timeout_s)
        except BrokerError as error:
            self._refused((), error)

    def _written(self, number: int, error: KafkaError | None, _: Record) -> None:
        if error is not None:
            self._refused((number,), error)

    def _refused(self, partitions: Collection[int], error: KafkaError | BrokerError) -> None:
        self._wait_again(partitions)
        wrapped = broker_error(error, f"writing positions to {self._config.ledger_topic}")
        if not is_retriable(wrapped):
            self._retry_s = time.monotonic() + REFUSED_S
            self._warn("positions cannot be kept", str(wrapped))

    def _warn(self, what: str, error_text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s: a queue whose workers were away for offsets.retention.minutes would hand out "
                "again what was acked",
                what,
                extra={"group": self._group, "error": error_text},
            )

    def close(self, timeout_s: float = 5.0) -> None:
        """Write the last ones, bounded, and end the client; idempotent."""
        if self._is_closed:
            return
        self.write()
        self._is_closed = True
        if self._producer is not None:
            self._producer.close(timeout_s)

    # What is read back.

    def find(self, partitions: Collection[int], topic_id: bytes) -> dict[int, GroupPosition]:
        """Return what the ledger knows of these partitions of that topic; absent: nothing.

        Raises:
            BrokerError, DeadlineExceededError: No answer; ask again.
        """
        found: dict[int, GroupPosition] = {}
        try:
            topic, starts = self._config.ledger_topic, self._ledger_starts(partitions)
            for record in scan(self._config, topic, starts, group_id=self._group):
                key = record.key()
                if not isinstance(key, bytes) or not key.startswith(self._prefix):
                    continue
                number = key.removeprefix(self._prefix)
                position = self._decoded(record)
                if position is not None and number.isdigit() and int(number) in partitions:
                    found[int(number)] = position
        except BrokerError as error:
            if meaning(error) not in _WITHOUT:
                raise
            self._warn("positions that were kept cannot be read", str(error))
        # Those of a topic that may have been recreated since do not count (R13).
        kept = {
            number: position
            for number, position in found.items()
            if topic_id and topic_id == position.topic_id
        }
        if kept:
            _log.warning(
                "the group's offsets are gone (offsets.retention.minutes); the ledger has them",
                extra={"queue": self._queue_key.decode(), "partitions": sorted(kept)},
            )
        return kept

    def _ledger_starts(self, partitions: Collection[int]) -> dict[int, int]:
        """Return where the partitions of the ledger begin that may hold these positions.

        Sinks and redriven dead letters leave records by the million.
        """
        topic = self._config.ledger_topic
        with Admin(self._config) as admin:
            count = admin.require_topic(topic).partitions
            numbers = {key_partition(self._prefix + b"%d" % each, count) for each in partitions}
            bounds = admin.log_bounds(topic, sorted(numbers))
        return {number: first for number, (first, end) in bounds.items() if end > first}

    def _decoded(self, record: Record) -> GroupPosition | None:
        try:
            return decode_group_position(record.value())
        except WireError as error:
            _log.warning(
                "a position in the ledger cannot be read",
                extra={"error": str(error), "offset": record.offset()},
            )
            return None

    def started_since(self, positions: Mapping[int, GroupPosition]) -> MessageSet:
        """Return messages of the queue at or above these positions whose STARTs are in the log.

        Reads a minute or two of the markers for each time at which positions were written, or the
        first message above one came, if that was later: from before that time until no such START
        has come for a minute.

        Raises:
            BrokerError, DeadlineExceededError: No answer; ask again.
        """
        started = MessageSet()
        try:
            above = self._with_messages(positions)
            for first_ms, last_ms in _times(above.values()):
                self._add_started(started, first_ms, last_ms, above)
        except BrokerError as error:
            if meaning(error) not in _WITHOUT:
                raise
            self._warn("STARTs behind a kept position cannot be read", str(error))
        return started

    def _with_messages(self, positions: Mapping[int, GroupPosition]) -> dict[int, GroupPosition]:
        """Return those with messages above, none of whose STARTs is older than the first message.

        A position can be much older: its queue had nothing to do until shortly before the end.
        """
        topic = self._config.message_topic
        with Admin(self._config) as admin:
            bounds = admin.log_bounds(topic, sorted(positions))
        above: dict[int, GroupPosition] = {}
        with closing(RecordReader(self._config, topic, group_id=self._group)) as reader:
            for number, position in positions.items():
                if position.offset < bounds[number][1]:
                    first = reader.read(number, position.offset)
                    came_ms = 0 if first is None else first.timestamp()[1]
                    above[number] = replace(position, at_ms=max(position.at_ms, came_ms))
        return above

    def _add_started(
        self,
        started: MessageSet,
        first_ms: int,
        last_ms: int,
        positions: Mapping[int, GroupPosition],
    ) -> None:
        until_ms = last_ms + MARGIN_MS
        starts = self._markers_since(first_ms - MARGIN_MS)
        passed: dict[int | None, int] = {}
        for record in scan(self._config, self._config.marker_topic, starts, group_id=self._group):
            log_ms = record.timestamp()[1]
            if log_ms > until_ms:
                passed[record.partition()] = log_ms
                if len(passed) == len(starts) and min(passed.values()) > until_ms:
                    break
            marker = _decoded_marker(record)
            if marker is None or not self._is_own_start(marker):
                continue
            for batch in marker.named:
                position = positions.get(batch.partition)
                if position is not None and started.add(batch, position.offset):
                    until_ms = max(until_ms, log_ms + MARGIN_MS)

    def _is_own_start(self, marker: Marker) -> bool:
        if marker.type is not MarkerType.START:
            return False
        queue_key = split_key(marker.key)[0]
        # Batches without a key are of several queues (R29).
        return queue_key == self._queue_key or bool(not queue_key and marker.batches)

    def overtaken(self, first: Mapping[int, int], since_ms: int) -> Overtaken:
        """Return what a former owner had STARTed, which was killed before it committed the offsets.

        A START of ours may come when the lease of the first one is over: then a tracker brings the
        message back, whatever becomes of ours. Verdicts of a worker say that the position was set
        back on purpose: such messages are left out.

        Best effort and bounded: without an answer only copies that were seen count. On brokers
        before Kafka 3.0 none is found.

        Args:
            first: The first offset of the queue by partition, at or behind what is committed.
            since_ms: Broker time of the oldest of these messages; 0: not known.
        """
        found = Overtaken()
        until_s = time.monotonic() + _LOOK_S
        try:
            found.latest_ms, starts, ends = self._recent_markers(first, since_ms, until_s)
            where = self._config, self._config.marker_topic, starts
            for record in scan(*where, group_id=self._group, ends=ends, until_s=until_s):
                self._add_former(found, record, first)
            found.is_whole = True
        except KafkaMQError as error:
            found.starts.clear()
            _log.info("STARTs of a former owner cannot be read", extra={"error": str(error)})
        return found

    def _add_former(self, found: Overtaken, record: Record, first: Mapping[int, int]) -> None:
        marker = _decoded_marker(record)
        log_ms = record.timestamp()[1]
        found.latest_ms = max(found.latest_ms, log_ms)
        if marker is None or marker.of_schedule:
            return
        is_start = self._is_own_start(marker)
        if not is_start and marker.type is not MarkerType.END:
            return
        if marker.outcome is Outcome.ALREADY_ENDED:
            return
        # What ended it, or a START of it, says what became of it (R12).
        is_copied = marker.outcome in (Outcome.REDELIVERED, Outcome.DEAD_LETTERED)
        of_start = log_ms, record.offset() or 0, record.partition() or 0
        for batch in marker.named:
            if batch.partition not in first:
                continue
            if not is_start and is_copied:
                found.redelivered.add(batch, first[batch.partition])
            elif not is_start:
                found.redelivered.discard(batch)
            for message_id in batch.message_ids():
                if not is_start:
                    found.starts.pop(message_id, None)
                elif message_id.offset >= first[batch.partition]:
                    found.starts.setdefault(message_id, of_start)

    def _recent_markers(
        self, first: Mapping[int, int], since_ms: int, until_s: float
    ) -> tuple[int, dict[int, int], dict[int, int]]:
        """Return their latest time, and from where to where those of these messages are."""
        topic = self._config.marker_topic
        with Admin(self._config, until_s=until_s) as admin:
            count = admin.require_topic(topic).partitions
            numbers = {
                marker_partition(partition, offset + chunk * CHUNK_OFFSETS, count)
                for partition, offset in first.items()
                for chunk in range(_LOOK_CHUNKS)
            }
            times = admin.latest_times(topic, sorted(numbers))
            latest_ms = max(times.values(), default=0)
            if latest_ms < since_ms or not times:
                return latest_ms, {}, {}
            back_ms = max(since_ms, latest_ms - LOOK_BACK_MS, 0)
            starts = admin.offsets_for_times(topic, dict.fromkeys(times, back_ms))
            ends = admin.log_ends(topic) if starts else {}
        return latest_ms, starts, {number: end for number, (_, end) in ends.items()}

    def _markers_since(self, since_ms: int) -> dict[int, int]:
        topic = self._config.marker_topic
        with Admin(self._config) as admin:
            numbers = range(admin.require_topic(topic).partitions)
            return admin.offsets_for_times(topic, dict.fromkeys(numbers, max(0, since_ms)))


def _decoded_marker(record: Record) -> Marker | None:
    try:
        return decode_marker(record.value())
    except WireError:
        # The tracker counts it.
        return None


def _times(positions: Collection[GroupPosition]) -> list[tuple[int, int]]:
    """Return when positions were written, from and to; between these may lie months of log."""
    times: list[tuple[int, int]] = []
    for at_ms in sorted(position.at_ms for position in positions):
        if times and at_ms - times[-1][1] <= 2 * MARGIN_MS:
            times[-1] = times[-1][0], at_ms
        else:
            times.append((at_ms, at_ms))
    return times
