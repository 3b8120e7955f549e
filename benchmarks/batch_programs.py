"""What ``benchmarks/batches.py`` times, each in a process of its own: NAME and JSON arguments.

They run in this environment and in that of an earlier revision, so they use names that both have.
Each prints one number, last.
"""

from __future__ import annotations

# ruff: noqa: E402
import sys
from pathlib import Path

# This file's folder is on the path first, where it would hide the standard library's `queue`.
sys.path[:] = [each for each in sys.path if Path(each).resolve() != Path(__file__).resolve().parent]
sys.path.append(str(Path(__file__).resolve().parents[1]))

import inspect
import json
import time
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import Producer as KafkaProducer

from kafkamq import Service
from kafkamq.config import ServiceConfig
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.markers.wire.marker_writer import StartEncoder, encode_end
from kafkamq.markers.wire.markers import decode_slim
from kafkamq.queue.consumer import Consumer
from kafkamq.runtime.memory import calm_collector
from kafkamq.transport.settings import consumer_settings, transactional_settings
from kafkamq.types import MessageId, Outcome

_TOPIC_ID = b"t" * 16
_HOLDER = "c" * 24
_PARTITIONS = 4
_CHUNK = 4096


# ---- hand-out


@contextmanager
def _service(topics: dict[str, str]) -> Iterator[Service]:
    """A fresh group over these topics, and what else its namespace needs."""
    names = {name: topics[name] for name in ("message_topic", "marker_topic")}
    with Service(topics["servers"], f"bench-{uuid.uuid4().hex[:8]}", **names) as service:
        service.create_topics(partitions=_PARTITIONS, marker_partitions=_PARTITIONS)
        yield service


def _consumer(service: Service, queue_id: str, **options: Any) -> Consumer:
    if "batch_markers" not in inspect.signature(service.queue).parameters:
        options.pop("batch_markers", None)
    return service.queue(queue_id, **options).consumer()


@contextmanager
def _worker(topics: dict[str, str], queue_id: str, **options: Any) -> Iterator[Consumer]:
    with _service(topics) as service:
        yield _consumer(service, queue_id, **options)


def hand_out(topics: dict[str, str], count: int, batch: int, **options: Any) -> float:
    """``receive_many`` and ``ack``: messages per second."""
    options = {"batch_markers": True, "max_in_flight": 10 * batch, **options}
    with _worker(topics, "work", **options) as consumer:
        return _acked(consumer, count, batch, time.perf_counter)


def _acked(consumer: Consumer, count: int, batch: int, clock: Callable[[], float]) -> float:
    """Messages per second of that clock, behind the first ones."""
    for message in _first(consumer, batch):
        message.ack()
    handled = 0
    began_s = clock()
    while handled < count:
        messages = consumer.receive_many(batch)
        for message in messages:
            if message.payload is None:
                raise RuntimeError("no payload")
            message.ack()
        handled += len(messages)
    consumer.flush()
    return handled / (clock() - began_s)


def cpu(topics: dict[str, str], count: int, batch: int) -> float:
    """CPU seconds of a million messages: of a worker and of the tracker beside it."""
    with _service(topics) as service, LocalTracker(service.config).in_thread() as tracker:
        options = {"batch_markers": True, "max_in_flight": 10 * batch}
        with closing(_consumer(service, "work", **options)) as consumer:
            while not tracker.is_live:
                time.sleep(0.05)
            return 1e6 / _acked(consumer, count, batch, time.process_time)


def one_by_one(topics: dict[str, str], count: int) -> float:
    """``receive`` and ``ack``: messages per second."""
    with _worker(topics, "work", batch_markers=True) as consumer:
        _first(consumer, 1)[0].ack()
        handled = 0
        began_s = time.perf_counter()
        while handled < count:
            message = consumer.receive()
            if message is not None:
                message.ack()
                handled += 1
        consumer.flush()
        return handled / (time.perf_counter() - began_s)


def behind(topics: dict[str, str]) -> float:
    """Seconds until the first message of a queue whose messages stand behind all others."""
    with _service(topics) as service:
        began_s = time.perf_counter()
        _first(_consumer(service, "mine", batch_markers=True), 1)[0].ack()
        return time.perf_counter() - began_s


