"""``exactly_once=True``: STARTs and offsets are one transaction, and a zombie cannot commit it."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import TopicPartition
from tests.integration.exact_logs import second_starts
from tests.integration.queue_logs import (
    make_service,
    markers,
    read_topic,
    receive_all,
    starts,
    tracked,
)
from tests.waiting import deadline_after, wait_until, within

from kafkamq.dev import LocalKafka, cache_dir_from, java_from
from kafkamq.errors import BrokerError, DeadlineExceededError, LeaseLostError
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.message import Message
from kafkamq.queue.service import Service
from kafkamq.transport.transactions import TransactionalProducer
from kafkamq.types import MarkerType, MessageId, Outcome

WORKER = Path(__file__).with_name("exact_worker.py")


def send(service: Service, count: int) -> set[str]:
    producer = service.queue("a").producer()
    deliveries = [producer.send(b"%d" % number) for number in range(count)]
    return {delivery.result(within(30)).id for delivery in deliveries}


def exact(service: Service, *, timeout_s: float = 10.0, **options: int) -> Consumer:
    return service.queue("a", redelivery_timeout=timeout_s, exactly_once=True, **options).consumer()


def test_messages_are_handed_out_once_and_acked(bootstrap: str, namespace: str) -> None:
    with make_service(bootstrap, namespace) as service:
        sent = send(service, 300)
        with exact(service) as consumer:
            messages = receive_all(consumer, 300)
            assert {message.id for message in messages} == sent
            for message in messages:
                message.ack()
            consumer.flush()
        assert len(starts(service.config)) == 300
        with exact(service) as again:  # the offsets were committed with the STARTs
            assert again.receive(1.0) is None
        assert not second_starts(markers(service.config))


def test_what_was_never_handed_out_is_released(bootstrap: str, namespace: str) -> None:
    with make_service(bootstrap, namespace) as service, tracked(service.config):
        send(service, 20)
        with exact(service) as consumer:
            assert consumer.receive(within(30)) is not None  # the others are STARTed ahead
        with exact(service) as other:
            # No lease of 10 s is waited for: the tracker copies what was released at once.
            for message in receive_all(other, 19):
                assert message.delivery_count == 1
                message.ack()


def test_a_batch_of_a_former_member_is_as_if_it_had_never_been(
    bootstrap: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A zombie: when its transaction is about to commit, the group has gone on without it."""
    caplog.set_level(logging.INFO, "kafkamq.markers")
    with make_service(bootstrap, namespace) as service:
        sent = send(service, 40)
        with exact(service) as zombie, ExitStack() as opened:
            wait_until(lambda: _partitions(zombie) == 2)
            group = zombie.intake.reader.group
            before = group.membership()
            heir = opened.enter_context(exact(service))
            wait_until(lambda: (_partitions(zombie), _partitions(heir)) == (1, 1))
            now = group.membership
            group.membership = lambda: before
            deadline_s = deadline_after(60)
            while "a transaction of STARTs is made again" not in caplog.messages:
                assert time.monotonic() < deadline_s
                assert zombie.receive(0.2) is None
            group.membership = now  # it has heard of the new generation
            seen = {message.id: message for message in _everything((zombie, heir), 40)}
            assert set(seen) == sent
        assert not second_starts(markers(service.config))


class _SlowCommits:
    """A consumer whose commits outside of transactions take a second on their way."""

    def __init__(self, consumer: KafkaConsumer) -> None:
        self._consumer = consumer
        self.begun = 0
        self.landed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> None:
        assert asynchronous
        self.begun += 1
        threading.Timer(1.0, self._land, (offsets,)).start()

    def _land(self, offsets: list[TopicPartition]) -> None:
        self._consumer.commit(offsets=offsets, asynchronous=True)
        self.landed += 1


