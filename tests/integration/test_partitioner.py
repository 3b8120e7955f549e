"""Our partitions against those that a real producer chooses."""

from __future__ import annotations

import uuid

from confluent_kafka import KafkaError, Message
from confluent_kafka.admin import AdminClient, NewTopic
from tests.sure_producer import SureProducer
from tests.waiting import within

from kafkamq.queue.wire.keys import key_partition, marker_key, marker_partition

PARTITIONS = 7


def test_librdkafkas_murmur2_random_agrees(bootstrap: str) -> None:
    servers = {"bootstrap.servers": bootstrap}
    topic = f"partitioner-{uuid.uuid4().hex[:8]}"
    admin = AdminClient(servers)  # its futures fail once it is gone
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(within(30))
    chosen: dict[bytes, int] = {}

    def delivered(error: KafkaError | None, message: Message) -> None:
        assert error is None, error
        key, partition = message.key(), message.partition()
        assert isinstance(key, bytes)
        assert partition is not None
        chosen[key] = partition

    producer = SureProducer({**servers, "partitioner": "murmur2_random"})
    keys = {bytes(range(size)) for size in range(1, 40)}
    keys |= {b"\xff" * size for size in range(1, 9)}
    markers = {marker_key(p, chunk * 4096): (p, chunk) for p in range(5) for chunk in range(40)}
    for key in keys | set(markers):
        producer.produce(topic, key=key, value=b"", on_delivery=delivered)
    producer.confirm()
    assert chosen == {key: key_partition(key, PARTITIONS) for key in keys | set(markers)}
    for key, (partition, chunk) in markers.items():  # R26
        assert marker_partition(partition, chunk * 4096, PARTITIONS) == chosen[key]