def end_to_end(topics: dict[str, str], count: int, percent: int) -> float:
    """Seconds from ``send`` to ``receive`` of messages that come one by one: a percentile."""
    took_s: list[float] = []
    names = {name: topics[name] for name in ("message_topic", "marker_topic")}
    queue_id = f"single-{uuid.uuid4().hex}"
    with (
        Service(topics["servers"], "sender", **names) as service,
        _worker(topics, queue_id, batch_markers=True) as consumer,
    ):
        producer = service.queue(queue_id).producer()
        producer.send(b"0").result(30)
        _first(consumer, 1)[0].ack()
        while len(took_s) < count:
            producer.send(b"%r" % time.perf_counter())
            message = consumer.receive(10)
            if message is None or message.payload is None:
                raise TimeoutError("no message came")
            took_s.append(time.perf_counter() - float(message.payload))
            message.ack()
    return sorted(took_s)[count * percent // 100]


def _first(consumer: Consumer, most: int) -> list[Any]:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        messages = consumer.receive_many(most)
        if messages:
            return list(messages)
    raise TimeoutError("no message came")


# ---- floors: librdkafka alone, with our settings


def _bare(topics: dict[str, str]) -> KafkaConsumer:
    config = ServiceConfig(bootstrap_servers=topics["servers"], namespace="floor")
    settings = consumer_settings(config, group_id=f"floor-{uuid.uuid4().hex}")
    settings.pop("error_cb", None)
    settings.pop("logger", None)
    stored = {"auto.offset.reset": "earliest", "enable.auto.offset.store": True}  # as commit() asks
    consumer = KafkaConsumer({**settings, **stored})
    consumer.subscribe([topics["message_topic"]])
    return consumer


def floor(
    topics: dict[str, str], count: int, batch: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """``consume`` and a commit of each batch: messages per second of that clock."""
    consumer = _bare(topics)

    def commit() -> None:
        consumer.commit(asynchronous=False)

    return _drain(consumer, count, batch, commit, clock)


def floor_cpu(topics: dict[str, str], count: int, batch: int) -> float:
    """CPU seconds of a million messages of that."""
    return 1e6 / floor(topics, count, batch, time.process_time)


def floor_transactions(topics: dict[str, str], count: int, batch: int) -> float:
    """``consume`` and a transaction of the offsets of each batch: messages per second."""
    consumer = _bare(topics)
    config = ServiceConfig(bootstrap_servers=topics["servers"], namespace="floor")
    settings = transactional_settings(config, transactional_id=f"floor-{uuid.uuid4().hex}")
    producer = KafkaProducer({k: v for k, v in settings.items() if k not in ("error_cb", "logger")})
    producer.init_transactions()

    def commit() -> None:
        producer.begin_transaction()
        places = consumer.position(consumer.assignment())
        producer.send_offsets_to_transaction(places, consumer.consumer_group_metadata())
        producer.commit_transaction()

    return _drain(consumer, count, batch, commit, time.perf_counter)


def _drain(
    consumer: KafkaConsumer,
    count: int,
    batch: int,
    commit: Callable[[], None],
    clock: Callable[[], float],
) -> float:
    while not consumer.consume(batch, 1.0):
        pass
    handled = 0
    began_s = clock()
    while handled < count:
        records = consumer.consume(batch, 1.0)
        for record in records:
            if record.value() is None:
                raise RuntimeError("no payload")
        commit()
        handled += len(records)
    took_s = clock() - began_s
    consumer.close()
    return handled / took_s


def floor_behind(topics: dict[str, str], count: int) -> float:
    """Seconds to read so many messages and no more."""
    began_s = time.perf_counter()
    consumer = _bare(topics)
    handled = 0
    while handled < count:
        handled += len(consumer.consume(1000, 1.0))
    took_s = time.perf_counter() - began_s
    consumer.close()
    return took_s


# ---- the fold


def fold(messages: int, run: int) -> float:
    """START and ACK of so many messages, ``run`` a record, decoded and folded: per second."""
    records = list(_pairs(messages, run))
    core = RedeliveryTracker()
    began_s = time.perf_counter()
    for offset, data in enumerate(records):
        core.apply(offset, 1000, decode_slim(data))
    took_s = time.perf_counter() - began_s
    assert core.open_count() == 0, "all have ended"
    return messages / took_s


def memory(messages: int, run: int) -> float:
    """Bytes that a tracker keeps for each message in flight."""
    tracemalloc.start()
    core = RedeliveryTracker()
    before, _ = tracemalloc.get_traced_memory()
    offset = 0
    for first in range(0, messages, _CHUNK * _PARTITIONS):
        for data in _starts(first, min(_CHUNK * _PARTITIONS, messages - first), run):
            core.apply(offset, 1000, decode_slim(data))
            offset += 1
    assert core.open_count() == messages, "all are in flight"
    return (tracemalloc.get_traced_memory()[0] - before) / messages


def _pairs(messages: int, run: int) -> Iterator[bytes]:
    """STARTs of 8,000 messages, then their ENDs, and so on."""
    step = 8000
    for first in range(0, messages, step):
        count = min(step, messages - first)
        yield from _starts(first, count, run)
        yield from _ends(first, count, run)


def _encoder() -> StartEncoder:
    return StartEncoder(
        consumer_id=_HOLDER, redeliver_after_ms=3_600_000, max_deliveries=5, max_lease_ms=43_200_000
    )


def _starts(first: int, count: int, run: int) -> Iterator[bytes]:
    encoder = _encoder()
    if run == 1:
        headers = (("kafkamq-id", b"0" * 36),)
        for offset in range(first, first + count):
            identity = MessageId(0, offset, _TOPIC_ID, 1)
            yield encoder.encode(identity, b"work", b"x" * 100, headers=headers)
        return
    from kafkamq.markers.wire.marker_writer import encode_batch_start

    for batches in _batches(first, count, run):
        yield encode_batch_start(encoder, batches, b"work")


def _ends(first: int, count: int, run: int) -> Iterator[bytes]:
    if run == 1:
        for offset in range(first, first + count):
            identity = MessageId(0, offset, _TOPIC_ID, 1)
            yield encode_end(identity, Outcome.ACK, consumer_id=_HOLDER)
        return
    from kafkamq.markers.wire.markers import encode_marker
    from kafkamq.types import Marker, MarkerType

    for batches in _batches(first, count, run):
        marker = Marker(
            MarkerType.END, outcome=Outcome.ACK, consumer_id=_HOLDER, batches=tuple(batches)
        )
        yield encode_marker(marker)


def _batches(first: int, count: int, run: int) -> Iterator[list[Any]]:
    """Of each record, one batch per chunk that its run lies in."""
    from kafkamq.types import MessageBatch

    for begin in range(first, first + count, run):
        end = min(begin + run, first + count)
        batches = []
        while begin < end:
            stop = min(end, (begin // _CHUNK + 1) * _CHUNK)
            batches.append(MessageBatch(0, _TOPIC_ID, 1, begin, (1 << (stop - begin)) - 1))
            begin = stop
        yield batches


def due_at_once(**arguments: Any) -> float:
    """See ``due_rows.py``, whose names an earlier revision need not have."""
    from benchmarks import due_rows

    return due_rows.due_at_once(**arguments)


def rewritten(**arguments: Any) -> float:
    """The floor of that."""
    from benchmarks import due_rows

    return due_rows.rewritten(**arguments)


def outage_mb(**arguments: Any) -> float:
    """What an outage takes of memory."""
    from benchmarks import due_rows

    return due_rows.outage_mb(**arguments)


PROGRAMS: dict[str, Callable[..., float]] = {
    each.__name__: each
    for each in (
        hand_out,
        cpu,
        one_by_one,
        behind,
        end_to_end,
        floor,
        floor_cpu,
        floor_transactions,
        floor_behind,
        fold,
        memory,
        due_at_once,
        rewritten,
        outage_mb,
    )
}

if __name__ == "__main__":
    calm_collector()
    print(PROGRAMS[sys.argv[1]](**json.loads(sys.argv[2])))
