"""F11, F12, F13, F14, F16: what may stand in the logs, or stand there no more."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions
from harness.faults import committed_positions, read_records
from harness.markers import encode_start
from tests.faults.stage import Stage
from tests.integration.tracker_logs import Logs
from tests.sure_producer import SureProducer
from tests.waiting import wait_until, within

from kafkamq.config import ServiceConfig
from kafkamq.errors import DataLossError, WireError
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.markers.tracker.records import StatusReader
from kafkamq.markers.wire.marker_writer import encode_end, encode_keepalive
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.names import group_of
from kafkamq.queue.service import Service
from kafkamq.queue.wire.headers import read_message_headers
from kafkamq.queue.wire.keys import marker_partition
from kafkamq.testing.history import LogRecord
from kafkamq.types import MessageId, Outcome

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

MAX_TRACKER_MB = 630
"""Of a local tracker with a million entries that are all due at once; 420 were seen."""


def hostile(chance: random.Random, messages: int) -> bytes | None:
    """A record that no worker of ours writes, or that says something untrue."""
    good = encode_start(MessageId(0, chance.randrange(messages)), b"a", b"x", redeliver_after_ms=1)
    unknown = MessageId(chance.randrange(3), 10**9 + chance.randrange(10**6))
    return chance.choice(
        [
            None,
            b"",
            good[: chance.randrange(len(good))],  # cut off
            chance.randbytes(chance.randrange(1, 200)),
            b'{"type": "START", "partition": 0}',
            b"\x32\xff\xff\xff\xff\x0f" + b"x" * 20,  # a field of 4 GiB
            b"\x10\x7f",  # a type that there is not
            good[:-1] + bytes([good[-1] ^ 0x80]),
            encode_end(unknown, Outcome.ACK),
            encode_end(unknown, Outcome.NACK),
            encode_keepalive(unknown, consumer_id="nobody", redeliver_after_ms=1),
            encode_keepalive(None, consumer_id="nobody", redeliver_after_ms=86_400_000),
        ]
    )


def test_hostile_markers(bootstrap: str, namespace: str, tmp_path: Path) -> None:
    """F11: 1,000 of them among the markers of 4,000 messages."""
    with Stage(bootstrap, namespace, tmp_path) as stage:
        for role in ("tracker", "worker", "worker"):
            stage.start(role)
        stage.start("sender", count=4000, rate=300.0)
        producer = SureProducer({"bootstrap.servers": bootstrap})
        bad = 0
        for _ in range(1000):
            value = hostile(stage.chance, 1)
            if value is not None and _is_start_of(value, 0, 0):
                continue  # by chance a true START: that is a worker's
            bad += 1
            partition = stage.chance.randrange(3)
            producer.produce(stage.config.marker_topic, value, partition=partition)
            producer.poll(0)
            time.sleep(0.008)
        producer.confirm(20)
        stage.fault("hostile markers", bad)
        stage.replace(stage.playing("tracker")[0])  # it folds all of them once more
        stage.replace(stage.playing("worker")[0])
        stage.healed()
        stage.wait_for_senders()
        stage.drain()
        broken = {_place(one) for one in stage.records().markers if _is_broken(one)}
        quarantine = stage.config.quarantine_topic

        def kept() -> set[bytes]:
            return {_origin(one) for one in read_records(bootstrap, quarantine)}

        stage.wait_until(lambda: kept() == broken)
        report = stage.judge("F11 hostile markers")
    report.require_ok(f"seed {stage.seed}: ")
    assert report.sent == 4000
    assert len(broken) > 300


def _is_broken(record: LogRecord) -> bool:
    try:
        decode_marker(record.value)
    except WireError:
        return True
    return False


def _place(record: LogRecord) -> bytes:
    return f"{record.topic}/{record.partition}/{record.offset}".encode()


def _origin(aside: LogRecord) -> bytes:
    """Where a record of the quarantine came from."""
    return (dict(aside.headers)["kafkamq-origin"] or b"").rpartition(b"/")[0]


def _is_start_of(value: bytes, partition: int, offset: int) -> bool:
    try:
        marker = decode_marker(value)
    except Exception:  # noqa: BLE001 - whatever it is, it is no START
        return False
    return (
        marker.message_id is not None
        and (marker.message_id.partition == partition and marker.message_id.offset >= offset)
        and marker.message_id.offset < 10**9
    )


def test_large_messages(bootstrap: str, namespace: str, tmp_path: Path) -> None:
    """F12: their STARTs carry them or name them; workers die of nothing."""
    with Stage(bootstrap, namespace, tmp_path, redelivery_timeout=4.0) as stage:
        stage.start("tracker")
        for _ in range(2):
            stage.start("worker", batch=10)
        stage.start("sender", count=150, rate=10.0, payload_bytes=900_000)
        stage.start("sender", count=300, rate=20.0, payload_bytes=65_000)
        stage.wait_until(lambda: stage.count("received") > 50)
        for _ in range(3):
            stage.replace(stage.chance.choice(stage.playing("worker")))
            time.sleep(1.5)
        stage.healed()
        stage.wait_for_senders()
        stage.drain()
        report = stage.judge("F12 large messages")
    report.require_ok(f"seed {stage.seed}: ")
    assert report.sent == 450


def test_partitions_that_are_added(bootstrap: str, namespace: str, tmp_path: Path) -> None:
    """F13: of messages and of markers, while messages are held; and all of them are used."""
    soon = {"topic.metadata.refresh.interval.ms": "2000"}
    with Stage(
        bootstrap, namespace, tmp_path, partitions=2, marker_partitions=2, kafka=soon
    ) as stage:
        for role in ("tracker", "worker", "worker"):
            stage.start(role)
        stage.start("sender", count=3000, rate=150.0)
        stage.wait_until(lambda: stage.count("received") > 300)
        admin = AdminClient({"bootstrap.servers": bootstrap})
        topics = (stage.config.message_topic, stage.config.marker_topic)
        stage.fault("partitions added", 2)
        for future in admin.create_partitions([NewPartitions(t, 4) for t in topics]).values():
            future.result(within(20))
        stage.start("sender", count=3000, rate=150.0)  # the other one looks every five minutes
        time.sleep(8.0)
        stage.replace(stage.playing("worker")[0])
        stage.healed()
        stage.wait_for_senders()
        stage.drain()
        report = stage.judge("F13 partitions added")
        found = stage.records()
    report.require_ok(f"seed {stage.seed}: ")
    assert report.sent == 6000
    assert {record.partition for record in found.messages} == set(range(4))
    assert {record.partition for record in found.markers} == set(range(4))


def test_records_that_retention_deletes(bootstrap: str, namespace: str) -> None:
    """F14: counted and said, for workers and for trackers; never passed over in silence."""
    logs = Logs(bootstrap, namespace, partitions=1, marker_partitions=1)
    ids = logs.send(1000, key=b"a")
    with Service(bootstrap, namespace) as service:
        with service.queue("a").consumer() as consumer:
            while not (first := consumer.receive(1.0)):
                pass
            first.ack(wait=True)
        topic = logs.config.message_topic
        position = committed_positions(bootstrap, group_of(logs.config, "a"), topic, 1)[0]
        delete_before(bootstrap, topic, 600)
        with pytest.raises(DataLossError, match=f"^{600 - position} messages of"):
            receive_for_long(service.queue("a").consumer())
    with LocalTracker(logs.config).in_thread() as tracker:
        wait_until(lambda: tracker.is_live)
    logs.start(*ids[700:])
    end = max(message.offset() or 0 for message, _ in logs.markers()) + 1
    delete_before(bootstrap, logs.config.marker_topic, end)
    with pytest.raises(DataLossError, match="deleted"):
        LocalTracker(logs.config).run()


def receive_for_long(consumer: Consumer) -> None:
    for _ in range(100):
        consumer.receive(0.2)


def delete_before(bootstrap: str, topic: str, offset: int) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.delete_records([TopicPartition(topic, 0, offset)]).values():
        future.result(within(20))


def test_a_million_due_at_once(bootstrap: str, namespace: str) -> None:
    """F16, R16: each comes back exactly once, in bounded memory, behind one that is held for long.

    The held one is the oldest of its marker partition, so the position stays where it is.
    """
    million = 1_000_000
    logs = Logs(bootstrap, namespace, partitions=1, marker_partitions=2)
    producer = SureProducer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": 20,
            "queue.buffering.max.messages": 2_000_000,
            "compression.type": "lz4",
            "acks": "all",
        }
    )
    for offset in range(million + 1):
        id_ = MessageId(0, offset)
        value = encode_start(
            id_,
            b"a",
            b"x",
            redeliver_after_ms=3_600_000 if offset == 0 else 1000,
            consumer_id="slow" if offset == 0 else "gone",
        )
        producer.produce(logs.config.marker_topic, value, partition=marker_partition(0, offset, 2))
        if offset % 10_000 == 0:
            producer.poll(0)
    producer.confirm(60)
    with _tracker_process(logs.config) as process, closing(StatusReader(logs.config)) as statuses:

        def are_back() -> bool:
            assert process.poll() is None, "the tracker has ended"
            statuses.poll(0.5)
            return sum(one.redelivered for one in statuses.latest.values()) >= million

        wait_until(are_back, timeout_s=300)
        peak_mb = _peak_mb(process.pid)
    held_back = [one.committable_offset for one in statuses.latest.values() if one.entries]
    copies = Counter(
        origin.offset
        for record in read_records(bootstrap, logs.config.message_topic)
        if (origin := read_message_headers(record.headers).origin) is not None
    )
    assert len(copies) == million
    assert set(copies.values()) == {1}
    assert 0 not in copies, "one that is held came back"
    assert held_back == [0], "the held one is to hold the position of its partition back"
    print(f"the tracker's peak is {peak_mb:.0f} MB")  # noqa: T201 - printed when it fails
    assert peak_mb < MAX_TRACKER_MB


@contextmanager
def _tracker_process(config: ServiceConfig) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "kafkamq.cli", "tracker", "--engine", "local"]
    where = ["-b", config.bootstrap_servers, "-n", config.namespace]
    process = subprocess.Popen([*command, *where])
    try:
        yield process
    finally:
        process.kill()
        process.wait(within(30))


def _peak_mb(pid: int) -> float:
    """The most memory that a process has had."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in text.splitlines() if line[:6] == "VmHWM:") / 1000
