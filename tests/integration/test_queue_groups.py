"""Consumer groups: rebalances, classic and of Kafka 4, and positions that are not in the log."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from tests.integration.queue_logs import (
    ends,
    make_service,
    markers,
    receive_all,
    starts,
    tracked,
)
from tests.waiting import deadline_after, wait_until, within

from kafkamq.config import QueueConfig
from kafkamq.errors import BrokerError, DataLossError
from kafkamq.markers.membership import shorten_session
from kafkamq.markers.overview import doubled_queues, overview
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.message import Message
from kafkamq.queue.names import group_of
from kafkamq.queue.service import Service
from kafkamq.transport.admin import Admin
from kafkamq.types import MarkerType, Outcome


@pytest.fixture
def service(bootstrap: str, namespace: str) -> Iterator[Service]:
    with make_service(bootstrap, namespace) as service:
        yield service


def send(service: Service, queue_id: str, *payloads: bytes) -> None:
    producer = service.queue(queue_id).producer()
    for delivery in [producer.send(payload) for payload in payloads]:
        delivery.result(within(30))


PROTOCOLS = {
    "cooperative": {},
    "eager": {"partition_assignment_strategy": "range"},
    "kafka-4": {"group_protocol": "Consumer"},  # librdkafka takes any letters
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_workers_come_and_go_while_messages_flow(
    bootstrap: str, namespace: str, protocol: str
) -> None:
    """Nothing is lost, and no copy is made of what was acked in time."""
    with (
        make_service(bootstrap, namespace, partitions=4, **PROTOCOLS[protocol]) as service,
        tracked(service.config),  # brings back what a worker had STARTed when it left
    ):
        queue = service.queue("a", redelivery_timeout=20)
        total = 2000
        done: Counter[bytes | None] = Counter()
        lock = threading.Lock()
        stop = threading.Event()
        failures: list[BaseException] = []

        def work(rounds: int) -> None:
            try:
                for _ in range(rounds):
                    consumer = queue.consumer()
                    until_s = time.monotonic() + (1e9 if rounds == 1 else 1.5)
                    while not stop.is_set() and time.monotonic() < until_s:
                        for message in consumer.receive_many(30, 0.1):
                            with lock:
                                done[message.payload] += 1
                            message.ack()
                    consumer.flush()
                    consumer.close()
            except BaseException as error:  # noqa: BLE001 - the test raises it
                failures.append(error)

        threads = [threading.Thread(target=work, args=(rounds,)) for rounds in (1, 3, 3)]
        for thread in threads:
            thread.start()
        producer = queue.producer()
        for number in range(total):
            producer.send(b"%d" % number)
            if number % 50 == 0:
                time.sleep(0.05)
        producer.flush()
        wait_until(lambda: len(done) >= total or failures, timeout_s=90)
        stop.set()
        for thread in threads:
            thread.join(within(60))
        assert not failures
        assert len(done) == total
        assert set(done.values()) == {1}
        assert len(set(ends(service.config, Outcome.ACK))) == total


def test_a_group_of_kafka_4_notices_a_dead_worker_before_its_messages_are_due(
    bootstrap: str, namespace: str
) -> None:
    """There the session is a setting of the group; this broker allows 3 s."""
    with make_service(bootstrap, namespace, group_protocol="consumer") as service:
        group = group_of(service.config, "a")
        with service.queue("a").consumer(), Admin(service.config) as admin:
            wait_until(lambda: _session_of(admin, group) == "6000")
            shorten_session(service.config, QueueConfig(queue_id="a", redelivery_timeout_ms=60_000))
            assert _session_of(admin, group) == "6000"  # it is never made longer


def test_an_assignor_that_brokers_do_not_have_is_named(bootstrap: str, namespace: str) -> None:
    settings = {"group_protocol": "consumer", "group_remote_assignor": "unheard-of"}
    with make_service(bootstrap, namespace, **settings) as service:
        with (
            pytest.raises(BrokerError, match=r"The assignor .* is not supported"),
            service.queue("a").consumer() as consumer,
        ):
            receive_all(consumer, 1)
        with pytest.raises(BrokerError, match=r"The assignor .* is not supported"):
            LocalTracker(service.config).run(threading.Event())


def _session_of(admin: Admin, group: str) -> str | None:
    return admin.group_settings(group).get("consumer.session.timeout.ms")


@pytest.mark.slow
def test_held_messages_keep_their_leases_when_partitions_move(service: Service) -> None:
    """Their KEEPALIVEs and ENDs still count, whoever owns the partition now (R7, R8)."""
    with tracked(service.config):
        send(service, "a", *(b"%d" % number for number in range(20)))
        queue = service.queue("a", redelivery_timeout=within(2.0))
        first = queue.consumer()
        messages = receive_all(first, 20)
        second = queue.consumer()
        wait_until(lambda: _owned(first) == 1 and _owned(second) == 1)
        time.sleep(within(3.0))
        for message in messages:
            message.ack()
        first.flush()
        assert second.receive(1.5) is None
    assert not ends(service.config, Outcome.REDELIVERED)


def _owned(consumer: Consumer, got: list[Message] | None = None) -> int:
    """Partitions that it owns now; what it received on the way goes into ``got``."""
    messages = consumer.receive_many(10, 0.05)
    assert got is not None or not messages
    if got is not None:
        got += messages
    return len(consumer.intake.reader.group.places)


def test_a_busy_worker_does_not_hold_up_the_group(service: Service) -> None:
    """Its intake polls, so that another one gets its share at once."""
    send(service, "a", b"x")
    queue = service.queue("a")
    busy = queue.consumer()
    (message,) = receive_all(busy, 1)  # and now it works, and does not receive
    other = queue.consumer()
    wait_until(lambda: _owned(other) == 1)
    send(service, "a", *[b"y"] * 40)
    assert receive_all(other, 1)
    message.ack(wait=True)
    rest = receive_all(busy, 1)  # what was paused goes on
    assert rest[0].payload == b"y"


def test_a_partition_that_was_paused_when_it_went_is_read_when_it_is_back(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafkamq.markers.reader.FULL_MS", 0)
    send(service, "a", b"x")
    queue = service.queue("a")
    first = queue.consumer()
    receive_all(first, 1)
    second = queue.consumer()
    wait_until(
        lambda: all(len(each.intake.reader.group.places) == 1 for each in (first, second))
    )  # all paused, one gone
    assert first.receive(0.1) is None  # what is left is resumed
    second.close()
    wait_until(lambda: _owned(first) == 2)
    sent = {b"%d" % number for number in range(40)}
    send(service, "a", *sent)
    assert {message.payload for message in receive_all(first, 40)} == sent


def test_messages_polled_for_a_lost_partition_are_not_started(service: Service) -> None:
    send(service, "a", *(b"%d" % number for number in range(100)))
    queue = service.queue("a")
    first = queue.consumer()
    held = receive_all(first, 1)
    wait_until(lambda: len(first.intake.pipeline))
    second = queue.consumer()
    wait_until(lambda: _owned(second, held) == 1)
    wait_until(lambda: len(first.intake.reader.group.places) == 1)
    got = Counter(message.payload for message in held)
    deadline_s = deadline_after(60)
    while sum(got.values()) < 100 and time.monotonic() < deadline_s:
        for consumer in (first, second):
            for message in consumer.receive_many(10, 0.05):
                got[message.payload] += 1
    assert set(got.values()) == {1}
    assert len(got) == 100


def group(service: Service, queue_id: str) -> str:
    return group_of(service.config, queue_id)


def delete_before(service: Service, offsets: dict[int, int]) -> None:
    admin = AdminClient({"bootstrap.servers": service.config.bootstrap_servers})
    asked = [TopicPartition(service.config.message_topic, p, o) for p, o in offsets.items()]
    for future in admin.delete_records(asked).values():
        future.result()


def test_a_new_queue_begins_at_the_log_s_start_and_commits_that(service: Service) -> None:
    send(service, "other", *[b"x"] * 40)
    delete_before(service, {0: 5, 1: 7})
    consumer = service.queue("a").consumer()
    assert consumer.receive(0.5) is None
    reader = KafkaConsumer(
        {"bootstrap.servers": service.config.bootstrap_servers, "group.id": group(service, "a")}
    )
    asked = [TopicPartition(service.config.message_topic, number) for number in (0, 1)]
    wait_until(lambda: all(each.offset > 0 for each in reader.committed(asked, timeout=within(30))))
    reader.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_deleted_messages_are_counted_and_never_skipped_in_silence(
    bootstrap: str, namespace: str, protocol: str
) -> None:
    """Hole of `auto.offset.reset=earliest`: a position that retention has passed."""
    with make_service(bootstrap, namespace, partitions=1, **PROTOCOLS[protocol]) as service:
        queue = service.queue("a")
        send(service, "a", *(b"%d" % number for number in range(30)))
        consumer = queue.consumer()
        for message in receive_all(consumer, 10):
            message.ack()
        consumer.close()
        delete_before(service, {0: 25})
        late = queue.consumer()
        for _ in range(2):  # it does not go away by itself
            with pytest.raises(DataLossError, match="15 messages") as raised:
                receive_all(late, 1)
            assert "on_data_loss" in str(raised.value)
        late.close()
        willing = service.queue("a", on_data_loss="skip").consumer()
        messages = receive_all(willing, 5)
        assert [message.payload for message in messages] == [b"25", b"26", b"27", b"28", b"29"]
        for message in messages:
            message.ack()
        willing.flush()


def test_a_position_beyond_the_log_is_an_error(service: Service) -> None:
    send(service, "a", b"x")
    reader = KafkaConsumer(
        {"bootstrap.servers": service.config.bootstrap_servers, "group.id": group(service, "a")}
    )
    reader.commit(
        offsets=[TopicPartition(service.config.message_topic, n, 500) for n in (0, 1)],
        asynchronous=False,
    )
    reader.close()
    with (
        service.queue("a").consumer() as consumer,
        pytest.raises(DataLossError, match="beyond the log's end"),
    ):
        receive_all(consumer, 1)
    willing = service.queue("a", on_data_loss="skip").consumer()
    assert receive_all(willing, 1)[0].payload == b"x"


def test_what_was_polled_too_long_ago_is_fetched_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R5: no START for what was polled more than 20 s ago."""
    send(service, "a", *(b"%d" % number for number in range(50)))
    consumer = service.queue("a").consumer()
    got: list[Message] = receive_all(consumer, 1)
    monkeypatch.setattr("kafkamq.markers.rules.pipeline.MAX_AGE_MS", -1)
    deadline_s = time.monotonic() + 1.0
    while time.monotonic() < deadline_s:
        got += consumer.receive_many(50, 0.1)  # what was STARTed before
    assert len(got) < 50
    monkeypatch.undo()
    got += receive_all(consumer, 50 - len(got))
    assert Counter(message.payload for message in got) == Counter(b"%d" % n for n in range(50))
    started = [r.marker for r in markers(service.config) if r.marker.type is MarkerType.START]
    assert len(started) == 50


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_who_does_not_receive_for_too_long_leaves_the_rest_to_others(
    bootstrap: str, namespace: str, protocol: str
) -> None:
    """It keeps what it has in hand, STARTs nothing twice, and comes back with the next receive."""
    kafka = {"max_poll_interval_ms": "6000", **PROTOCOLS[protocol]}
    if protocol != "kafka-4":
        kafka["session_timeout_ms"] = "6000"
    with (
        make_service(bootstrap, namespace, partitions=1, **kafka) as service,
        tracked(service.config),
    ):
        queue = service.queue("a", redelivery_timeout=within(3.0), receive_buffer=10)
        send(service, "a", *(b"%d" % number for number in range(50)))
        busy = queue.consumer()
        hands: list[Message] = []
        while not hands:
            hands += filter(None, [busy.receive(1.0)])
        assert busy.in_flight == 10
        with queue.consumer() as other:
            messages = receive_all(other, 49)
            for message in messages:
                message.ack()
            other.flush()
        (mine,) = hands
        assert {m.payload for m in messages} == {b"%d" % n for n in range(50)} - {mine.payload}
        assert {m.delivery_count for m in messages} == {1}
        mine.ack(wait=True)  # its lease stands
        assert len(starts(service.config)) == 59  # 9 were given back, and are copies now
        send(service, "a", b"new")
        assert receive_all(busy, 1)[0].payload == b"new"
        busy.close()


