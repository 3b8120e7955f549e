"""A worker begins where a partition of its messages has no leader: the others go on (R5)."""

from __future__ import annotations

import uuid
from collections import Counter

from tests.waiting import within

from kafkamq.queue.service import Service
from kafkamq.transport.clients import open_producer
from kafkamq.transport.memory.cluster import cluster_of, forget_cluster

PARTITIONS, MANY = 3, 5


def test_a_new_worker_reads_all_other_partitions_and_that_one_when_it_is_led_again() -> None:
    name = f"memory://{uuid.uuid4().hex}"
    with Service(name, "n") as service:
        service.create_topics(partitions=PARTITIONS, marker_partitions=1)
        topic = service.config.message_topic
        writer = open_producer({"bootstrap.servers": name}, None)
        for number in range(PARTITIONS * MANY):
            writer.produce(topic, b"%d" % number, b"q", number % PARTITIONS)
        assert not writer.flush(within(10))
        offline = cluster_of(name).faults.offline
        offline.add((topic, 0))
        seen: Counter[int] = Counter()

        def receive(count: int) -> None:
            for _ in range(300):
                for message in consumer.receive_many(10, 0.1):
                    seen[message.message_id.partition] += 1
                    message.ack()
                if seen.total() >= count:
                    return

        with service.queue("q").consumer() as consumer:
            receive((PARTITIONS - 1) * MANY)
            assert seen == {1: MANY, 2: MANY}
            offline.clear()
            receive(PARTITIONS * MANY)
            consumer.flush()
        assert seen == dict.fromkeys(range(PARTITIONS), MANY)
    forget_cluster(name.removeprefix("memory://"))
