"""A broker of one share group, in memory: locks, counted deliveries, records given up in silence.

It behaves as Kafka 4.2 does where it matters here: a record whose last delivery ends with anything
but an acknowledgement is archived; a poll gives all that is free, whole batches of producers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka import AcknowledgeType, TopicPartition
from tests.waiting import within

from kafkamq.config import QueueConfig
from kafkamq.queue.dead_letter_writer import TopicOutbox
from kafkamq.queue.sure_writer import Form, Written
from kafkamq.share import backend as share
from kafkamq.share.backend import ShareConsumer
from kafkamq.share.settings import ShareLimits
from kafkamq.types import Backend

LIMIT = 5
LETTERS = "dead-letters"


class Entry:
    """A record, and what the group knows of it."""

    def __init__(self, place: int, form: Form) -> None:
        self.place, self.form = place, form
        self.count, self.until_s, self.state = 0, 0.0, ""


class Fetched:
    """A record as confluent-kafka gives it."""

    def __init__(self, entry: Entry) -> None:
        self.entry, self.count = entry, entry.count

    def error(self) -> None: ...
    def topic(self) -> str:
        return self.entry.form.topic

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self.entry.place

    def key(self) -> bytes | None:
        return self.entry.form.key

    def value(self) -> bytes | None:
        return self.entry.form.value

    def headers(self) -> list[tuple[str, bytes | None]]:
        return list(self.entry.form.headers)

    def timestamp(self) -> tuple[int, int]:
        return (1, 1000)

    def delivery_count(self) -> int:
        return self.count


class Broker:
    """``refuses`` letters, or copies, as long as it says so.

    Members that were given nothing leave when ``lets_leave``.
    """

    def __init__(self, lock_s: float) -> None:
        self.lock = threading.Lock()
        self.lock_s = lock_s
        self.log: list[Entry] = []
        self.dead_letters: list[Form] = []
        self.refuses_letters = False
        self.lets_leave = threading.Event()
        self.lets_leave.set()
        self._held: list[tuple[Form, Future[None]]] = []

    def send(self, payload: bytes) -> None:
        self.append(Form("t", 0, None, payload, ()))

    def append(self, form: Form) -> None:
        with self.lock:
            self.log.append(Entry(len(self.log), form))

    def mend(self) -> None:
        """Take letters from now on, those that are waited for first."""
        with self.lock:
            self.refuses_letters = False
            held, self._held = self._held, []
        for form, future in held:
            if not future.cancelled():
                self.dead_letters.append(form)
                future.set_result(None)

    def write(self, make: Any, _: object = None) -> Written:
        """In the place of ``SureWriter.write``."""
        form, written = make(0), Written()
        if form.topic != LETTERS:
            self.append(form)
        elif self.refuses_letters:
            with self.lock:
                self._held.append((form, written.last))
            return written
        else:
            self.dead_letters.append(form)
        written.end(None)
        return written

    @property
    def archived(self) -> list[bytes | None]:
        with self.lock:
            return [entry.form.value for entry in self.log if entry.state == "archived"]

    @property
    def is_done(self) -> bool:
        self.expire()
        with self.lock:
            return all(entry.state for entry in self.log)

    def expire(self) -> list[Entry]:
        """Ends locks; what is free then."""
        with self.lock:
            free = []
            for entry in self.log:
                if not entry.state and entry.until_s <= time.monotonic():
                    if entry.count >= LIMIT:
                        entry.state = "archived"
                    else:
                        free.append(entry)
            return free


class Client:
    """In the place of confluent-kafka's ``ShareConsumer``."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._answered: Any = None
        self._given: set[int] = set()
        self._is_idle = True

    def set_acknowledgement_commit_callback(self, answered: Any) -> None:
        self._answered = answered

    def subscribe(self, _: list[str]) -> None: ...

    def poll(self, timeout: float) -> list[Fetched]:
        free = self._broker.expire()
        found = []
        with self._broker.lock:
            for entry in free:
                if entry.until_s <= time.monotonic() and not entry.state:
                    entry.count += 1
                    entry.until_s = time.monotonic() + self._broker.lock_s
                    found.append(Fetched(entry))
                    self._is_idle = False
        if not found:
            time.sleep(0.01)
        return found

    def acknowledge(self, fetched: Fetched, kind: AcknowledgeType) -> None:
        entry = fetched.entry
        with self._broker.lock:
            if entry.until_s > time.monotonic() and entry.count == fetched.count:
                if kind is AcknowledgeType.RELEASE:
                    entry.until_s = 0.0
                else:
                    entry.state = kind.name
        self._given.add(entry.place)

    def commit_sync(self, _: float) -> None:
        given, self._given = self._given, set()
        self._answered({TopicPartition("t", 0): given}, None)

    def close(self) -> None:
        assert not self._is_idle or self._broker.lets_leave.wait(within(60))


class Box(TopicOutbox):
    """The real one, whose writers write to the broker in memory."""

    def __init__(self, broker: Broker, queue: QueueConfig) -> None:
        self._topic, self._queue_id = LETTERS, queue.queue_id
        self._writer = self._copier = broker  # type: ignore[assignment]

    def close(self, timeout_s: float) -> None: ...


@contextmanager
def share_group(
    monkeypatch: pytest.MonkeyPatch, *, lock_s: float, margin_ms: int = 200
) -> Iterator[Broker]:
    """A broker, and share consumers that take it for theirs: see ``open_share``."""
    broker = Broker(lock_s)
    limits = ShareLimits(
        min_lock_ms=1,
        max_lock_ms=60_000,
        max_deliveries=LIMIT,
        max_members=200,
        session_ms=1,
        min_session_ms=1,
        max_session_ms=1,
    )
    monkeypatch.setattr(share, "open_share_consumer", lambda _: Client(broker))
    monkeypatch.setattr(share, "MARGIN_MS", margin_ms)
    monkeypatch.setattr(ShareConsumer, "_set_up", lambda *_: (limits, round(1000 * broker.lock_s)))
    yield broker


def open_share(broker: Broker, **options: Any) -> ShareConsumer:
    """A consumer of its queue."""
    from kafkamq.config import ServiceConfig
    from kafkamq.queue.backend import ConsumerPlan

    queue = QueueConfig(queue_id="q", backend=Backend.SHARE, topic="t")
    config = ServiceConfig(bootstrap_servers="x:1")
    return ShareConsumer(config, queue, Box(broker, queue), ConsumerPlan(**options))
