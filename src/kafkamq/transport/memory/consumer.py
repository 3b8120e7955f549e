"""A consumer in memory has assignment, positions, pauses, commits and questions; no read-ahead."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    OFFSET_STORED,
    KafkaError,
    Message,
    TopicPartition,
)

from kafkamq.transport.memory.client import BROKER_ID
from kafkamq.transport.memory.membership import Membership, committed_at
from kafkamq.transport.memory.state import Partition, failure, kafka_error
from kafkamq.types import PartitionId

_ASK_S = 1.0
_NO_TIMESTAMP = (0, -1)
_OUT_OF_RANGE = (
    "fetch failed due to requested offset not available on the broker: Broker: Offset out of range"
    f" (broker {BROKER_ID})"
)
_COMMITTED_ONES = (OFFSET_INVALID, OFFSET_STORED)
_NO_COMMIT = "no previously committed offset available: Local: No offset stored"


@dataclass(slots=True)
class _Reading:
    first: int
    offset: int | None
    # When a broker is asked for the partition; negative: it is known.
    asks_s: float = -1.0
    # When the first fetch comes back; negative: none was sent.
    ready_s: float = -1.0
    position: int = OFFSET_INVALID
    eof_at: int = -1


class Consumer(Membership):
    _closed_text = "Consumer closed"

    def __init__(self, settings: Mapping[str, Any], logger: object = None) -> None:
        super().__init__(settings, logger)
        self._is_committed = settings.get("isolation.level") != "read_uncommitted"
        self._tells_ends = str(settings.get("enable.partition.eof", "")).lower() == "true"
        self._reset = str(settings.get("auto.offset.reset", "latest"))
        self._readings: dict[PartitionId, _Reading] = {}
        self._paused: set[PartitionId] = set()
        self._events: deque[Message] = deque()
        self._bounds: dict[PartitionId, tuple[int, int]] = {}
        self._turn = 0

    def kill(self) -> None:
        """A test's: as if its process were killed; the group misses it in its session timeout."""
        with self.cluster.changed:
            self._is_closed = True
            self.cluster.groups.clients.pop(self, None)
            self.cluster.due(0.0)

    # ---- assignment

    def assign(self, partitions: list[TopicPartition]) -> None:
        with self.cluster.changed:
            self._check_open()
            self._has_assigned = True
            self._readings.clear()
            self._events.clear()
            self._add(partitions)

    def unassign(self) -> None:
        self.assign([])

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        with self.cluster.changed:
            self._check_open()
            self._has_assigned = True
            for each in partitions:
                if (each.topic, each.partition) in self._readings:
                    text = (
                        f"{each.topic} [{each.partition}] is already part of the current assignment"
                    )
                    raise failure(KafkaError._CONFLICT, text)
            self._add(partitions)

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        with self.cluster.changed:
            self._check_open()
            self._has_assigned = True
            places = [(each.topic, each.partition) for each in partitions]
            if places and not self._readings:
                raise failure(KafkaError._INVALID_ARG, "Can't subtract from empty assignment")
            for topic, number in places:
                if (topic, number) not in self._readings:
                    text = f"{topic} [{number}] is not part of the current assignment"
                    raise failure(KafkaError._INVALID_ARG, text)
            for place in places:
                self._drop(place)
            self.cluster.changed.notify_all()

    def _add(self, partitions: Sequence[TopicPartition]) -> None:
        for each in partitions:
            self._readings[each.topic, each.partition] = _Reading(each.offset, each.offset)
        self.cluster.changed.notify_all()

    def _drop(self, place: PartitionId) -> None:
        del self._readings[place]
        if self._events:
            kept = [each for each in self._events if (each.topic(), each.partition()) != place]
            self._events = deque(kept)

    def assignment(self) -> list[TopicPartition]:
        with self.cluster.changed:
            self._check_open()
            return [
                TopicPartition(*place, reading.first)
                for place, reading in sorted(self._readings.items())
            ]

    def seek(self, partition: TopicPartition) -> None:
        with self.cluster.changed:
            self._check_open()
            reading = self._readings.get((partition.topic, partition.partition))
            if reading is None or reading.offset is None:
                text = f"Failed to seek to offset {partition.offset}: Local: Erroneous state"
                raise failure(KafkaError._STATE, text)
            reading.offset = partition.offset
            reading.position, reading.eof_at, reading.ready_s = OFFSET_INVALID, -1, -1.0
            self.cluster.changed.notify_all()

    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        with self.cluster.changed:
            self._check_open()
            return [
                TopicPartition(each.topic, each.partition, self._position_of(each))
                for each in partitions
            ]

    def _position_of(self, place: TopicPartition) -> int:
        reading = self._readings.get((place.topic, place.partition))
        return OFFSET_INVALID if reading is None else reading.position

    def pause(self, partitions: list[TopicPartition]) -> None:
        """Pause as confluent_kafka's does: also what is not assigned, and until it is resumed."""
        with self.cluster.changed:
            self._check_open()
            self._paused.update((each.topic, each.partition) for each in partitions)

    def resume(self, partitions: list[TopicPartition]) -> None:
        with self.cluster.changed:
            self._check_open()
            self._paused.difference_update((each.topic, each.partition) for each in partitions)
            self.cluster.changed.notify_all()

    # ---- reading

    def poll(self, timeout: float = -1) -> Message | None:
        found = self._consume(1, timeout, is_poll=True)
        return found[0] if found else None

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        return self._consume(num_messages, timeout, is_poll=False)

    def _consume(self, count: int, timeout: float | None, *, is_poll: bool) -> list[Message]:
        found: list[Message] = []
        until_s = math.inf
        while True:
            with self.cluster.changed:
                self._check_open()
                now_s = self.cluster.tick()
                if until_s == math.inf and timeout is not None and timeout >= 0:
                    until_s = now_s + timeout
                self._look_around()
                self._polled(now_s)
                callback = self._next_answer(now_s) or self._next_callback()
                if callback is None and not self._errors:
                    self._read(found, count - len(found))
                    if len(found) >= count or now_s >= until_s:
                        return found
                    self.cluster.wait(until_s)
                    continue
            served = self._serve_errors()
            if callback is not None:
                callback()
            elif served and is_poll and now_s >= until_s:
                return found

    def _read(self, found: list[Message], count: int) -> None:
        while self._events and count > 0:
            found.append(self._events.popleft())
            count -= 1
        readings = list(self._readings.items())
        self._turn += 1
        for index in range(len(readings)):
            if count <= 0:
                return
            place, reading = readings[(index + self._turn) % len(readings)]
            if reading.offset is not None and place not in self._paused:
                before = len(found)
                self._read_one(place, reading, found, count)
                count -= len(found) - before

    def _read_one(
        self, place: PartitionId, reading: _Reading, found: list[Message], count: int
    ) -> None:
        cluster = self.cluster
        if cluster.faults.separates(self):
            return
        partition = cluster.partition(place)
        if partition is None or place[1] >= self.known.setdefault(
            place[0], len(partition.topic.partitions)
        ):
            self._ask_for(place[0], reading)
            return
        if not self._is_placed(place, reading, partition):
            if reading.offset is None:
                found.append(self._events.popleft())
            return
        offset = reading.offset
        assert offset is not None
        end = partition.stable if self._is_committed else partition.end
        self._bounds[place] = partition.start, end
        if not partition.start <= offset <= partition.end:
            self._reset_to(place, reading, offset, _OUT_OF_RANGE)
            if self._events:
                found.append(self._events.popleft())
            return
        if offset < end:
            records, reading.offset = partition.read(offset, count, is_committed=self._is_committed)
            reading.position = reading.offset
            topic, number = place
            kind = partition.topic.timestamp_kind
            for at, record in records:
                found.append(
                    Message(
                        topic=topic,
                        partition=number,
                        offset=at,
                        key=record.key,
                        value=record.value,
                        headers=record.headers,  # type: ignore[arg-type]  # list is invariant
                        timestamp=(kind, record.timestamp_ms),
                        leader_epoch=partition.leader_epoch,
                    )
                )
            count -= len(records)
        if self._tells_ends and count > 0 and reading.offset == end != reading.eof_at:
            reading.eof_at = end
            found.append(_event(place, end, KafkaError._PARTITION_EOF, _end_text(partition, end)))

    def _is_placed(self, place: PartitionId, reading: _Reading, partition: Partition) -> bool:
        """Return whether leader and offset are known; without an offset an event says why."""
        faults = self.cluster.faults
        is_led = place not in faults.offline
        if is_led and faults.plan is not None and not self._is_fetched(place):
            return False
        # What the group has committed its coordinator tells.
        is_committed = reading.offset in _COMMITTED_ONES
        if is_committed and self._is_undecided([place]):
            return False
        if (reading.offset or 0) < 0 and (is_led or is_committed):
            self._start(place, reading, partition)
        return is_led and reading.offset is not None

    def _ask_for(self, topic: str, reading: _Reading) -> None:
        """Ask a broker every second for what is assigned and unknown."""
        now_s = time.monotonic()
        is_asked = 0 <= reading.asks_s <= now_s
        if is_asked and self._topic(topic) is not None:
            self._learn(topic)
            self.cluster.due(0.0)
        elif is_asked or reading.asks_s < 0:
            reading.asks_s = now_s + _ASK_S
        self.cluster.due(max(now_s, reading.asks_s))

    def _is_fetched(self, place: PartitionId) -> bool:
        """Return whether the first fetch from there has come back; the later ones run ahead."""
        now_s, reading = time.monotonic(), self._readings[place]
        if reading.ready_s < 0:
            fault = self.cluster.faults.of("fetch", self, place)
            reading.ready_s = now_s + (fault.latency_s if fault is not None else 0.0)
        if reading.ready_s > now_s:
            self.cluster.due(reading.ready_s)
        return reading.ready_s <= now_s

    def _start(self, place: PartitionId, reading: _Reading, partition: Partition) -> None:
        wanted = reading.offset
        if wanted == OFFSET_BEGINNING:
            reading.offset = partition.start
        elif wanted == OFFSET_END:
            reading.offset = partition.stable if self._is_committed else partition.end
        elif wanted in _COMMITTED_ONES:
            committed = self.cluster.groups.committed(self._group, place)
            if committed is not None:
                reading.offset = committed[0]
            else:
                self._reset_to(place, reading, OFFSET_INVALID, _NO_COMMIT)

    def _reset_to(self, place: PartitionId, reading: _Reading, offset: int, text: str) -> None:
        partition = self.cluster.partition(place)
        if self._reset == "error" or partition is None:
            reading.offset = None
            self._events.append(_event(place, offset, KafkaError._AUTO_OFFSET_RESET, text))
        elif self._reset in ("earliest", "smallest", "beginning"):
            reading.offset = partition.start
        else:
            reading.offset = partition.stable if self._is_committed else partition.end

    # ---- commits and questions

    def committed(
        self, partitions: list[TopicPartition], timeout: float = -1
    ) -> list[TopicPartition]:
        self._check_open()
        prefix = "Failed to get committed offsets: "
        places = [(each.topic, each.partition) for each in partitions]
        with self._turns(timeout) as wait:
            self._finish_joining(timeout if timeout >= 0 else 1e9, prefix)
            while self._is_undecided(places):
                if not wait():
                    raise failure(KafkaError._TIMED_OUT, prefix + "Local: Timed out")
            found = self._request("committed", lambda: self._committed(places), timeout, prefix)
            self.cluster.groups.answered(self._group, found)
            return found

    def _is_undecided(self, places: Sequence[PartitionId]) -> bool:
        """Return whether an open transaction holds an offset: its end is waited for.

        The broker answers with UNSTABLE_OFFSET_COMMIT, and the client asks again.
        """
        pending = self.cluster.transactions.has_pending_offset
        return self._is_committed and any(pending(self._group, place) for place in places)

    def _committed(self, places: Sequence[PartitionId]) -> list[TopicPartition]:
        answer = []
        for place in places:
            found = self.cluster.groups.committed(self._group, place)
            if found is None:
                answer.append(TopicPartition(*place, OFFSET_INVALID))
            else:
                answer.append(committed_at(place, *found))
        return answer

    def get_watermark_offsets(
        self, partition: TopicPartition, timeout: float = -1, cached: bool = False
    ) -> tuple[int, int]:
        self._check_open()
        place = partition.topic, partition.partition
        if cached:
            return self._bounds.get(place, (OFFSET_INVALID, OFFSET_INVALID))
        prefix = "Failed to get watermark offsets: "

        faults = self.cluster.faults
        if place in faults.offline and not faults.separates(self):
            raise failure(KafkaError._UNKNOWN_PARTITION, prefix + "Local: Unknown partition")

        def ask() -> tuple[int, int]:
            found = self._known_partition(place, prefix)
            return found.start, found.stable if self._is_committed else found.end

        return self._request("list_offsets", ask, timeout, prefix, place=place)

    def offsets_for_times(
        self, partitions: list[TopicPartition], timeout: float = -1
    ) -> list[TopicPartition]:
        self._check_open()
        prefix = "Failed to get offsets: "

        def ask() -> list[TopicPartition]:
            answer = []
            for each in partitions:
                found = self._known_partition((each.topic, each.partition), prefix)
                end = found.stable if self._is_committed else found.end
                if each.offset == OFFSET_END:
                    offset = end
                elif each.offset == OFFSET_BEGINNING:
                    offset = found.start
                else:
                    offset = found.offset_at(each.offset, end)
                answer.append(TopicPartition(each.topic, each.partition, offset))
            return answer

        return self._request("list_offsets", ask, timeout, prefix)

    def _known_partition(self, place: PartitionId, prefix: str) -> Partition:
        found = self.cluster.partition(place)
        if found is None and self.known.get(place[0], 0) > place[1]:
            self._learn(place[0])
        if found is None or place[1] >= (self.known.get(place[0]) or self._learn(place[0])):
            raise failure(KafkaError._UNKNOWN_PARTITION, prefix + "Local: Unknown partition")
        return found


def _event(place: PartitionId, offset: int, code: int, text: str) -> Message:
    told: dict[str, Any] = {} if offset < 0 else {"offset": offset}
    return Message(
        topic=place[0],
        partition=place[1],
        value=text.encode(),
        error=kafka_error(code, text),
        timestamp=_NO_TIMESTAMP,
        **told,
    )


def _end_text(partition: Partition, end: int) -> str:
    return (
        f"Fetch from broker {BROKER_ID} reached end of partition at offset {end}"
        f" (HighwaterMark {partition.end})"
    )
