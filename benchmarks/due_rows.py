"""Programs of ``benchmarks/batches.py`` about what falls due: all at once, and after an outage."""

from __future__ import annotations

import random
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from benchmarks.load import LoadProducer
from benchmarks.tracker_rows import TrackerProcess, count, wait_until
from confluent_kafka import Consumer, Producer, TopicPartition

from kafkamq.config import ServiceConfig
from kafkamq.markers.rules.batching import gather
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.markers.wire.marker_writer import StartEncoder, encode_batch_start, encode_end
from kafkamq.queue.topics import create_topics
from kafkamq.queue.wire.keys import marker_key, marker_partition
from kafkamq.transport.admin import Admin
from kafkamq.transport.settings import consumer_settings, transactional_settings
from kafkamq.types import MessageId, Outcome

__all__ = ["due_at_once", "outage_mb", "rewritten"]

_PARTITIONS = 4
_HOLDER = "c" * 24
_TRANSACTION = 10_000
_AHEAD_S = {"local": 10.0, "spark": 40.0}  # until then all must be known, by a JVM that is cold
_PATIENCE_S = 300.0


def due_at_once(servers: str, messages: int, run: int, engine: str) -> float:
    """Seconds from the end of so many leases, ``run`` a START, until all copies can be read."""
    config = _filled(servers, messages)
    with _tracker(config, engine) as entries:
        due_s = time.time() + _AHEAD_S[engine] + messages / 25_000
        left = lambda: round((due_s - time.time()) * 1000)  # noqa: E731
        _start(config, _ids(config, messages), run, left)
        wait_until(lambda: entries() >= messages, timeout_s=due_s - time.time())
        wait_until(
            lambda: count(config, config.message_topic) >= 2 * messages, timeout_s=_PATIENCE_S
        )
        return time.time() - due_s


def rewritten(servers: str, messages: int) -> float:
    """Seconds of a bare loop that reads so many and writes them again, in transactions."""
    config, sink = _filled(servers, messages), _filled(servers, 0)
    reader = Consumer(_plain(consumer_settings(config, group_id=f"floor-{uuid.uuid4().hex}")))
    reader.assign([TopicPartition(config.message_topic, each, 0) for each in range(_PARTITIONS)])
    settings = transactional_settings(config, transactional_id=f"floor-{uuid.uuid4().hex}")
    writer = Producer({**_plain(settings), "delivery.report.only.error": True})
    writer.init_transactions()
    left = messages
    began_s = time.perf_counter()
    while left:
        records = reader.consume(min(_TRANSACTION, left), 1.0)
        left -= len(records)
        writer.begin_transaction()
        for record in records:
            writer.produce(
                sink.message_topic,
                record.value(),
                record.key(),
                record.partition(),
                headers=record.headers(),
            )
        writer.commit_transaction()
    took_s = time.perf_counter() - began_s
    reader.close()
    return took_s


def outage_mb(servers: str, messages: int) -> float:
    """MB that a tracker's process grows by, while each message is nacked twice for its own reason.

    Each with a delay of its own: no two of them are held together.
    """
    config = _filled(servers, messages)
    with TrackerProcess.running(config) as tracker:
        live = lambda: tracker.total("kafkamq_tracker_live") == _PARTITIONS  # noqa: E731
        wait_until(live, timeout_s=_PATIENCE_S)
        before = most = tracker.resident_mb()
        ends = threading.Event()

        def look() -> None:
            nonlocal most
            while not ends.wait(0.1):
                most = max(most, tracker.resident_mb())

        looking = threading.Thread(target=look)
        looking.start()
        try:
            ids = _ids(config, messages)
            for turn in (2, 3):
                _start(config, ids, 1000, lambda: 120_000)
                _nack(config, ids)
                copied = lambda turn=turn: (  # noqa: E731
                    tracker.total("kafkamq_tracker_redelivered_total") >= (turn - 1) * messages
                )
                wait_until(copied, timeout_s=_PATIENCE_S)
                ids = _copies(config, messages, turn)
        finally:
            ends.set()
            looking.join()
        return most - before


