"""Holes of earlier systems that no other test shows closed; docs/evidence.md lists them all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from harness.markers import encode_start, read_positions
from tests.integration.queue_logs import make_service, markers, receive_all, starts
from tests.integration.tracker_logs import Logs
from tests.sure_producer import SureProducer
from tests.waiting import wait_until, within

from kafkamq.config import TrackerConfig
from kafkamq.markers.tracker.ledger import LedgerKey
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.markers.wire.marker_writer import encode_end, encode_tick
from kafkamq.transport.admin import Admin
from kafkamq.types import MarkerType, MessageId, Outcome

QUICK = TrackerConfig(position_interval_ms=200)


def test_hole_15_a_quiet_queue_behind_a_busy_one(bootstrap: str, namespace: str) -> None:
    """What belongs to others is passed, committed and never STARTed."""
    with make_service(bootstrap, namespace, partitions=1) as service:
        busy = service.queue("busy").producer()
        for _ in range(20_000):
            busy.send(b"x")
        service.queue("quiet").producer().send(b"mine").result(within(60))
        (message,) = receive_all(service.queue("quiet").consumer(), 1)
        assert message.payload == b"mine"
        message.ack(wait=True)
        assert len(starts(service.config)) == 1


def test_hole_4_what_retention_deleted_is_not_another_message(
    bootstrap: str, namespace: str
) -> None:
    """By reference: what follows it in the log is not sent in its place."""
    logs = Logs(bootstrap, namespace, partitions=1, marker_partitions=1)
    inline, *gone = logs.send(3, value=b"deleted")
    logs.send(2, value=b"still there")
    admin = AdminClient({"bootstrap.servers": bootstrap})
    place = TopicPartition(logs.config.message_topic, 0, 3)
    admin.delete_records([place])[place].result(within(30))
    logs.start(inline, timeout_ms=300, value=b"deleted")
    logs.sent.clear()  # as kafka-mq-go's workers, these do not say when their messages were sent
    logs.start(*gone, timeout_ms=300, value=None, by_reference=True)
    with LocalTracker(logs.config, QUICK).in_thread():
        wait_until(lambda: set(logs.ends(Outcome.DEAD_LETTERED)) == set(gone))
        wait_until(lambda: logs.ends(Outcome.REDELIVERED) == [inline])
    letters = logs.dead_letters()
    assert [headers["kafkamq-reason"] for _, headers in letters] == [b"payload-lost"] * 2
    assert [letter.value() for letter, _ in letters] == [None] * 2
    assert [copy.value for copy in logs.copies()] == [b"deleted"]


def positions(logs: Logs) -> dict[int, int]:
    keys = [LedgerKey.of_markers(logs.config, number) for number in range(logs.marker_partitions)]
    found = read_positions(logs.config, keys)
    return {key.partition: position.position for key, position in found.items()}


def test_hole_20_positions_follow_an_idle_log_and_the_end(bootstrap: str, namespace: str) -> None:
    """Nothing open: the position is the log's end, written by time and when the tracker closes."""
    logs = Logs(bootstrap, namespace, marker_partitions=1)

    def finish(count: int) -> int:
        ids = logs.send(count)
        logs.start(*ids, timeout_ms=60_000)
        logs.end(*ids)
        return max(message.offset() or 0 for message, _ in logs.markers())

    with LocalTracker(logs.config, QUICK).in_thread() as tracker:
        wait_until(lambda: tracker.is_live)
        last = finish(10)
        wait_until(lambda: positions(logs).get(0, 0) > last)
    slow = TrackerConfig(position_interval_ms=600_000)
    with LocalTracker(logs.config, slow).in_thread() as tracker:
        wait_until(lambda: tracker.is_live)
        last = finish(10)
        wait_until(lambda: any(each.position > last for each in tracker.statuses()))
    assert positions(logs)[0] > last  # closing wrote it


