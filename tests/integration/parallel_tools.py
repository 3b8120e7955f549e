"""Topics, groups and handlers for the tests of the parallel consumer."""

from __future__ import annotations

import math
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
)
from tests.sure_producer import SureProducer
from tests.waiting import deadline_after, within

from kafkamq import ParallelConsumer, ParallelRecord
from kafkamq.metrics import families
from kafkamq.metrics.catalog import Labels
from kafkamq.types import PartitionOffset


def make_topic(bootstrap: str, name: str, partitions: int = 1, **config: str) -> str:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    settings = {key.replace("_", "."): value for key, value in config.items()}
    admin.create_topics([NewTopic(name, partitions, 1, config=settings)])[name].result(within(30))
    return name


def topic_settings(bootstrap: str, topic: str, **settings: str) -> None:
    """Set some of a topic's settings; ``_`` is a dot in their names."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    entries = [
        ConfigEntry(name.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
        for name, value in settings.items()
    ]
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
    for future in admin.incremental_alter_configs([resource]).values():
        future.result()


def fill(
    bootstrap: str,
    topic: str,
    keys: Sequence[str | None] | Iterable[str | None],
    *,
    partition: int = -1,
    transactional_id: str = "",
    is_aborted: bool = False,
    headers: Sequence[tuple[str, bytes]] = (),
) -> None:
    """One record per key; its value is its number."""
    settings: dict[str, object] = {
        "bootstrap.servers": bootstrap,
        "linger.ms": 5,
        "queue.buffering.max.messages": 1_000_000,
    }
    if transactional_id:
        settings["transactional.id"] = transactional_id
    producer = SureProducer(settings)
    if transactional_id:
        producer.init_transactions(30)
        producer.begin_transaction()
    for number, key in enumerate(keys):
        key_bytes = None if key is None else key.encode()
        producer.produce(topic, b"%d" % number, key_bytes, partition, headers=list(headers))
        producer.poll(0)
    producer.confirm(30)
    if transactional_id:
        (producer.abort_transaction if is_aborted else producer.commit_transaction)(30)


def make(
    bootstrap: str, topic: str | Sequence[str], group: str, **options: object
) -> ParallelConsumer:
    """With times that suit tests."""
    options.setdefault("commit_interval", 0.1)
    return ParallelConsumer(topic, group_id=group, bootstrap_servers=bootstrap, **options)


class Seen:
    """A handler that remembers; thread-safe."""

    def __init__(self, work: Callable[[ParallelRecord], object] | None = None) -> None:
        self.lock = threading.Lock()
        self.places: list[PartitionOffset] = []
        self.by_key: dict[tuple[int, bytes | None], list[int]] = defaultdict(list)
        self.at_once = self.most_at_once = 0
        self.work = work

    def __call__(self, record: ParallelRecord) -> object:
        with self.lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            verdict = self.work(record) if self.work is not None else None
        except BaseException:
            with self.lock:
                self.at_once -= 1
            raise
        with self.lock:
            self.at_once -= 1
            self.places.append((record.partition, record.offset))
            self.by_key[record.partition, record.key].append(record.offset)
        return verdict

    def __len__(self) -> int:
        return len(self.places)

    def is_in_order(self) -> bool:
        return all(offsets == sorted(offsets) for offsets in self.by_key.values())


def figures(name: str) -> Mapping[Labels, float]:
    """Of the parallel consumers of this process, by labels."""
    return next(
        family.values() for family in families() if family.name == f"kafkamq_parallel_{name}"
    )


def figure(name: str, labels: Labels) -> float:
    """One of them; NaN: there is none."""
    return figures(name).get(labels, math.nan)


def commit(bootstrap: str, group: str, topic: str, offset: int, metadata: str = "") -> None:
    """Commit as another program would, into a group without members."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    place = (
        TopicPartition(topic, 0, offset, metadata) if metadata else TopicPartition(topic, 0, offset)
    )
    consumer.commit(offsets=[place], asynchronous=False)
    consumer.close()


def committed(bootstrap: str, group: str, topic: str, partition: int = 0) -> tuple[int, str]:
    """What the broker holds for a group, to the last byte: OffsetFetch, version 1, by hand.

    confluent-kafka would hide what follows a NUL.
    """
    body = _text(group) + struct.pack(">i", 1) + _text(topic) + struct.pack(">ii", 1, partition)
    answer = _ask(bootstrap, 9, 1, body)
    at = 4 + 4 + 2 + len(topic) + 4 + 4
    offset, length = struct.unpack_from(">qh", answer, at)
    return offset, answer[at + 10 : at + 10 + max(length, 0)].decode()


def commit_as_java(bootstrap: str, group: str, topic: str, offset: int, metadata: str) -> None:
    """Without a NUL behind the metadata, into a group without members: OffsetCommit, version 2."""
    place = _text(topic) + struct.pack(">iiq", 1, 0, offset) + _text(metadata)
    body = _text(group) + struct.pack(">i", -1) + _text("") + struct.pack(">qi", -1, 1) + place
    deadline_s = deadline_after(30)
    while (error := struct.unpack(">h", _ask(bootstrap, 8, 2, body)[-2:])[0]) in (14, 15, 16):
        assert time.monotonic() < deadline_s, "the coordinator is still loading"
        time.sleep(0.05)
    assert error == 0


def _ask(bootstrap: str, key: int, version: int, body: bytes) -> bytes:
    request = struct.pack(">hhi", key, version, 7) + _text("test") + body
    host, port = bootstrap.rsplit(":", 1)
    with socket.create_connection((host, int(port)), 30) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        return _read(connection, struct.unpack(">i", _read(connection, 4))[0])


def _text(text: str) -> bytes:
    return struct.pack(">h", len(text.encode())) + text.encode()


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        assert part, "the broker closed the connection"
        data += part
    return data


def read_all(bootstrap: str, topic: str, count: int, partitions: int = 1) -> list:
    """The committed records of a topic."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "reader", "enable.auto.commit": False}
    )
    consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions)])
    found: list = []
    deadline_s = deadline_after(60)
    while len(found) < count and time.monotonic() < deadline_s:
        found += [record for record in consumer.consume(1000, 0.2) if record.error() is None]
    found += [record for record in consumer.consume(10, 0.3) if record.error() is None]
    consumer.close()
    return found