@contextmanager
def _tracker(config: ServiceConfig, engine: str) -> Iterator[Callable[[], int]]:
    """Live; gives how many messages it knows."""
    if engine == "local":
        with LocalTracker(config).in_thread() as local:
            wait_until(lambda: local.is_live, timeout_s=_PATIENCE_S)
            yield lambda: sum(status.entries for status in local.statuses())
        return
    from benchmarks.spark_tracker import wait_until_live

    from kafkamq.spark.tracker.tracker import SparkTracker

    with (
        tempfile.TemporaryDirectory(prefix="kafkamq-bench-") as folder,
        SparkTracker(config, checkpoint=f"{folder}/checkpoint", trigger_s=1.0) as spark,
    ):
        wait_until_live(spark, _PARTITIONS)
        yield lambda: sum(status.entries for status in spark.statuses().values())


def _filled(servers: str, messages: int) -> ServiceConfig:
    """A fresh namespace with so many messages, as our producer writes them."""
    config = ServiceConfig(bootstrap_servers=servers, namespace=f"bench-{uuid.uuid4().hex[:8]}")
    create_topics(config, partitions=_PARTITIONS, marker_partitions=_PARTITIONS)
    headers = [("kafkamq-id", b"0" * 36)]
    with _writer(config) as produce:
        for number in range(messages):
            partition = number // 1000 % _PARTITIONS
            produce(config.message_topic, b"x" * 100, b"work", partition, headers=headers)
    return config


def _ids(config: ServiceConfig, messages: int) -> list[MessageId]:
    """Of ``_filled``."""
    with Admin(config) as admin:
        topic_id = admin.topic_id(config.message_topic)
    following = [0] * _PARTITIONS
    ids = []
    for number in range(messages):
        partition = number // 1000 % _PARTITIONS
        ids.append(MessageId(partition, following[partition], topic_id, 1))
        following[partition] += 1
    return ids


def _copies(config: ServiceConfig, messages: int, delivery: int) -> list[MessageId]:
    """The messages of this delivery."""
    with Admin(config) as admin:
        topic_id = admin.topic_id(config.message_topic)
    reader = Consumer(_plain(consumer_settings(config, group_id=f"look-{uuid.uuid4().hex}")))
    reader.assign([TopicPartition(config.message_topic, each, 0) for each in range(_PARTITIONS)])
    wanted = b"%d" % delivery
    ids: list[MessageId] = []
    while len(ids) < messages:
        ids += [
            MessageId(record.partition(), record.offset(), topic_id, 1)
            for record in reader.consume(10_000, 1.0)
            if dict(record.headers() or ()).get("kafkamq-delivery-count") == wanted
        ]
    reader.close()
    return ids


def _start(
    config: ServiceConfig, ids: Sequence[MessageId], run: int, left_ms: Callable[[], int]
) -> None:
    """STARTs, ``run`` messages each; of a single one with its payload."""
    with _writer(config) as produce:
        for first in range(0, len(ids), run):
            encoder = StartEncoder(
                consumer_id=_HOLDER,
                redeliver_after_ms=left_ms(),
                max_deliveries=9,
                max_lease_ms=43_200_000,
            )
            some = ids[first : first + run]
            if run == 1:
                headers = (("kafkamq-id", b"0" * 36),)
                value = encoder.encode(some[0], b"work", b"x" * 100, headers=headers)
                produce(config.marker_topic, value, *_place(some[0]))
                continue
            routes: dict[int, list[MessageId]] = {}
            for each in some:
                routes.setdefault(_place(each)[1], []).append(each)
            for of in routes.values():
                for batches, _ in gather(of):
                    value = encode_batch_start(encoder, batches, b"work")
                    produce(config.marker_topic, value, *_place(of[0]))


def _nack(config: ServiceConfig, ids: Sequence[MessageId]) -> None:
    rng = random.Random(1)
    with _writer(config) as produce:
        for number, each in enumerate(ids):
            value = encode_end(
                each,
                Outcome.NACK,
                redeliver_after_ms=rng.randint(2000, 20_000),
                reason=f"ConnectionError: request {number:032d} was refused by db-1:5432",
                consumer_id=_HOLDER,
            )
            produce(config.marker_topic, value, *_place(each))


def _place(one: MessageId) -> tuple[bytes, int]:
    """Key and partition of its markers."""
    place = one.partition, one.offset
    return marker_key(*place), marker_partition(*place, _PARTITIONS)


@contextmanager
def _writer(config: ServiceConfig) -> Iterator[Callable[..., None]]:
    """Produces as fast as the queue takes it; all is in the log behind the block."""
    producer = LoadProducer(config.bootstrap_servers, compression_type="lz4")
    yield producer.write
    producer.confirm()


def _plain(settings: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in settings.items() if name not in ("error_cb", "logger")}
