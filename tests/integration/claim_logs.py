"""Topics, records and observers for tests of claims on a real broker."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka.admin import AdminClient, NewTopic
from tests.integration import tracker_logs
from tests.sure_producer import SureProducer
from tests.waiting import wait_until, within

from kafkamq.claims import Cluster, init_topic
from kafkamq.claims.audit import ClaimAudit
from kafkamq.claims.wire.marshal import decode_value
from kafkamq.errors import WireError
from kafkamq.types import MarshalRecord

INTERVAL_S = 10.0
"""No claim ends because the machine is busy; tests of silence take a shorter one."""


class ClaimTopics:
    """A coordination topic and a topic of work that no other test uses."""

    def __init__(self, bootstrap: str, *, partitions: int = 2, interval_s: float = INTERVAL_S):
        self.bootstrap = bootstrap
        self.interval_s = interval_s
        name = uuid.uuid4().hex[:8]
        self.coordination = f"claims-{name}"
        self.work = f"work-{name}"
        self.group = f"group-{name}"
        self.partitions = partitions
        init_topic(bootstrap, self.coordination, partitions=2, heartbeat_interval=interval_s)
        self.create(self.work, partitions)
        self.filled = 0
        self.producer = SureProducer({"bootstrap.servers": bootstrap, "linger.ms": 5})

    def create(self, topic: str, partitions: int, **config: str) -> None:
        settings = dict(config)
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        for future in admin.create_topics(
            [NewTopic(topic, partitions, 1, config=settings)]
        ).values():
            future.result(within(30))

        def is_visible() -> bool:  # brokers learn of a topic one by one, and a little later
            found = admin.list_topics(timeout=within(30)).topics.get(topic)
            return found is not None and len(found.partitions) == partitions

        wait_until(is_visible)

    def cluster(self, **options: object) -> Cluster:
        options = {"heartbeat_interval": self.interval_s, **options}
        options = {"coordination_topic": self.coordination, **options}
        return Cluster(self.bootstrap, **options)  # type: ignore[arg-type]

    def fill(self, count: int, *, first: int = 0) -> None:
        """Messages ``first`` to ``first + count``, in turn to the partitions."""
        for number in range(first, first + count):
            self.producer.produce(
                self.work, str(number).encode(), partition=number % self.partitions
            )
        self.producer.confirm(30)
        self.filled += count

    def write(self, *values: str | bytes, partition: int | None = None, **headers: bytes) -> None:
        """Raw records to the coordination topic, by default where the work's claims are."""
        from kafkamq.claims.wire.marshal import coordination_partition

        where = coordination_partition(self.work, 2) if partition is None else partition
        for value in values:
            self.producer.produce(
                self.coordination, value, partition=where, headers=list(headers.items())
            )
        self.producer.confirm(30)

    def records(self) -> Iterator[tuple[int, int, int, MarshalRecord | None]]:
        """Everything in the coordination topic: partition, offset, broker's time, record."""
        for partition, offset, time_ms, value in read_topic(self.bootstrap, self.coordination):
            try:
                record = decode_value(value)
            except WireError:
                record = None
            yield partition, offset, time_ms, record

    def audit(self) -> ClaimAudit:
        """What an observer of the coordination log finds (partition by partition)."""
        audits = [ClaimAudit(self.interval_s), ClaimAudit(self.interval_s)]
        for partition, offset, time_ms, record in self.records():
            if record is not None:
                audits[partition].apply(record, offset=offset, broker_time_ms=time_ms)
        audits[0].dual_claims += audits[1].dual_claims
        return audits[0]


def read_topic(bootstrap: str, topic: str) -> Iterator[tuple[int, int, int, bytes | None]]:
    """All committed records of a topic, partition by partition."""
    found = tracker_logs.read_topic(bootstrap, topic)
    for record in sorted(found, key=lambda record: (record.partition(), record.offset())):
        yield record.partition(), record.offset(), record.timestamp()[1], record.value()


@contextmanager
def joined(*clusters: Cluster) -> Iterator[None]:
    """Close them all."""
    try:
        yield
    finally:
        for cluster in clusters:
            cluster.close(10)