def recreate(bootstrap: str, topic: str) -> None:
    """Delete a topic and create it again, with one partition."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.delete_topics([topic])[topic].result(within(30))
    wait_until(lambda: topic not in admin.list_topics(timeout=within(30)).topics)
    settings = {"message.timestamp.type": "LogAppendTime"}
    admin.create_topics([NewTopic(topic, 1, 1, config=settings)])[topic].result(within(30))
    wait_until(lambda: topic in admin.list_topics(timeout=within(30)).topics)


def test_hole_21_a_topic_that_is_recreated(bootstrap: str, namespace: str) -> None:
    """R13: a zombie's ACK of an old message leaves the new one at the same place alone."""
    logs = Logs(bootstrap, namespace, partitions=1, marker_partitions=1)
    topic = logs.config.message_topic

    def identity() -> bytes:
        with Admin(logs.config) as admin:
            return admin.require_topic(topic).topic_id

    def sent() -> tuple[object, bytes]:
        (id_,) = logs.send()
        named = replace(id_, topic_id=identity())
        logs.marker(id_, encode_start(named, b"queue", b"payload", redeliver_after_ms=1500))
        return named, named.topic_id

    old, old_topic = sent()
    recreate(bootstrap, topic)
    wait_until(lambda: identity() != old_topic)
    logs = replace_producer(logs)
    new, _ = sent()
    assert (new.partition, new.offset) == (old.partition, old.offset)
    logs.marker(old, encode_end(old, Outcome.ACK))
    with LocalTracker(logs.config, QUICK).in_thread():
        wait_until(lambda: new in logs.ends(Outcome.REDELIVERED))
    assert old not in logs.ends(Outcome.REDELIVERED)  # acked


def test_hole_22_what_waits_to_be_handed_out_keeps_its_lease(
    bootstrap: str, namespace: str
) -> None:
    """Each message that was STARTed ahead is renewed as if it were handed out already."""
    with make_service(bootstrap, namespace) as service:
        producer = service.queue("a").producer()
        for delivery in [producer.send(b"x") for _ in range(20)]:
            delivery.result(within(30))
        consumer = service.queue("a", redelivery_timeout=within(1.5), receive_buffer=20).consumer()
        wait_until(lambda: consumer.receive(1.0))

        def renewed() -> set[MessageId | None]:
            """By message_id: it has got the partition less than 60 s ago (R7)."""
            found = [record.marker for record in markers(service.config)]
            return {one.message_id for one in found if one.type is MarkerType.KEEPALIVE}

        started = set(starts(service.config))
        assert len(started) > 1
        wait_until(lambda: renewed() >= started)


def replace_producer(logs: Logs) -> Logs:
    """The same namespace with a client that does not know the topic that was deleted."""
    return Logs(
        logs.bootstrap,
        logs.namespace,
        partitions=logs.partitions,
        marker_partitions=logs.marker_partitions,
    )


def test_a_dead_producers_open_transaction_delays_and_no_more(
    bootstrap: str, namespace: str
) -> None:
    """It holds every reader of its partition back until the broker ends it."""
    logs = Logs(bootstrap, namespace, marker_partitions=1)
    dead = SureProducer(
        {
            "bootstrap.servers": bootstrap,
            "transactional.id": f"{namespace}.dead",
            "transaction.timeout.ms": 4000,
        }
    )
    dead.init_transactions(20)
    with LocalTracker(logs.config, QUICK).in_thread() as tracker:
        wait_until(lambda: tracker.is_live)
        dead.begin_transaction()
        dead.produce(logs.config.marker_topic, encode_tick("nobody", 1), partition=0)
        dead.confirm(20)  # and now it is dead
        ids = logs.send(50)
        logs.start(*ids, timeout_ms=500)
        wait_until(lambda: len(logs.ends(Outcome.REDELIVERED)) == len(ids))
    assert sorted(logs.copied()) == sorted((id_.partition, id_.offset) for id_ in ids)
    assert not [m for _, m in logs.markers() if m.consumer_id == "nobody"]  # it was aborted


@pytest.mark.parametrize("exactly_once", [False, True])
def test_hole_21_a_worker_goes_on_in_a_topic_that_was_recreated(
    bootstrap: str, namespace: str, monkeypatch: pytest.MonkeyPatch, exactly_once: bool
) -> None:
    """R13: ENDs of old messages at the same places would hide the new ones from the tracker."""
    monkeypatch.setattr("kafkamq.markers.ack_writer.IDENTITY_AGE_S", 2.0)
    with make_service(bootstrap, namespace, partitions=1) as service:
        topic = service.config.message_topic
        producer = service.queue("a").producer()
        for _ in range(10):
            producer.send(b"old")
        producer.flush()
        consumer = service.queue("a", exactly_once=exactly_once).consumer()
        for message in receive_all(consumer, 10):
            message.ack(wait=True)
        former_id = message.message_id.topic_id
        recreate(bootstrap, topic)
        with make_service(bootstrap, namespace, partitions=1) as other:
            producer = other.queue("a").producer()
            for number in range(20):
                producer.send(b"%d" % number)
            producer.flush()
        known: set[int] = set()

        def are_known() -> bool:
            for message in consumer.receive_many(20, 0.5):
                if message.message_id.topic_id != former_id:  # else it comes once more
                    known.add(int(message.payload or b""))
            return known == set(range(20))

        wait_until(are_known)
