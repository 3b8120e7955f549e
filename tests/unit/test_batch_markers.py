"""R28-R30: what a worker with ``batch_markers`` writes, on Kafka in memory, folded singly."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError
from harness.naive import NaiveTracker
from tests.unit.worker_parts import FixedNamespace, Parts, record, starts_of
from tests.waiting import wait_until, within

from kafkamq import aio
from kafkamq.config import Backoff
from kafkamq.errors import LeaseLostError
from kafkamq.markers import starts
from kafkamq.markers.rules.batching import (
    MAX_NAMED,
    delay_by_reference_ms,
    gather,
    oldest_by_reference_ms,
)
from kafkamq.markers.rules.leases import Leases
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.markers.wire.markers import decode_marker, encode_marker
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.message import Message
from kafkamq.queue.rules.log_clock import BrokerClock
from kafkamq.queue.service import Service
from kafkamq.runtime.worker import Worker
from kafkamq.transport.admin import Admin
from kafkamq.transport.clients import open_producer
from kafkamq.transport.memory.cluster import cluster_of, forget_cluster
from kafkamq.transport.memory.state import Fault
from kafkamq.types import Marker, MarkerType, MessageBatch, Outcome, expand

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
MARKERS = "n.markers"
MESSAGES = "n.messages"
START, END, KEEPALIVE = MarkerType.START, MarkerType.END, MarkerType.KEEPALIVE


class Kafka:
    """A cluster in memory with one queue."""

    def __init__(self) -> None:
        self.name = f"memory://{uuid.uuid4().hex}"
        self.service = Service(self.name, "n")
        self.service.create_topics(partitions=1, marker_partitions=1)
        self.cluster = cluster_of(self.name)
        self.producer = self.service.queue("q").producer()

    def send(self, count: int) -> None:
        for number in range(count):
            self.producer.send(b"%d" % number)
        self.producer.flush(within(30))

    def consumer(self, **queue: Any) -> Consumer:
        """One that knows the brokers' time: it has handed out, and acked, a message before."""
        self.send(1)
        settings = {"batch_markers": True, "receive_buffer": 1, "max_lease": 3600.0, **queue}
        consumer = self.service.queue("q", **settings).consumer()
        message = consumer.receive(within(30))
        assert message is not None
        message.ack(wait=True)
        return consumer

    def records(self) -> list[tuple[int, int, bytes | None, Marker]]:
        """Offset, log time, key and what is said of each record."""
        (partition,) = self.cluster.topics[MARKERS].partitions
        return [
            (offset, each.timestamp_ms, each.key, decode_marker(each.value or b""))
            for offset, each in enumerate(partition.records)
            if each
        ]

    def markers(self, kind: MarkerType, *, after: int = 2) -> list[Marker]:
        """Those behind START and END of the first message."""
        return [
            each for offset, _, _, each in self.records() if offset >= after and each.type is kind
        ]


@pytest.fixture
def kafka() -> Iterator[Kafka]:
    made = Kafka()
    first = made.service
    yield made
    made.service.close()
    first.close()  # where a test has put another one in its place
    forget_cluster(made.name)


def receive(consumer: Consumer, count: int) -> list[Message]:
    got: list[Message] = []
    for _ in range(100):
        got += consumer.receive_many(count - len(got), 1.0)
        if len(got) == count:
            return got
    raise AssertionError(f"{len(got)} of {count}")


def offsets(*markers: Marker) -> list[int]:
    return [
        each.message_id.offset
        for marker in markers
        for each in expand(marker)
        if each.message_id is not None
    ]


def test_few_among_others_are_started_together(kafka: Kafka) -> None:
    """A poll asks for what the caller can use, however few the poll before had found."""
    consumer = kafka.consumer()
    other = kafka.service.queue("other").producer()
    for _ in range(100):
        for _ in range(20):
            other.send(b"not ours")
        kafka.send(1)
    other.flush(within(30))
    taken = []
    while sum(taken) < 100:
        messages = consumer.receive_many(100)
        for message in messages:
            message.ack()
        taken.append(len(messages))
    assert len(taken) <= 5, taken
    consumer.close()


