"""What becomes of messages that one START holds together, judged by the logs alone (R27-R33)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions
from harness.faults import read_namespace
from tests.integration.queue_logs import (
    die,
    make_service,
    markers,
    read_topic,
    receive_all,
    set_topic,
    tracked,
)
from tests.integration.test_holes import recreate
from tests.waiting import wait_until, within

from kafkamq.dev import LocalKafka, cache_dir_from, java_from
from kafkamq.markers.tracker import settlement
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.message import Message
from kafkamq.queue.service import Service
from kafkamq.queue.wire.headers import read_message_headers
from kafkamq.testing import check_logs
from kafkamq.testing.checker import Verdict
from kafkamq.transport.log_reader import Patience
from kafkamq.types import Marker, MarkerType, MessageId, Outcome

TIMEOUT_S = within(2.0)
FROM_ENVIRONMENT = {"cache_dir": cache_dir_from(os.environ), "java": java_from(os.environ)}


@dataclass
class Stage:
    """A queue whose worker holds messages in batches."""

    service: Service
    timeout_s: float = TIMEOUT_S
    worker: Consumer = field(init=False)

    def __post_init__(self) -> None:
        self.worker = self.service.queue("a", redelivery_timeout=self.timeout_s).consumer()
        self.send(1)  # from its START on the worker knows the brokers' time (R28)
        receive_all(self.worker, 1)[0].ack(wait=True)

    def send(self, count: int) -> None:
        producer = self.service.queue("a").producer()
        for number in range(count):
            producer.send(b"%d" % number, id=f"m-{number}")
        producer.flush()

    def hold(self, count: int) -> list[Message]:
        """So many messages, STARTed by few records."""
        self.send(count)
        held = receive_all(self.worker, count)
        starts = [one for one in self.records() if one.type is MarkerType.START]
        assert len(starts) < 2 + count / 4
        return held

    def records(self) -> list[Marker]:
        """Of the markers topic, as they stand there."""
        config = self.service.config
        read = read_topic(config.bootstrap_servers, config.marker_topic)
        return [decode_marker(record.value()) for record in read]

    def ends(self, outcome: Outcome) -> Counter[MessageId]:
        """Messages with such an END."""
        said = (record.marker for record in markers(self.service.config))
        return Counter(
            one.message_id
            for one in said
            if one.type is MarkerType.END and one.outcome is outcome
            if one.message_id is not None
        )

    def letters(self) -> Counter[tuple[bytes | None, bytes | None]]:
        """Reasons and queues of dead letters."""
        config = self.service.config
        read = read_topic(config.bootstrap_servers, config.dead_letter_topic)
        headers = [dict(record.headers() or ()) for record in read]
        return Counter((each["kafkamq-reason"], each["kafkamq-queue-id"]) for each in headers)

    def copies(self) -> Counter[tuple[int, int]]:
        """Of which message, and how often."""
        config = self.service.config
        read = read_topic(config.bootstrap_servers, config.message_topic)
        origins = [read_message_headers(record.headers()).origin for record in read]
        return Counter((one.partition, one.offset) for one in origins if one is not None)

    def settle(self, count: int) -> None:
        """Another worker acks so many messages, which are all that come."""
        with self.service.queue("a", redelivery_timeout=30.0).consumer() as other:
            for message in receive_all(other, count):
                message.ack()
            other.flush()
            assert other.receive(1.0) is None

    def judge(self, *, deleted: set[tuple[int, int]] | None = None) -> Verdict:
        """By the logs: nothing is lost, repeated, or left unexplained; all is settled."""
        found = read_namespace(self.service.config)
        verdict = check_logs(
            messages=found.messages,
            markers=found.markers,
            dead_letters=found.dead_letters,
            deleted=deleted or (),
        )
        verdict.require_ok()
        return verdict


@pytest.fixture
def stage(bootstrap: str, namespace: str) -> Iterator[Stage]:
    with make_service(bootstrap, namespace) as service:
        yield Stage(service)


@contextmanager
def own_broker(namespace: str, **properties: str) -> Iterator[tuple[LocalKafka, Stage]]:
    """With a broker that may be harmed."""
    given = {name.replace("_", "."): value for name, value in properties.items()}
    with (
        LocalKafka(properties=given, **FROM_ENVIRONMENT) as kafka,
        make_service(kafka.bootstrap_servers, namespace) as service,
    ):
        yield kafka, Stage(service)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What brokers do not know is looked for for two seconds, not a minute (R18)."""
    monkeypatch.setattr(settlement, "Patience", lambda: Patience(2.0))


def places(messages: list[Message]) -> set[tuple[int, int]]:
    return {(one.message_id.partition, one.message_id.offset) for one in messages}


