"""Rows of ``benchmarks/queue.py``: due messages that lie far apart, from the local tracker.

All are due at once, and each costs the settlement a seek, which is made 5 ms slower than it is.
Once their STARTs lie far apart in the markers topic. Once these lie together, and name payloads
that lie far apart in the messages topic. Beside it the same seeks alone: assign, first record.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.load import LoadProducer
from benchmarks.rows import Row
from confluent_kafka import Consumer, TopicPartition
from harness.markers import encode_start

from kafkamq.config import ServiceConfig
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.markers.wire.marker_writer import encode_end
from kafkamq.queue.service import Service
from kafkamq.transport.admin import Admin
from kafkamq.transport.follower import Follower
from kafkamq.transport.log_reader import MAX_READ, MAX_READ_THROUGH, RecordReader
from kafkamq.types import MessageId, Outcome, PartitionId

__all__ = ["sparse"]

_SEEK_S = 0.005
# What comes with a wanted record is read, too; only what lies behind it and the gap is sought.
_APART = MAX_READ + MAX_READ_THROUGH + 20  # so that each is sought
_PAYLOAD = b"x" * 100
_CHUNK = 200_000  # records
_MAX_RATIO = 1.2
_MAX_PAUSE_S = 5.0
_PATIENCE_S = 900.0  # without a copy; before the first one the whole log is folded


def sparse(service: Callable[[], AbstractContextManager[Service]], count: int) -> list[Row]:
    """How long the tracker takes beside the seeks alone, and the longest pause between copies.

    Args:
        service: A fresh namespace with one marker partition, so that one thread settles.
        count: How many messages are due.
    """
    rows = []
    for write in (_starts_apart, _payloads_apart):
        with service() as fresh:
            rows += _measure(fresh.config, write(fresh.config, count))
    return rows


def _measure(config: ServiceConfig, load: _Load) -> list[Row]:
    count = len(load.offsets)
    with _slow_seeks() as seeks:
        # Half of them before and half after, so that other load on the machine meets both.
        alone_s = _seek_alone(config, load, load.offsets[::2])
        seeks.clear()
        with _Copies(config) as copies, LocalTracker(config).in_thread():
            copies.wait(count)
        # The settlement's: a reader that folds the log is placed once, long before.
        placed = Counter(reader for reader, _, _ in seeks)
        moments = [
            began_s
            for reader, topic, began_s in seeks
            if topic == load.topic and placed[reader] > 1
        ]
        came_s = [min(moments), *copies.moments]
        alone_s += _seek_alone(config, load, load.offsets[1::2])
    assert 0.99 * count <= len(moments) <= 1.2 * count, f"{len(moments):,} seeks, not one each"
    whole_s = came_s[-1] - came_s[0]
    pause_s = max(after - before for before, after in pairwise(came_s))
    ratio = whole_s / alone_s
    each_ms = 1000 * alone_s / count
    print(f"{len(moments):,} seeks, {each_ms:.1f} ms each when alone", file=sys.stderr)
    name = f"{count:,} due, {load.name}, +{1000 * _SEEK_S:g} ms a seek"
    is_steady = pause_s <= _MAX_PAUSE_S
    return [
        Row(f"{name}: all", whole_s, alone_s, ratio, "s", _MAX_RATIO, ratio <= _MAX_RATIO),
        Row(f"{name}: longest pause", pause_s, None, None, "s", _MAX_PAUSE_S, is_steady),
    ]


@dataclass(frozen=True, slots=True)
class _Load:
    """Due messages, and the places in partition 0 of a topic that settling them seeks."""

    name: str
    topic: str
    offsets: Sequence[int]


def _starts_apart(config: ServiceConfig, count: int) -> _Load:
    """So many STARTs with payload, and between them what a busy log holds: ENDs of others."""
    foreign = {"value": encode_end(MessageId(1, 0, b"t" * 16, 1), Outcome.ACK), "key": b"1:0"}
    padding = [foreign] * (_APART - 1)

    def due(number: int) -> dict[str, bytes]:
        return {"value": _start(MessageId(0, number, b"t" * 16, 1), _PAYLOAD), "key": b"0:0"}

    offsets = _write_apart(config, config.marker_topic, count, due, padding)
    return _Load("STARTs far apart", config.marker_topic, offsets)


def _payloads_apart(config: ServiceConfig, count: int) -> _Load:
    """So many messages and those of another queue between them; their STARTs name them alone."""
    padding = [{"value": _PAYLOAD, "key": b"other"}] * (_APART - 1)
    due = {"value": _PAYLOAD, "key": b"work"}
    offsets = _write_apart(config, config.message_topic, count, lambda _: due, padding)
    with Admin(config) as admin:
        topic_id = admin.require_topic(config.message_topic).topic_id
    starts = [
        {"value": _start(MessageId(0, offset, topic_id), None), "key": b"0:0"} for offset in offsets
    ]
    _write_apart(config, config.marker_topic, count, starts.__getitem__, [])
    return _Load("payloads far apart", config.message_topic, offsets)


def _start(message_id: MessageId, payload: bytes | None) -> bytes:
    """Due at once; without a payload it is by reference."""
    return encode_start(
        message_id,
        b"work",
        payload,
        redeliver_after_ms=1,
        consumer_id="c" * 24,
        by_reference=payload is None,
        max_deliveries=5,
    )


def _write_apart(
    config: ServiceConfig,
    topic: str,
    count: int,
    due: Callable[[int], dict[str, bytes]],
    padding: list[dict[str, bytes]],
) -> list[int]:
    """Offsets of the due ones in partition 0 of a topic that was empty."""
    producer = LoadProducer(config.bootstrap_servers)
    apart = 1 + len(padding)
    for number in range(count):
        producer.write_batch(topic, [due(number), *padding], 0)
        if not number % (_CHUNK // apart):
            producer.confirm()
    producer.confirm()
    with Admin(config) as admin:
        assert admin.log_ends(topic)[0][1] == count * apart, "the topic was not empty"
    return list(range(0, count * apart, apart))


@contextmanager
def _slow_seeks() -> Iterator[list[tuple[Follower, str, float]]]:
    """Each seek of a reader of this process takes 5 ms more; readers, topics and moments."""
    place = Follower.place
    seeks: list[tuple[Follower, str, float]] = []

    def slow(self: Follower, positions: Mapping[PartitionId, int]) -> None:
        for topic, _ in positions:
            seeks.append((self, topic, time.perf_counter()))
            time.sleep(_SEEK_S)
        place(self, positions)

    Follower.place = slow  # type: ignore[method-assign]
    try:
        yield seeks
    finally:
        Follower.place = place  # type: ignore[method-assign]


def _seek_alone(config: ServiceConfig, load: _Load, offsets: Sequence[int]) -> float:
    """Seconds for seeks of a client that is set as the tracker's, and their first records."""
    records = RecordReader(config, load.topic)
    records.prepare()
    follower = records._connected()
    begin = time.perf_counter()
    for offset in offsets:
        follower.place({(load.topic, 0): offset})
        while not any(record.offset() == offset for record in follower.poll(1, 0.5)):
            pass
    took = time.perf_counter() - begin
    records.close()
    return took