def test_a_run_of_messages_has_one_start_and_one_end(kafka: Kafka) -> None:
    consumer = kafka.consumer(max_deliveries=3)
    kafka.send(50)
    for message in receive(consumer, 50):
        message.ack()
    consumer.flush()
    starts, ends = kafka.markers(START), kafka.markers(END)
    assert sorted(offsets(*starts)) == sorted(offsets(*ends)) == list(range(1, 51))
    assert len(starts) + len(ends) < 20  # polls and pauses divide them
    for start in starts:
        assert (start.key, start.by_reference, start.value) == (b"q", True, b"")
        assert (start.redeliver_after_ms, start.max_deliveries) == (10_000, 3)
        assert start.max_lease_ms == HOUR_MS
        assert start.consumer_id
        assert all(each.topic_id and each.leader_epoch for each in start.batches)
    assert {end.outcome for end in ends} == {Outcome.ACK}
    consumer.close()


def test_payloads_that_stay_where_they_are_cut_no_transaction(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "MAX_TRANSACTION_BYTES", 20)
    consumer = kafka.consumer(exactly_once=True)
    kafka.send(50)
    received: list[Message] = []
    while len(received) < 50:
        received += consumer.receive_many(50, 1.0)
    found = [len(offsets(start)) for start in kafka.markers(START)]
    assert sum(found) == 50
    assert max(found) > 20
    consumer.close()


def test_the_records_mean_what_the_naive_tracker_makes_of_single_ones(kafka: Kafka) -> None:
    """Of 60 messages each third is acked, each third nacked; the others are held."""
    consumer = kafka.consumer()
    kafka.send(60)
    for number, message in enumerate(receive(consumer, 60)):
        if number % 3 == 1:
            message.nack(delay=3600, reason="later")
        elif number % 3 == 2:
            message.ack()
    consumer.flush()
    naive = NaiveTracker()
    singles = [(ms, each) for _, ms, _, marker in kafka.records() for each in expand(marker)]
    for place, (log_ms, single) in enumerate(singles):
        naive.apply(place, log_ms, single)
    held = {each.offset for each in naive.in_progress()}
    assert held == {number + 1 for number in range(60) if number % 3 != 2}
    consumer.close()


def test_the_first_messages_of_a_worker_have_their_payloads_in_their_starts(kafka: Kafka) -> None:
    """R28: no report has told it the brokers' time, and what it polls may be days old."""
    kafka.send(3)
    consumer = kafka.service.queue("q", batch_markers=True).consumer()
    receive(consumer, 3)
    starts = kafka.markers(START, after=0)
    assert [(each.value, each.batches) for each in starts] == [
        (b"0", ()),
        (b"1", ()),
        (b"2", ()),
    ]
    consumer.close()


@pytest.mark.parametrize(
    ("settings", "lease_s"),
    [({"retention.ms": str(2 * HOUR_MS)}, 3600.0), ({"retention.ms": str(DAY_MS)}, 12 * 3600.0)],
)
def test_what_does_not_outlive_its_lease_by_far_keeps_its_payload_with_it(
    kafka: Kafka, settings: dict[str, str], lease_s: float
) -> None:
    kafka.cluster.topics[MESSAGES].settings.update(settings)
    with Service(kafka.name, "n") as service:
        kafka.service = service
        consumer = kafka.consumer(max_lease=lease_s)
        kafka.send(3)
        receive(consumer, 3)
        assert {each.batches for each in kafka.markers(START)} == {()}
        consumer.close()