@pytest.mark.slow
def test_verdicts_of_several_threads_take_a_hold_apart(stage: Stage) -> None:
    """In any order, each of another kind: every message has its own, and the rest comes back."""
    held = stage.hold(400)
    random.Random(7).shuffle(held)
    kinds: list[tuple[list[Message], Callable[[Message], None]]] = [
        (held[:100], lambda message: message.ack()),
        (held[100:200], lambda message: message.nack(delay=4.0, reason="later")),
        (held[200:240], lambda message: message.reject("bad")),
        (held[240:300], lambda message: message.extend(6.0)),
    ]
    acked, nacked, rejected, extended = (messages for messages, _ in kinds)
    threads = [
        threading.Thread(target=lambda ms=messages[n::2], do=do: [do(one) for one in ms])
        for messages, do in kinds
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stage.worker.flush()
    die(stage.worker)
    with tracked(stage.service.config):
        stage.settle(400 - len(acked) - len(rejected))
        assert stage.copies() == Counter(places(held) - places(acked) - places(rejected))
        assert stage.letters() == {(b"rejected", b"a"): len(rejected)}
        written = Counter(one.outcome for one in stage.records() if one.type is MarkerType.END)
        assert written[Outcome.REDELIVERED] < 100  # for 260 messages
    stage.judge()
    said = markers(stage.service.config)
    since = {
        one.marker.message_id: one.timestamp_ms
        for one in said
        if one.marker.type is MarkerType.KEEPALIVE or one.marker.outcome is Outcome.NACK
    }
    back = {
        one.marker.message_id: one.timestamp_ms
        for one in said
        if one.marker.outcome is Outcome.REDELIVERED
    }
    for messages, least_ms in ((nacked, 4000), (extended, 6000)):
        for one in messages:
            assert back[one.message_id] - since[one.message_id] > least_ms


@pytest.mark.faults
def test_marker_partitions_that_are_added_below_holds(
    bootstrap: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R7, R26: KEEPALIVEs and ENDs follow their START; what is STARTed later uses the new ones."""
    monkeypatch.setattr("kafkamq.markers.ack_writer.IDENTITY_AGE_S", 1.0)
    soon = {"topic_metadata_refresh_interval_ms": "500"}
    with make_service(bootstrap, namespace, **soon) as service, tracked(service.config) as tracker:
        stage = Stage(service)
        held = stage.hold(300)
        topic = service.config.marker_topic
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_partitions([NewPartitions(topic, 5)])[topic].result(within(30))
        wait_until(lambda: 4 in tracker.partitions and tracker.is_live)
        more = stage.hold(50)
        while max(record.partition for record in markers(service.config)) < 2:
            more += stage.hold(50)
        for message in [*held[::3], *more[::3]]:
            message.ack()
        for message in [*held[1::3], *more[1::3]]:
            message.nack(delay=0.0)
        stage.worker.flush()
        deadline = min(message.deadline for message in more[2::3])
        wait_until(lambda: time.time() > deadline)  # it was renewed meanwhile
        die(stage.worker)
        stage.settle(len(held[1::3]) + len(held[2::3]) + len(more[1::3]) + len(more[2::3]))
    stage.judge()
    known = {}
    for record in markers(service.config):
        if record.marker.type is MarkerType.START:
            known[record.marker.message_id] = record.partition
        elif record.marker.message_id is not None:
            assert known[record.marker.message_id] == record.partition
    assert len(set(known.values())) > 2


@pytest.mark.faults
@pytest.mark.usefixtures("impatient")
def test_records_that_are_deleted_below_holds(stage: Stage) -> None:
    held = stage.hold(300)
    gone = {place for place in places(held) if place[0] == 0 and place[1] < 100}
    assert gone
    die(stage.worker)
    delete_before(stage.service, 0, 100)
    with tracked(stage.service.config):
        wait_until(lambda: stage.letters().total() == len(gone))
        stage.settle(300 - len(gone))
    assert stage.letters() == {(b"payload-lost", b"a"): len(gone)}
    assert stage.copies() == Counter(places(held) - gone)
    stage.judge()


def delete_before(service: Service, partition: int, offset: int) -> None:
    admin = AdminClient({"bootstrap.servers": service.config.bootstrap_servers})
    place = TopicPartition(service.config.message_topic, partition, offset)
    admin.delete_records([place])[place].result(within(30))


@pytest.mark.faults
@pytest.mark.usefixtures("impatient")
def test_retention_below_holds(namespace: str) -> None:
    """Retention beneath what STARTs rely on makes dead letters, which name the queue."""
    often = {"log_retention_check_interval_ms": "500", "log_initial_task_delay_ms": "100"}
    with own_broker(namespace, **often) as (kafka, stage), tracked(stage.service.config):
        held = stage.hold(300)
        topic, servers = stage.service.config.message_topic, kafka.bootstrap_servers
        set_topic(servers, topic, "segment.ms", "1000")
        set_topic(servers, topic, "retention.ms", "1000")
        time.sleep(1.1)  # of the segment
        stage.send(40)  # a new segment in each partition
        more = receive_all(stage.worker, 40)
        wait_until(lambda: not set(places(held)) & there(stage))
        die(stage.worker)
        set_topic(servers, topic, "retention.ms", "604800000")
        wait_until(lambda: stage.letters().total() + stage.copies().total() >= 340)
        left = {place for place in places(more) if stage.copies()[place]}
        stage.settle(len(left))
        assert stage.letters() == {(b"payload-lost", b"a"): 340 - len(left)}
        assert stage.ends(Outcome.DEAD_LETTERED) == Counter(
            one.message_id
            for one in [*held, *more]
            if (one.message_id.partition, one.message_id.offset) not in left
        )


def send_again(service: Service) -> None:
    """By a client that does not know what was there."""
    config = service.config
    with Service(config.bootstrap_servers, config.namespace) as other:
        producer = other.queue("a").producer()
        for delivery in [producer.send(b"new") for _ in range(600)]:
            delivery.result(within(30))


def there(stage: Stage) -> set[tuple[int, int]]:
    """Where records are in the messages topic."""
    config = stage.service.config
    read = read_topic(config.bootstrap_servers, config.message_topic)
    return {(record.partition() or 0, record.offset() or 0) for record in read}


@pytest.mark.faults
@pytest.mark.usefixtures("impatient")
def test_a_topic_that_is_created_again_below_holds(bootstrap: str, namespace: str) -> None:
    """R13: what has their places now is not taken for them."""
    with (
        make_service(bootstrap, namespace, partitions=1) as service,
        tracked(service.config) as tracker,
    ):
        stage = Stage(service)
        held = stage.hold(300)
        stage.worker.flush()
        die(stage.worker)
        recreate(bootstrap, service.config.message_topic)
        send_again(service)
        wait_until(lambda: stage.letters().total() == 300, timeout_s=120.0)
        assert stage.letters() == {(b"payload-lost", b"a"): 300}
        assert stage.ends(Outcome.DEAD_LETTERED) == Counter(one.message_id for one in held)
        assert not stage.copies()
        wait_until(lambda: not sum(one.entries for one in tracker.statuses()))


@pytest.mark.faults
@pytest.mark.usefixtures("impatient")
def test_a_log_that_is_cut_below_holds(namespace: str) -> None:
    """Its end is lost with a disk: what is written there later is another message (R13)."""
    with own_broker(namespace) as (kafka, stage):
        held = [*stage.hold(100), *stage.hold(100), *stage.hold(100)]  # of several writes
        stage.worker.flush()
        die(stage.worker)
        before = there(stage)
        kafka.kill()
        cut_logs(kafka.data_dir / "data", stage.service.config.message_topic)
        kafka.start()
        gone = before - there(stage)
        assert 0 < len(gone) < 300  # the broker keeps whole writes
        send_again(stage.service)
        assert gone <= there(stage)  # others are there now
        with tracked(stage.service.config):
            lost = places(held) & gone
            wait_until(lambda: stage.letters().total() + stage.copies().total() >= 300)
            assert stage.letters() == {(b"payload-lost", b"a"): len(lost)}
            assert stage.copies() == Counter(places(held) - gone)


def cut_logs(data: Path, topic: str) -> None:
    """Take the second half of each log of a topic, and what only a clean stop writes."""
    for folder in data.glob(f"{topic}-[0-9]*"):
        for log in folder.glob("*.log"):
            os.truncate(log, log.stat().st_size // 2)
        for index in [*folder.glob("*.index"), *folder.glob("*.timeindex")]:
            index.unlink()


_WORKER = """
import os, signal, sys
from kafkamq import Service

with Service(sys.argv[1], sys.argv[2], kafka={"session.timeout.ms": "6000"}) as service:
    # Nothing is STARTed ahead of the 60 that it holds when it is killed.
    consumer = service.queue("a", redelivery_timeout=2.0, max_in_flight=60).consumer()
    for round_ in range(3):
        held = []
        while len(held) < 60:
            held += consumer.receive_many(60 - len(held), 1.0)
        if round_ < 2:
            for message in held:
                message.ack()
            consumer.flush()
            print(*(message.id for message in held), flush=True)
        else:
            sys.setswitchinterval(60)  # nobody writes what is gathered
            for message in held[:40]:
                message.ack()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.faults
def test_workers_that_are_killed_before_they_write_what_they_gathered(stage: Stage) -> None:
    """R30: these verdicts are repeated, and none that was confirmed."""
    config = stage.service.config
    die(stage.worker)
    stage.send(1000)
    confirmed: set[str] = set()
    with tracked(config):
        for _ in range(3):
            done = subprocess.run(
                [sys.executable, "-c", _WORKER, config.bootstrap_servers, config.namespace],
                stdout=subprocess.PIPE, text=True, timeout=within(120), check=False,
            )  # fmt: skip
            assert done.returncode == -signal.SIGKILL
            confirmed |= set(done.stdout.split())
        again: Counter[str] = Counter()
        with stage.service.queue("a", redelivery_timeout=30.0).consumer() as other:
            while stage.ends(Outcome.ACK).total() < 1001:
                for message in other.receive_many(200, 0.5):
                    assert message.id not in confirmed
                    again[message.id] += message.delivery_count > 1
                    message.ack()
    verdict = stage.judge()
    assert 3 * 40 <= sum(again.values()) <= verdict.redelivered <= 3 * 60
    assert verdict.processed_twice == 0