def test_a_commit_of_skipped_messages_never_lands_behind_a_transaction(
    bootstrap: str, namespace: str
) -> None:
    """Nothing orders two connections: the group would stand before what was STARTed, and acked."""
    with make_service(bootstrap, namespace, partitions=1) as service:
        send(service, 1)
        with exact(service) as consumer:
            receive_all(consumer, 1)[0].ack(wait=True)
            group = consumer.intake.reader.group
            slow = group.client = _SlowCommits(group.client)
            service.queue("foreign").producer().send(b"x").result(within(30))
            while not slow.begun:
                assert consumer.receive(0.1) is None
            send(service, 3)
            for message in receive_all(consumer, 3):
                message.ack(wait=True)
            wait_until(lambda: consumer.receive(0.1) is None and slow.landed == slow.begun)
        with exact(service) as again:
            assert again.receive(1.0) is None
        assert not second_starts(markers(service.config))


def test_a_transaction_that_takes_long_decides_first(
    bootstrap: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asked the group before that would START its messages again. Polling goes on meanwhile."""
    may_write, write = threading.Event(), TransactionalProducer.produce_many

    def slowly(*args: Any, **named: Any) -> None:
        assert may_write.wait(within(60))
        write(*args, **named)

    monkeypatch.setattr(TransactionalProducer, "produce_many", slowly)
    with make_service(bootstrap, namespace, partitions=1) as service:
        send(service, 5)
        with exact(service) as consumer:
            wait_until(lambda: consumer.receive(0.1) or consumer.intake.pipeline.is_open)
            reader = consumer.intake.reader
            polls, poll = [], reader.poll
            monkeypatch.setattr(reader, "poll", lambda *of: polls.append(of) or poll(*of))
            assert consumer.receive(1.0) is None  # nobody knows yet what is committed
            assert polls
            may_write.set()
            for message in receive_all(consumer, 5):
                message.ack()
        assert not second_starts(markers(service.config))


def test_a_transaction_is_bounded_in_bytes(
    bootstrap: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafkamq.markers.starts.MAX_TRANSACTION_BYTES", 10_000)
    with make_service(bootstrap, namespace, partitions=1) as service:
        producer = service.queue("a").producer()
        for size in (4000, 4000, 4000, 20_000, 20_000, 1):
            producer.send(b"x" * size)
        producer.flush(within(30))
        with exact(service, batch_markers=False) as consumer:  # whose STARTs carry payloads
            found: list[list[int]] = []
            while sum(map(len, found)) < 6:
                messages = consumer.receive_many(6, within(30))
                found.append([len(message.payload or b"") for message in messages])
                for message in messages:
                    message.ack()
        assert found == [[4000, 4000], [4000], [20_000], [20_000], [1]]


def _partitions(consumer: Any) -> int:
    """How many it has."""
    return len(consumer.intake.reader.group.places)


def _everything(consumers: Sequence[Consumer], count: int) -> list[Message]:
    messages: list[Message] = []
    deadline_s = deadline_after(60)
    while len({message.id for message in messages}) < count:
        assert time.monotonic() < deadline_s, f"{len(messages)} came"
        for consumer in consumers:
            for message in consumer.receive_many(50, 0.1):
                message.ack()
                messages.append(message)
    return messages


def _place(identity: MessageId | None) -> tuple[int, int]:
    assert identity is not None
    return identity.partition, identity.offset


@pytest.mark.faults
@pytest.mark.slow
def test_killed_workers_start_nothing_twice(bootstrap: str, namespace: str, tmp_path: Path) -> None:
    """Kills and rebalances under load; the log has at most one START of each message."""
    _kill_workers(bootstrap, namespace, tmp_path, total=1500, kills=2, seed=1)


@pytest.mark.faults
def test_twenty_kills_start_nothing_twice(bootstrap: str, namespace: str, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)  # noqa: T201 - printed when it fails
    _kill_workers(bootstrap, namespace, tmp_path, total=20_000, kills=20, seed=seed)


class _Worker:
    """A process that works, and how many messages it holds, or held when it was killed."""

    def __init__(self, service: Service, folder: Path) -> None:
        config, file = service.config, folder / uuid.uuid4().hex
        self._file = file
        self._process = subprocess.Popen(
            [
                *(sys.executable, str(WORKER), config.bootstrap_servers, config.namespace),
                *("a", "2.0", str(file)),
            ]
        )

    def in_hand(self) -> int:
        return int(self._file.read_text() or 0) if self._file.exists() else 0

    def kill(self) -> None:
        self._process.kill()  # SIGKILL, as likely as not inside a transaction
        self._process.wait()


def _kill_workers(
    bootstrap: str, namespace: str, folder: Path, *, total: int, kills: int, seed: int
) -> None:
    """Kill so many workers that hold messages, some at once; others take their places."""
    chance = random.Random(seed)
    with make_service(bootstrap, namespace, partitions=4) as service, tracked(service.config):
        workers = [_Worker(service, folder) for _ in range(3)]
        try:
            producer = service.queue("a").producer()
            deliveries = []
            felt = 0
            while felt < kills:
                wanted = min(chance.randint(2, 3), kills - felt)
                load = range(len(deliveries), len(deliveries) + wanted * total // kills)
                deliveries += [producer.send(b"%d" % number) for number in load]
                wait_until(lambda: any(worker.in_hand() for worker in workers))
                time.sleep(0.5 * chance.random())
                for victim in [worker for worker in workers if worker.in_hand()][:wanted]:
                    victim.kill()
                    felt += victim.in_hand() > 0
                    workers[workers.index(victim)] = _Worker(service, folder)
            sent = {delivery.result(within(30)).id for delivery in deliveries}
            wait_until(lambda: _acked(service) >= sent, timeout_s=150)
        finally:
            for worker in workers:
                worker.kill()
        records = markers(service.config)
    assert len([r for r in records if r.marker.type is MarkerType.START]) >= total
    assert second_starts(records) == []


def _acked(service: Service) -> set[str]:
    """Ids of messages of which some copy was acked, by the logs."""
    config = service.config
    places = {
        _place(record.marker.message_id)
        for record in markers(config)
        if record.marker.type is MarkerType.END and record.marker.outcome is Outcome.ACK
    }
    return {
        dict(record.headers() or [])["kafkamq-id"].decode()
        for record in read_topic(config.bootstrap_servers, config.message_topic)
        if (record.partition(), record.offset()) in places
    }


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["kill", "pause"])
def test_an_outage_under_a_worker_starts_nothing_twice(namespace: str, kind: str) -> None:
    """Requests of a transaction that never return, outcomes that nobody knows: all is settled."""
    with (
        LocalKafka(cache_dir=cache_dir_from(os.environ), java=java_from(os.environ)) as broker,
        make_service(broker.bootstrap_servers, namespace, partitions=4) as service,
        tracked(service.config),
    ):
        sent = send(service, 3000)
        seen: set[str] = set()
        with exact(service, timeout_s=5.0) as consumer:
            outage = threading.Thread(target=_interrupt, args=(broker, kind))
            deadline_s = deadline_after(150)
            while seen < sent:
                assert time.monotonic() < deadline_s, f"{len(sent - seen)} are missing"
                if len(seen) > 300 and outage.ident is None:
                    outage.start()
                try:
                    messages = consumer.receive_many(50, 1.0)
                except (BrokerError, DeadlineExceededError):
                    continue  # the outage
                for message in messages:
                    time.sleep(0.002)
                    with suppress(LeaseLostError):  # it comes back
                        message.ack()
                        seen.add(message.id)
            outage.join()
            with suppress(LeaseLostError):  # came late: R9
                consumer.flush()
        assert not second_starts(markers(service.config))


def _interrupt(broker: LocalKafka, kind: str) -> None:
    if kind == "kill":
        broker.kill()
        time.sleep(2)
        broker.start()
    else:
        broker.pause()
        time.sleep(12)  # longer than the transaction's timeout
        broker.resume()