class _Copies:
    """When the copies could be read; from the end of the messages topic on, by a thread."""

    def __init__(self, config: ServiceConfig) -> None:
        self.moments: list[float] = []  # of each
        self._ends = threading.Event()
        self._came = threading.Condition()
        self._consumer = Consumer(
            {
                "bootstrap.servers": config.bootstrap_servers,
                "group.id": "bench",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
            }
        )
        with Admin(config) as admin:
            ends = admin.log_ends(config.message_topic)
        self._consumer.assign(
            [TopicPartition(config.message_topic, number, end) for number, (_, end) in ends.items()]
        )
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> _Copies:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self._consumer.close()

    def wait(self, count: int) -> None:
        """Until so many have come; raises when none comes for too long."""
        with self._came:
            while (had := len(self.moments)) < count:
                self._came.wait_for(lambda had=had: len(self.moments) > had, _PATIENCE_S)
                if len(self.moments) == had:
                    raise TimeoutError(f"{had:,} of {count:,} copies came")
            assert len(self.moments) == count, "each once"

    def _read(self) -> None:
        while not self._ends.is_set():
            first = self._consumer.poll(0.1)
            if first is None:
                continue
            found = [first, *self._consumer.consume(1000, 0)]
            now_s = time.perf_counter()
            with self._came:
                self.moments += [now_s for each in found if each.error() is None]
                self._came.notify_all()
