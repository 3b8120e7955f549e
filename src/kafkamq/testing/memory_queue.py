"""One queue in memory: its log, what waits, what falls due, and its dead letters."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

from kafkamq.config import milliseconds
from kafkamq.errors import StateError
from kafkamq.queue.rules.waiting import Waiting
from kafkamq.queue.wire.headers import Origin, dead_letter_headers, read_message_headers
from kafkamq.types import DeadLetterReason, Headers


class Clock:
    """A clock that stands still until a test moves it; thread-safe."""

    def __init__(self, start: float = 0.0) -> None:
        self._now_ms = round(start * 1000)
        self._moved: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def now_ms(self) -> int:
        return self._now_ms

    def advance(self, seconds: float | timedelta) -> None:
        """Move it on; what falls due is due when this returns."""
        with self._lock:
            self._now_ms += milliseconds(seconds, name="seconds")
            told = list(self._moved)
        for tell in told:
            tell()

    def on_move(self, tell: Callable[[], None]) -> None:
        """Call this after each move."""
        with self._lock:
            self._moved.append(tell)


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """A message as it lies in a log; read as confluent-kafka's are."""

    log: str
    number: int
    place: int
    own_key: bytes | None
    payload: bytes | None
    fields: Headers
    appended_ms: int

    def topic(self) -> str:
        return self.log

    def partition(self) -> int:
        return self.number

    def offset(self) -> int:
        return self.place

    def key(self) -> bytes | None:
        return self.own_key

    def value(self) -> bytes | None:
        return self.payload

    def headers(self) -> Headers:
        return self.fields

    def set_headers(self, value: object) -> None:
        """Keep the headers: what is read in memory has none to set free."""

    def timestamp(self) -> tuple[int, int]:
        return 1, self.appended_ms

    def latency(self) -> float:
        return 0.0

    def origin(self) -> Origin:
        known = read_message_headers(self.fields).origin
        if known is not None and known.topic == self.log:
            return known
        return Origin(self.log, self.number, self.place, self.appended_ms)


@dataclass(frozen=True)
class MemoryDeadLetter:
    """A dead letter, with the headers that it would have in Kafka."""

    queue_id: str
    key: bytes | None
    payload: bytes | None
    headers: Mapping[str, bytes | None]

    @property
    def reason(self) -> str:
        """Return why, as a value of ``DeadLetterReason``."""
        return (self.headers.get("kafkamq-reason") or b"").decode()

    @property
    def error(self) -> str:
        return (self.headers.get("kafkamq-error") or b"").decode()

    @property
    def delivery_count(self) -> int:
        return int(self.headers.get("kafkamq-delivery-count") or b"0")


@dataclass(slots=True)
class Item:
    """A message, and which delivery its next one is."""

    record: MemoryRecord
    count: int = 1


class Holder(Protocol):
    def expire(self, now_ms: int) -> None:
        """End leases whose time is over; with ``MemoryQueue.changed`` held."""


class MemoryQueue:
    """``changed`` guards all of it; methods are called with it held, but for ``tick``."""

    def __init__(self, queue_id: str, clock: Clock) -> None:
        self.queue_id = queue_id
        self.clock = clock
        self.changed = threading.Condition()
        self.partitions = 1
        self.arrived: list[Item] = []
        self.waiting: Waiting[Item] = Waiting()
        self.letters: list[MemoryDeadLetter] = []
        self.consumers: list[Holder] = []
        self._offsets: Counter[tuple[str, int]] = Counter()
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = count()
        self._schedules: dict[int, int] = {}
        self._cancelled: set[int] = set()

    def tick(self) -> None:
        with self.changed:
            now_ms = self.clock.now_ms()
            while self._due and self._due[0][0] <= now_ms:
                heappop(self._due)[2]()
            for consumer in list(self.consumers):
                consumer.expire(now_ms)
            self.changed.notify_all()

    def at(self, due_ms: int, act: Callable[[], None]) -> None:
        """Call ``act`` then, with ``changed`` held; at once if that is past."""
        if due_ms <= self.clock.now_ms():
            act()
        else:
            heappush(self._due, (due_ms, next(self._numbers), act))

    def record(
        self, log: str, number: int, key: bytes | None, payload: bytes | None, headers: Headers
    ) -> MemoryRecord:
        offset = self._offsets[log, number]
        self._offsets[log, number] += 1
        return MemoryRecord(log, number, offset, key, payload, headers, self.clock.now_ms())

    def add(self, record: MemoryRecord, delivery_count: int = 1) -> None:
        self.arrived.append(Item(record, delivery_count))
        self.changed.notify_all()

    def schedule(self, marker: MemoryRecord, due_ms: int, append: Callable[[], None]) -> None:
        """Take a delayed message, by its place in the log of markers."""
        self._schedules[marker.place] = due_ms

        def fire() -> None:
            if marker.place not in self._cancelled:
                append()

        self.at(due_ms, fire)

    def cancel(self, offset: int) -> None:
        """Take a delayed message back; again is fine."""
        due_ms = self._schedules.get(offset)
        if due_ms is None:
            raise StateError(f"no delayed message of queue {self.queue_id!r} stands at {offset}")
        if self.clock.now_ms() >= due_ms and offset not in self._cancelled:
            raise StateError("the message was due before its cancellation: it enters the queue")
        self._cancelled.add(offset)

    def give_up(
        self, record: MemoryRecord, delivery_count: int, reason: DeadLetterReason, error: str
    ) -> None:
        headers = dead_letter_headers(
            record.fields,
            reason=reason,
            error=error,
            delivery_count=delivery_count,
            origin=record.origin(),
            queue_id=self.queue_id,
        )
        letter = MemoryDeadLetter(self.queue_id, record.own_key, record.payload, dict(headers))
        self.letters.append(letter)
        self.changed.notify_all()

    def forget_deliveries(self) -> None:
        """Nobody receives any more, and only a consumer has counted deliveries and made shards."""
        items = [*self.waiting.clear(), *self.arrived]
        self.arrived = [Item(each.record) for each in sorted(items, key=_place)]


def _place(item: Item) -> tuple[int, int]:
    return item.record.appended_ms, item.record.place
