"""``delivery="at-most-once"``: committed before it is handed out; a real broker's log judges."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.queue_logs import die, make_service, markers, receive_all
from tests.waiting import wait_until, within

from kafkamq import Nack
from kafkamq.errors import ConfigError, StateError
from kafkamq.queue.message import Message
from kafkamq.queue.names import group_of
from kafkamq.queue.service import Service
from kafkamq.runtime.worker import Worker
from kafkamq.transport.commits import GroupOffsets

WORKER = Path(__file__).with_name("once_worker.py")
BATCH = 20
TOTAL = 3000
KILLS = 4


@pytest.fixture
def service(bootstrap: str, namespace: str) -> Iterator[Service]:
    with make_service(bootstrap, namespace, partitions=4) as service:
        yield service


def send(service: Service, count: int) -> None:
    producer = service.queue("a").producer()
    for delivery in [producer.send(b"%d" % number) for number in range(count)]:
        delivery.result(within(30))


def committed(service: Service) -> int:
    """Messages that the group has passed."""
    config = service.config
    offsets = GroupOffsets(config, group_of(config, "a"))
    try:
        found = offsets.committed([(config.message_topic, number) for number in range(4)])
    finally:
        offsets.close()
    return sum(offset for offset in found.values() if offset > 0)


def test_what_was_handed_out_is_committed_and_has_no_markers(service: Service) -> None:
    send(service, 100)
    queue = service.queue("a", delivery="at-most-once")
    first = queue.consumer()
    seen = [message.payload for message in receive_all(first, 7)]
    assert committed(service) == 7  # and no more: what is polled ahead is nobody's yet
    one = first.receive(within(30))
    assert one is not None
    assert committed(service) == 8
    seen.append(one.payload)
    die(first)  # nothing was acked
    with queue.consumer() as second:
        seen += [message.payload for message in receive_all(second, 92)]
    assert sorted(seen, key=lambda each: int(each or b"")) == [b"%d" % n for n in range(100)]
    assert committed(service) == 100
    assert not markers(service.config)


def test_behind_the_logs_end_it_goes_on_with_what_comes(service: Service) -> None:
    """What is in the log may have been handed out."""
    send(service, 20)
    config = service.config
    offsets = GroupOffsets(config, group_of(config, "a"))
    offsets.commit({(config.message_topic, number): 10_000 for number in range(4)})
    offsets.close()
    queue = service.queue("a", delivery="at-most-once", on_data_loss="skip")
    with queue.consumer() as consumer:
        assert consumer.receive(3.0) is None
        send(service, 2)
        assert {each.payload for each in receive_all(consumer, 2)} == {b"0", b"1"}


def test_a_verdict_on_it_changes_nothing(service: Service) -> None:
    send(service, 3)
    queue = service.queue("a", delivery="at-most-once")
    with queue.consumer() as consumer:
        acked, failed, other = receive_all(consumer, 3)
        acked.ack(wait=True)
        with pytest.raises(StateError, match="has a verdict already"):
            acked.ack()
        for refused in (other.nack, lambda: other.reject("no"), lambda: other.extend(60)):
            with pytest.raises(StateError, match="at-most-once"):
                refused()
        with pytest.raises(ZeroDivisionError), failed:
            raise ZeroDivisionError
        consumer.flush()
        assert consumer.in_flight == 0
        assert consumer.receive(1.0) is None
    assert not markers(service.config)


def test_an_expired_message_is_passed_over(service: Service) -> None:
    producer = service.queue("a").producer()
    producer.send(b"late", ttl=0.001).result(within(30))
    time.sleep(0.1)
    producer.send(b"in time", ttl=600).result(within(30))
    with service.queue("a", delivery="at-most-once").consumer() as consumer:
        assert [each.payload for each in receive_all(consumer, 1)] == [b"in time"]

        def are_both_passed() -> bool:
            assert consumer.receive(0.1) is None
            return committed(service) == 2

        wait_until(are_both_passed)  # they may be in two partitions
    assert committed(service) == 2


def test_a_worker_calls_its_handler_once(service: Service) -> None:
    send(service, 50)
    queue = service.queue("a", delivery="at-most-once")
    seen: Counter[bytes | None] = Counter()

    @queue.handler(concurrency=2)
    def handle(message: Message) -> object:
        seen[message.payload] += 1
        if int(message.payload or b"0") % 3 == 0:
            raise ValueError("it fails")
        return Nack() if int(message.payload or b"0") % 3 == 1 else None

    with Worker(service):
        wait_until(lambda: len(seen) == 50)
    assert set(seen.values()) == {1}
    assert not markers(service.config)


def test_who_does_not_have_it_refuses(service: Service) -> None:
    with pytest.raises(ConfigError, match="has no at-most-once delivery"):
        service.queue("b", backend="offsets", delivery="at-most-once")
    with pytest.raises(ConfigError, match="delivery"):
        service.queue("a", delivery="sometimes")
    with pytest.raises(ConfigError, match="exactly_once"):
        service.queue("a", delivery="at-most-once", exactly_once=True)


@pytest.mark.faults
def test_killed_workers_repeat_nothing(service: Service, tmp_path: Path) -> None:
    """What they wrote down judges: each message once at most, and a batch a kill is missing."""
    histories: list[Path] = []

    def start() -> subprocess.Popen[bytes]:
        histories.append(tmp_path / f"{len(histories)}")
        config = service.config
        facts = config.bootstrap_servers, config.namespace, "a", str(BATCH), str(histories[-1])
        return subprocess.Popen([sys.executable, str(WORKER), *facts])

    def seen() -> Counter[bytes]:
        return Counter(
            line for each in histories if each.exists() for line in each.read_bytes().split()
        )

    workers = [start() for _ in range(3)]
    rng = random.Random(TOTAL)
    try:
        send(service, TOTAL)
        for kill in range(KILLS):
            wait_until(
                lambda kill=kill: len(seen()) > TOTAL * kill // (KILLS + 2) + 1, timeout_s=120
            )
            victim = workers.pop(rng.randrange(len(workers)))
            victim.kill()  # SIGKILL
            victim.wait()
            workers.append(start())
        wait_until(lambda: committed(service) == TOTAL, timeout_s=150)
        wait_until(lambda: len(seen()) >= TOTAL - KILLS * BATCH)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert max(seen().values()) == 1
    assert not markers(service.config)