def test_a_queue_is_shared_with_another_client_s_workers(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """kafka-mq-go's workers of a queue are the group kafka-mq-QUEUE: each message goes to one."""
    name = f"kafka-mq-{service.config.namespace}"
    queue_id = name.removeprefix("kafka-mq-")
    foreign = KafkaConsumer(
        {
            "bootstrap.servers": service.config.bootstrap_servers,
            "group.id": name,
            "partition.assignment.strategy": "range",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    foreign.subscribe([service.config.message_topic])
    theirs: list[bytes | None] = []

    def poll() -> None:
        record = foreign.poll(0.1)
        if record is not None and record.error() is None:
            theirs.append(record.value())

    ours: list[bytes | None] = []
    with service.queue(queue_id, group=name).consumer() as consumer:

        def both() -> None:
            poll()
            for message in consumer.receive_many(10, 0.1):
                ours.append(message.payload)
                message.ack()

        wait_until(lambda: both() or (len(foreign.assignment()) == 1 and _owned(consumer) == 1))
        assert "each gets every message" not in caplog.text
        for _ in range(2):
            service.queue(queue_id).consumer().close()  # in a group of its own
        wait_until(lambda: both() or "each gets every message" in caplog.text)
        assert caplog.text.count("each gets every message") == 1
        send(service, queue_id, *(b"%d" % number for number in range(40)))
        wait_until(lambda: both() or len(ours) + len(theirs) >= 40)
        consumer.flush()
    assert sorted(ours + theirs) == sorted(b"%d" % number for number in range(40))
    foreign.commit(asynchronous=False)
    foreign.close()
    (shown,) = (one for one in overview(service.config).queues if one.queue_id == queue_id)
    assert (shown.waiting, shown.behind) == (0, 0)
    assert queue_id not in doubled_queues(service.config)
    with service.queue(queue_id).consumer() as consumer:
        assert len(receive_all(consumer, 40)) == 40
    assert queue_id in doubled_queues(service.config)
