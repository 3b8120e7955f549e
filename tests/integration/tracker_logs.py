"""Plays workers against a namespace record by record, and reads what a tracker made of it.

Everything that a test asserts comes from the topics, read from their start by a read_committed
consumer: never from a counter of the code under test.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition
from confluent_kafka.admin import AdminClient
from harness.markers import encode_start
from tests.sure_producer import SureProducer
from tests.waiting import within

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.errors import WireError
from kafkamq.markers.rules.batching import gather
from kafkamq.markers.tracker.records import StatusReader
from kafkamq.markers.wire.marker_writer import encode_end, encode_keepalive, encode_schedule
from kafkamq.markers.wire.markers import decode_marker, encode_marker
from kafkamq.markers.wire.records import Sign
from kafkamq.queue.topics import create_topics
from kafkamq.queue.wire.headers import Origin, read_message_headers
from kafkamq.queue.wire.keys import marker_key, marker_partition
from kafkamq.types import Headers, Marker, MarkerType, MessageId, Outcome, expand

PATIENCE_S = 1.0  # with open transactions


@dataclass
class Copy:
    """A record of the messages topic that a tracker wrote."""

    offset: int
    origin: Origin | None
    delivery_count: int
    key: bytes | None
    value: bytes | None
    user: Headers
    timestamp_ms: int


@dataclass
class Logs:
    """A namespace whose topics a test writes as workers do."""

    bootstrap: str
    namespace: str
    marker_partitions: int = 2
    partitions: int = 2
    marker_retention_ms: int = 7 * 86_400_000
    max_lease_ms: int = 43_200_000
    kafka: dict[str, str] = field(default_factory=dict)
    config: ServiceConfig = field(init=False)

    def __post_init__(self) -> None:
        self.config = ServiceConfig(
            bootstrap_servers=self.bootstrap, namespace=self.namespace, kafka=self.kafka
        )
        create_topics(
            self.config,
            partitions=self.partitions,
            marker_partitions=self.marker_partitions,
            ledger_partitions=2,  # each partition costs the broker more than most tests do
            marker_retention_ms=self.marker_retention_ms,
            max_lease_ms=self.max_lease_ms,
        )
        self._producer = SureProducer({"bootstrap.servers": self.bootstrap, "acks": "all"})
        self.sent: dict[MessageId, int] = {}  # broker timestamps of the messages

    # ---- what trackers say

    def signs(self) -> list[Sign]:
        """The signs of life of all trackers, in the order of the log (R36)."""
        with closing(StatusReader(self.config)) as reader:
            reader.read_to_end()
            return reader.take_signs()

    # ---- what senders and workers write

    def _write(
        self,
        topic: str,
        records: Sequence[tuple[int, bytes | None, bytes | None, Headers]],
    ) -> list[Message]:
        done: list[Message] = []
        refused: list[KafkaError] = []

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                refused.append(error)
            done.append(message)

        for partition, key, value, headers in records:
            while True:
                try:
                    self._producer.produce(
                        topic,
                        value,
                        key,
                        partition,
                        headers=list(headers) or None,
                        on_delivery=delivered,
                    )
                    break
                except BufferError:
                    self._producer.poll(0.1)
        self._producer.confirm(30)
        assert not refused, refused
        return done

    def send(
        self,
        count: int = 1,
        *,
        key: bytes = b"queue",
        value: bytes | None = b"payload",
        headers: Headers = (),
        partition: int = 0,
    ) -> list[MessageId]:
        """Messages into the messages topic; their ids name neither it nor a leader epoch."""
        written = self._write(self.config.message_topic, [(partition, key, value, headers)] * count)
        ids = [MessageId(partition, message.offset()) for message in written]
        self.sent |= {
            id_: message.timestamp()[1] for id_, message in zip(ids, written, strict=True)
        }
        return ids

    def place(self, id_: MessageId) -> int:
        """The marker partition of a message (R26)."""
        return marker_partition(id_.partition, id_.offset, self.marker_partitions)

    def marker(self, id_: MessageId, data: bytes) -> int:
        return self.markers_of([id_], [data])[0]

    def markers_of(self, ids: Sequence[MessageId], data: Sequence[bytes]) -> list[int]:
        """Markers into the partitions of their messages; returns their offsets."""
        records = [
            (self.place(id_), marker_key(id_.partition, id_.offset), value, ())
            for id_, value in zip(ids, data, strict=True)
        ]
        return [message.offset() for message in self._write(self.config.marker_topic, records)]

    def start(
        self,
        *ids: MessageId,
        timeout_ms: int = 1000,
        consumer: str = "worker",
        count: int = 1,
        key: bytes = b"queue",
        value: bytes | None = b"payload",
        headers: Headers = (),
        max_deliveries: int = 0,
        max_lease_ms: int = 0,
        expires_at_ms: int = 0,
        by_reference: bool = False,
    ) -> list[int]:
        data = [
            encode_start(
                id_,
                key,
                value,
                redeliver_after_ms=timeout_ms,
                consumer_id=consumer,
                delivery_count=count,
                headers=headers,
                max_deliveries=max_deliveries,
                max_lease_ms=max_lease_ms,
                expires_at_ms=expires_at_ms,
                by_reference=by_reference,
                message_timestamp_ms=self.sent.get(id_, 0),
            )
            for id_ in ids
        ]
        return self.markers_of(ids, data)

    def batch(self, *ids: MessageId, marker: Marker) -> None:
        """This marker of all of these, in one record for each marker partition."""
        for number in range(self.marker_partitions):
            for batches, _ in gather([one for one in ids if self.place(one) == number]):
                data = encode_marker(replace(marker, batches=batches))
                self._write(self.config.marker_topic, [(number, None, data, ())])

    def start_batch(
        self,
        *ids: MessageId,
        timeout_ms: int = 1000,
        max_deliveries: int = 0,
        key: bytes = b"queue",
    ) -> None:
        """STARTs of batches, by reference."""
        start = Marker(
            MarkerType.START,
            redeliver_after_ms=timeout_ms,
            key=key,
            consumer_id="worker",
            by_reference=True,
            max_deliveries=max_deliveries,
        )
        self.batch(*ids, marker=start)

    def end(
        self,
        *ids: MessageId,
        outcome: Outcome = Outcome.ACK,
        delay_ms: int = 0,
        reason: str = "",
        consumer: str = "worker",
    ) -> None:
        data = [
            encode_end(
                id_, outcome, consumer_id=consumer, redeliver_after_ms=delay_ms, reason=reason
            )
            for id_ in ids
        ]
        self.markers_of(ids, data)

    def keepalive(self, id_: MessageId, *, consumer: str = "worker", timeout_ms: int) -> None:
        """For all leases of ``consumer`` in the partition of this message (R7)."""
        self.marker(
            id_, encode_keepalive(None, consumer_id=consumer, redeliver_after_ms=timeout_ms)
        )

    def schedule(
        self, delay_ms: int, *, partition: int = 0, value: bytes = b"later", headers: Headers = ()
    ) -> MessageId:
        """A delayed message; its identity is its own place."""
        data = encode_schedule(
            b"queue", value, redeliver_after_ms=delay_ms, headers=headers, consumer_id="sender"
        )
        (written,) = self._write(self.config.marker_topic, [(partition, None, data, ())])
        return MessageId(partition, written.offset())

    def end_schedule(self, schedule: MessageId) -> None:
        data = encode_end(schedule, Outcome.ACK, of_schedule=True)
        self._write(self.config.marker_topic, [(schedule.partition, None, data, ())])

    def raw_marker(self, partition: int, value: bytes | None, key: bytes | None = None) -> int:
        (written,) = self._write(self.config.marker_topic, [(partition, key, value, ())])
        return written.offset()

    # ---- what the logs say

    def read(self, topic: str) -> list[Message]:
        """All committed records of a topic, partition by partition."""
        return read_topic(self.bootstrap, topic)

    def copies(self) -> list[Copy]:
        """Records of the messages topic that carry an origin: written by a tracker."""
        result = []
        for message in self.read(self.config.message_topic):
            known = read_message_headers(message.headers())
            if known.origin is not None:
                result.append(
                    Copy(
                        message.offset(),
                        known.origin,
                        known.delivery_count,
                        message.key(),
                        message.value(),
                        known.user,
                        message.timestamp()[1],
                    )
                )
        return result

    def copied(self) -> list[tuple[int, int]]:
        """(partition, offset) of the message that each copy is of."""
        return [(c.origin.partition, c.origin.offset) for c in self.copies() if c.origin]

    def dead_letters(self) -> list[tuple[Message, dict[str, bytes | None]]]:
        """Dead letters with their headers."""
        return [
            (message, dict(message.headers() or ()))
            for message in self.read(self.config.dead_letter_topic)
        ]

    def markers(self) -> list[tuple[Message, Marker]]:
        """Every marker that decodes."""
        result = []
        for message in self.read(self.config.marker_topic):
            try:
                result.append((message, decode_marker(message.value())))
            except WireError:  # noqa: PERF203 - the test wrote it
                continue
        return result

    def said(self) -> list[tuple[Message, Marker]]:
        """``markers``, one for each message that they name (R27)."""
        return [(message, one) for message, marker in self.markers() for one in expand(marker)]

    def ends(self, *outcomes: Outcome) -> list[MessageId]:
        """Messages that have an END of these outcomes, one for each END."""
        return [
            one.message_id
            for _, one in self.said()
            if one.type is MarkerType.END and one.outcome in outcomes
            if one.message_id is not None
        ]


def read_topic(bootstrap: str, topic: str, *, isolation: str = "read_committed") -> list[Message]:
    """All records of a topic that were there at the call.

    A transaction ends for readers a moment after it has for its writer. One that is open is waited
    for, but not long: its writer may be dead.
    """
    admin = AdminClient({"bootstrap.servers": bootstrap})
    partitions = len(admin.list_topics(topic, timeout=within(30)).topics[topic].partitions)
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "test-reader",
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 10,
        }
    )
    try:
        consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions)])
        behind = set(range(partitions))
        ends: dict[int, int] = {}  # of the log, open transactions included, when it was first met
        records: list[Message] = []
        now_s = time.monotonic()
        deadline_s = give_up_s = now_s + 60
        while behind and (len(ends) < partitions or now_s < give_up_s):
            assert now_s < deadline_s, f"{topic} was not read to its end"
            first = consumer.poll(0.1)
            now_s = time.monotonic()
            for message in [] if first is None else [first, *consumer.consume(5000, 0)]:
                error, number = message.error(), message.partition()
                if error is None:
                    records.append(message)
                    continue
                assert error.code() == KafkaError._PARTITION_EOF, error
                if number not in ends:
                    place = TopicPartition(topic, number)
                    ends[number] = consumer.get_watermark_offsets(place, cached=True)[1]
                    give_up_s = now_s + PATIENCE_S
                if message.offset() >= ends[number]:
                    behind.discard(number)
        return records
    finally:
        consumer.close()


_PROGRAM = """
import sys
from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.markers.tracker.local import LocalTracker
config = ServiceConfig(bootstrap_servers=sys.argv[1], namespace=sys.argv[2])
tracker = TrackerConfig(max_offsets_per_commit=int(sys.argv[3]), position_interval_ms=500)
LocalTracker(config, tracker).run()
"""


@contextmanager
def tracker_process(
    config: ServiceConfig, *, max_rows: int = TrackerConfig().max_offsets_per_commit
) -> Iterator[subprocess.Popen[bytes]]:
    """A local tracker in a process of its own, killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, config.bootstrap_servers, config.namespace, str(max_rows)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(within(10))