@pytest.mark.parametrize(
    "setting", [("retention.bytes", "1000000"), ("cleanup.policy", "compact,delete")]
)
def test_what_may_go_at_any_time_keeps_its_payload_with_it(
    kafka: Kafka, setting: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R28: the settings are read again while a worker runs."""
    monkeypatch.setattr("kafkamq.markers.ack_writer.IDENTITY_AGE_S", 0.05)
    consumer = kafka.consumer()

    def is_by_reference() -> bool:
        kafka.send(1)
        receive(consumer, 1)
        return bool(kafka.markers(START)[-1].batches)

    assert is_by_reference()
    name, value = setting
    kafka.cluster.topics[MESSAGES].settings[name] = value
    wait_until(lambda: not is_by_reference())
    first = len(kafka.records())
    kafka.send(3)
    for message in receive(consumer, 3):
        message.nack(delay=5.0, wait=True)
    assert {each.batches for each in kafka.markers(START, after=first)} == {()}
    assert {each.redeliver_after_ms for each in kafka.markers(END, after=first)} == {5000}
    consumer.close()


@pytest.mark.parametrize("unknown", ["topic id", "leader epoch"])
def test_what_nothing_tells_from_another_in_its_place_is_single(unknown: str) -> None:  # R28, R13
    parts = Parts(
        FixedNamespace(
            message_retention_ms=-1, message_topic_id=b"" if unknown == "topic id" else b"t" * 16
        ),
        batch_markers=True,
    )
    parts.namespace.broker_clock.reported(0, 0)
    parts.poll(record(0, leader_epoch=-1 if unknown == "leader epoch" else 0))
    (start,) = starts_of(parts.start())
    assert not decode_marker(start.value).batches
    parts.state.writer.close()


def test_the_last_delivery_has_a_start_of_its_own(kafka: Kafka) -> None:
    """R6: with its payload, whatever else may be by reference."""
    consumer = kafka.consumer(max_deliveries=2)
    writer = open_producer({"bootstrap.servers": kafka.service.config.bootstrap_servers}, None)
    writer.produce(MESSAGES, b"once", b"q", 0, headers=[("kafkamq-delivery-count", b"2")])
    assert not writer.flush(within(30))
    receive(consumer, 1)
    (start,) = kafka.markers(START)
    assert (start.batches, start.value, start.delivery_count) == ((), b"once", 2)
    consumer.close()


def test_verdicts_are_one_record_only_if_they_say_the_same(kafka: Kafka) -> None:
    consumer = kafka.consumer(backoff=Backoff(first=5.0, jitter=0.5))
    kafka.send(12)
    messages = receive(consumer, 12)
    for message in messages[:3]:
        message.nack(reason="down")
    for message in messages[3:6]:
        message.nack(delay=7)
    for message in messages[6:9]:
        message.reject("broken")
    for message in messages[9:]:
        message.reject("odd")
    consumer.flush()
    said = {}
    for end in kafka.markers(END):
        for offset in offsets(end):
            said[offset] = end.outcome, end.reason
        if end.outcome is Outcome.NACK:
            assert 2500 <= end.redeliver_after_ms <= 7500
            assert end.reason or end.redeliver_after_ms == 7000
    assert [said[message.message_id.offset] for message in messages] == [
        *[(Outcome.NACK, "down")] * 3,
        *[(Outcome.NACK, "")] * 3,
        *[(Outcome.REJECT, "broken")] * 3,
        *[(Outcome.REJECT, "odd")] * 3,
    ]
    assert len(kafka.markers(END)) < 12
    consumer.close()


def test_a_nack_waits_for_half_of_what_its_message_has_left_at_most(kafka: Kafka) -> None:
    kafka.cluster.topics[MESSAGES].settings["retention.ms"] = str(4 * HOUR_MS)
    kafka.cluster.topics[MARKERS].settings["retention.ms"] = str(400 * HOUR_MS)
    with Service(kafka.name, "n") as service:
        kafka.service = service
        consumer = kafka.consumer(max_lease=60.0)
        kafka.send(1)
        (message,) = receive(consumer, 1)
        message.nack(delay=50 * 3600, wait=True)
        (end,) = kafka.markers(END)
        assert 2 * HOUR_MS - 60_000 < end.redeliver_after_ms <= 2 * HOUR_MS
        consumer.close()


def test_a_failed_end_is_written_again_without_what_has_ended_meanwhile(kafka: Kafka) -> None:
    consumer = kafka.consumer(redelivery_timeout=1.0)
    kafka.send(4)
    messages = receive(consumer, 4)
    for message in messages[:2]:
        message.extend(60)
    wait_until(lambda: all(m.deadline > time.monotonic() + 30 for m in messages[:2]))
    refused = Fault(latency_s=1.5, error=KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))
    faults = iter([refused, refused])  # the first verdict may have set out alone
    kafka.cluster.faults.plan = lambda kind, _, place: (
        next(faults, None) if kind == "produce" and place == (MARKERS, 0) else None
    )
    for message in messages:
        message.ack()
    with pytest.raises(LeaseLostError) as caught:
        consumer.flush()
    assert set(caught.value.messages) == {each.message_id for each in messages[2:]}
    assert sorted(offsets(*kafka.markers(END))) == [each.message_id.offset for each in messages[:2]]
    consumer.close()


def test_what_a_late_start_names_beside_a_held_message_stays_ended(kafka: Kafka) -> None:  # R12
    """A tracker that starts later reads from that START on, and not from the END before it."""
    kafka.send(2)
    with Admin(kafka.service.config) as admin:
        topic_id = admin.require_topic(MESSAGES).topic_id
    writer = open_producer({"bootstrap.servers": kafka.name}, None)
    lease_ms = 1000

    def mark(kind: MarkerType, by: str, bits: int = 0) -> None:
        batches = (MessageBatch(0, topic_id, 1, 0, bits),) if bits else ()
        marker = Marker(kind, None, lease_ms, b"q", consumer_id=by, batches=batches)
        writer.produce(MARKERS, encode_marker(marker), b"0:0", 0)
        writer.flush(within(10))

    def outcomes() -> list[Outcome]:
        return [each.outcome for each in kafka.markers(END, after=0)]

    with LocalTracker(kafka.service.config).in_thread():
        mark(START, "b", 0b01)
        mark(END, "b", 0b01)
        mark(START, "a", 0b11)  # it had stood still
        mark(START, "b", 0b10)
        wait_until(lambda: mark(KEEPALIVE, "b") or Outcome.ALREADY_ENDED in outcomes())
    _, begun_ms, _, _ = kafka.records()[-1]
    with LocalTracker(kafka.service.config).in_thread() as tracker:

        def is_over() -> bool:
            mark(KEEPALIVE, "b")
            has_read = all(each.due == 0 for each in tracker.statuses())
            return tracker.is_live and has_read and kafka.records()[-1][1] > begun_ms + 3 * lease_ms

        wait_until(is_over)
    assert outcomes() == [Outcome.ACK, Outcome.ALREADY_ENDED]
    assert sum(1 for each in kafka.cluster.topics[MESSAGES].partitions[0].records if each) == 2


def test_ages_are_judged_by_the_later_of_two_clocks() -> None:  # R28
    clock = BrokerClock()
    assert clock.now_ms(5 * DAY_MS, 0) is None
    clock.reported(1_000_000, 400)
    assert clock.now_ms(0, 500) == 1_000_100
    assert clock.now_ms(2_000_000, 500) == 2_000_000
    clock.reported(-1, 600)  # not LogAppendTime
    assert clock.now_ms(0, 600) == 1_000_200


@pytest.mark.parametrize("retention_ms", [99, 100, 101, 1000])
@pytest.mark.parametrize("max_lease_ms", [1, 7, 49, 50, 51])
def test_age_and_lease_are_less_than_half_of_the_retention(
    retention_ms: int, max_lease_ms: int
) -> None:
    now_ms = 5000
    oldest_ms = oldest_by_reference_ms(now_ms, max_lease_ms=max_lease_ms, retention_ms=retention_ms)
    for time_ms in range(now_ms - 600, now_ms + 60):
        may = 2 * (now_ms - time_ms + max_lease_ms) < retention_ms
        assert (time_ms >= oldest_ms) is may
    assert oldest_by_reference_ms(now_ms, max_lease_ms=max_lease_ms, retention_ms=-1) == 0


def test_a_delay_by_reference_is_half_of_what_is_left() -> None:
    assert delay_by_reference_ms(100, 0, 50, retention_ms=1050) == 100
    assert delay_by_reference_ms(600, 0, 50, retention_ms=1050) == 500
    assert delay_by_reference_ms(600, 0, 2000, retention_ms=1050) == 0
    assert delay_by_reference_ms(600, 0, 2000, retention_ms=-1) == 600


class Item:
    def __init__(self, partition: int, offset: int, log: tuple[bytes, int] = (b"", 0)) -> None:
        self.partition, self.offset, self.log = partition, offset, log


def test_gathered_items_are_named_once_each_and_no_others() -> None:
    places = [(0, 5), (0, 4095), (0, 4096), (1, 5), (0, 7), (0, 5), (0, 6)]
    places += [(0, 4096 * chunk) for chunk in range(2, 130)]
    markers = gather([Item(*place) for place in places])
    assert [len(batches) <= 64 for batches, _ in markers] == [True] * 3
    for batches, items in markers:
        named = [(each.partition, each.offset) for b in batches for each in b.message_ids()]
        assert sorted(named) == sorted({(item.partition, item.offset) for item in items})
    assert sum(len(items) for _, items in markers) == len(places)


def test_a_marker_names_so_many_messages_at_most() -> None:
    places = [(0, offset) for offset in range(100, 40_000)]
    places += [(1, 2 * offset) for offset in range(20_000)]
    markers = gather([Item(*place) for place in places])
    assert [decode_marker(_end_of(batches)).batches for batches, _ in markers] == [
        batches for batches, _ in markers
    ]
    assert max(len(items) for _, items in markers) <= MAX_NAMED
    assert [(item.partition, item.offset) for _, items in markers for item in items] == places


def _end_of(batches: tuple[MessageBatch, ...]) -> bytes:
    return encode_marker(Marker(END, None, outcome=Outcome.ACK, batches=batches))


def test_keepalives_by_id_are_batches_but_for_what_was_extended() -> None:  # R30
    leases = Leases("me", redelivery_timeout_ms=3000, max_lease_ms=60_000, batch_markers=True)
    leases.gained_partition(0, 0)
    held = [leases.start(0, [offset], (b"", 0), 1) for offset in (4, 5, 7, 9)]
    for lease in held:
        leases.started(lease, 0, 0)
    leases.committed(held, 0)
    assert leases.extend(held[2], 20_000, 100) is not None
    extended, together = leases.plan_renewals(1000)
    assert ([extended.message_id], extended.redeliver_after_ms) == (held[2].message_ids(), 19_100)
    assert (together.message_id, together.redeliver_after_ms) == (None, 3000)
    (batch,) = together.batches
    assert [each.offset for each in batch.message_ids()] == [4, 5, 9]
    leases.change_id("me again")
    leases.renewed(together, 1100, 1100)
    assert {lease.holder_id for lease in held} == {"me"}
    again = leases.plan_renewals(2000)
    leases.renewed(again[1], 2100, 2100)
    assert [lease.holder_id for lease in held] == ["me again", "me again", "me", "me again"]
    assert held[0].deadline_ms == 2000 + 3000


def test_a_keepalive_by_id_passes_over_what_is_acked_while_it_is_planned() -> None:  # R30
    """An ACK takes no lock: a lease may lose its last message after it was chosen."""
    leases = Leases("me", redelivery_timeout_ms=3000, max_lease_ms=60_000, batch_markers=True)
    held = [leases.start(0, [offset, offset + 1], (b"", 0), 1) for offset in (4, 6)]
    for lease in held:
        leases.started(lease, 0, 0)
    leases.committed(held, 0)
    held[0].held.clear()  # as two ACKs do
    leases.change_id("me again")
    (renewal,) = leases.renewals_of(held, 1000)
    (batch,) = renewal.batches
    assert [each.offset for each in batch.message_ids()] == [6, 7]
    assert renewal.leases == (held[1],)
    held[1].held.clear()
    assert not leases.renewals_of(held, 1000)


def test_a_queue_without_them_is_so_for_handlers_and_for_asyncio(kafka: Kafka) -> None:
    queue = kafka.service.queue("q", batch_markers=False)
    seen: list[Message] = []

    @queue.handler()
    def handle(message: Message) -> None:
        seen.append(message)

    kafka.send(200)
    worker = Worker(kafka.service)
    worker.start()
    wait_until(lambda: len(seen) == 200)
    worker.stop(30)
    assert len(kafka.markers(START, after=0)) == 200
    assert not any(marker.batches for _, _, _, marker in kafka.records())
    assert not aio.Service(kafka.name, "n").queue("q", batch_markers=False).config.batch_markers
