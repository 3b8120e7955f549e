"""The one producer outside of transactions, on a cluster in memory."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.worker_parts import FixedNamespace, fail_for_good
from tests.waiting import wait_until, within

from kafkamq import aio
from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DeadlineExceededError, StateError
from kafkamq.transport import producer as module
from kafkamq.transport.clients import open_producer
from kafkamq.transport.errors import KafkaError, Meaning, has_ended, is_retriable, meaning
from kafkamq.transport.memory.cluster import MemoryKafka, cluster_of, forget_cluster
from kafkamq.transport.producer import IdempotentProducer, ThreadedProducer
from kafkamq.transport.settings import producer_settings

EPOCH = KafkaError.INVALID_PRODUCER_EPOCH


class Kafka:
    """A cluster in memory, and the clients that were opened for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name = uuid.uuid4().hex
        self.config = ServiceConfig(bootstrap_servers=f"memory://{self.name}")
        self.cluster: MemoryKafka = cluster_of(self.config.bootstrap_servers)
        self.cluster.create_topic("t", 2)
        self.clients: list[Any] = []
        self.told: list[KafkaError | None] = []
        monkeypatch.setattr(module, "open_producer", self._open)

    def _open(self, settings: Mapping[str, object], *known: Any) -> Any:
        self.clients.append(open_producer(settings, *known))
        return self.clients[-1]

    def producer(self, max_block_s: float = 0.0, **settings: Any) -> IdempotentProducer:
        return IdempotentProducer(
            self.config, producer_settings(self.config, **settings), max_block_s=max_block_s
        )

    def report(self, error: KafkaError | None, _: object) -> None:
        self.told.append(error)

    def write(self, producer: IdempotentProducer, value: bytes = b"v", partition: int = 0) -> None:
        producer.produce("t", value, b"k", partition, (("h", b"1"),), self.report)


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kafka]:
    made = Kafka(monkeypatch)
    yield made
    forget_cluster(made.name)


def test_a_record_is_confirmed_by_its_own_report(kafka: Kafka) -> None:
    producer = kafka.producer()
    kafka.write(producer)
    producer.confirm(lambda: bool(kafka.told), "writing", 10.0)
    assert (kafka.told, producer.queued, len(producer)) == ([None], 1, 0)
    producer.close()


def test_what_is_known_is_not_waited_for_with_other_records(kafka: Kafka) -> None:
    producer = kafka.producer(message_timeout_ms=60_000)
    kafka.write(producer)
    producer.confirm(lambda: bool(kafka.told), "writing", 10.0)
    kafka.cluster.faults.is_down = True
    kafka.write(producer)  # under way for a minute
    kafka.clients[0].flush = pytest.fail  # which would wait for it
    assert producer.wait_for(lambda: bool(kafka.told), 60.0)
    assert len(producer) == 1
    del kafka.clients[0].flush
    producer.close()


def test_a_full_queue_is_an_error_or_a_wait_as_was_asked(kafka: Kafka) -> None:
    kafka.cluster.faults.is_down = True
    settings = {"queue_buffering_max_messages": 2, "message_timeout_ms": 60_000}
    producer, patient = kafka.producer(**settings), kafka.producer(0.3, **settings)
    for each in (producer, patient):
        for _ in range(2):
            kafka.write(each)
    with pytest.raises(BrokerError) as refused:
        kafka.write(producer)
    assert (meaning(refused.value), is_retriable(refused.value)) == (Meaning.QUEUE_FULL, True)
    with pytest.raises(DeadlineExceededError, match="the queue is full"):
        kafka.write(patient)
    threading.Timer(0.1, lambda: setattr(kafka.cluster.faults, "is_down", False)).start()
    kafka.write(patient)  # it serves reports while it waits
    assert patient.queued == 3
    for each in (producer, patient):
        each.close()


def test_a_fatal_error_ends_the_client_alone(kafka: Kafka) -> None:
    """What it held is reported at once, and by ``failed`` with its error; the next one writes."""
    kafka.cluster.faults.is_down = True
    producer = kafka.producer(message_timeout_ms=60_000)
    causes: list[KafkaError] = []

    def report(error: KafkaError | None, _: object) -> None:
        assert error is not None
        causes.append(producer.failed(error))

    producer.produce("t", b"v", None, 0, None, report)
    kafka.clients[0].fail(EPOCH, "out of order")
    producer.serve(1.0)
    assert len(kafka.clients) == 2
    assert [has_ended(each) for each in causes] == [True]
    kafka.cluster.faults.is_down = False
    kafka.write(producer)
    producer.confirm(lambda: bool(kafka.told), "writing", 10.0)
    assert kafka.told == [None]
    producer.close()


def test_a_client_that_failed_for_want_of_a_right_is_told_once(kafka: Kafka) -> None:
    """Where nobody waits for a record, as where claims are written."""
    producer = kafka.producer()
    kafka.clients[0].fail(KafkaError.CLUSTER_AUTHORIZATION_FAILED)
    with pytest.raises(BrokerError) as refused:
        producer.serve(1.0)
    assert meaning(refused.value) is Meaning.FORBIDDEN
    producer.serve(0.0)
    kafka.write(producer)
    producer.flush(within(5.0))
    assert kafka.told == [None]
    producer.close()


def test_who_waits_for_reports_hears_of_the_fatal_error(kafka: Kafka) -> None:
    kafka.cluster.faults.is_down = True
    producer = kafka.producer(message_timeout_ms=60_000)
    kafka.write(producer)
    kafka.clients[0].fail(EPOCH)
    with pytest.raises(BrokerError):
        producer.flush(within(5.0))
    assert len(kafka.told) == 1
    producer.flush(within(5.0))  # of the new one
    producer.close()


def test_a_record_for_a_spent_client_waits_for_the_next_one(kafka: Kafka) -> None:
    producer, patient = kafka.producer(), kafka.producer(10.0)
    for client in kafka.clients:
        client.fail(EPOCH)
    with pytest.raises(BrokerError) as refused:
        kafka.write(producer)
    assert refused.value.is_fatal
    producer.serve(0.0)
    kafka.write(producer)
    kafka.write(patient)
    for each in (producer, patient):
        each.flush(within(5.0))
        each.close()
    assert kafka.told == [None, None]


def test_a_new_partition_is_asked_for(kafka: Kafka) -> None:
    producer = kafka.producer()
    kafka.write(producer)
    producer.flush(within(5.0))
    with pytest.raises(BrokerError) as refused:
        kafka.write(producer, partition=2)
    assert meaning(refused.value) is Meaning.NO_PARTITION
    kafka.cluster.add_partitions("t", 3)
    kafka.write(producer, partition=2)
    producer.flush(within(5.0))
    assert kafka.told == [None, None]
    producer.close()


def test_each_record_has_its_report_where_the_thread_that_closes_stands_still(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = SimpleNamespace(monotonic=itertools.count(0.0).__next__)  # between two looks
    monkeypatch.setattr(module, "time", seconds)
    producer = kafka.producer()
    kafka.cluster.faults.is_down = True
    for _ in range(3):
        kafka.write(producer)
    producer.close()
    assert len(kafka.told) == 3


def test_a_closed_one_says_so(kafka: Kafka) -> None:
    """Whichever thread asks, and whenever: never what librdkafka says of a closed client."""
    producer = kafka.producer()
    kafka.cluster.faults.is_down = True
    kafka.write(producer)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                kafka.write(producer)
                producer.serve(0.0)
        except BaseException as error:  # noqa: BLE001 - told below
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    producer.close(0.05)
    producer.close()
    for thread in threads:
        thread.join(within(30))
    assert {type(each) for each in failures} == {StateError}
    assert len(kafka.told) == producer.queued  # each has its report
    with pytest.raises(StateError, match="closed"):
        producer.produce_many("t", 0, [{"value": b"v", "key": b"k", "callback": kafka.report}])


def test_a_report_may_wait_for_a_lock_that_is_held_while_producing(kafka: Kafka) -> None:
    """Claims have such a lock: no thread waits for the other, also when the client has ended."""
    producer, lock = kafka.producer(), threading.RLock()
    kafka.cluster.faults.is_down = True
    is_held = threading.Event()

    def report(*_: object) -> None:
        is_held.wait(within(10))
        with lock:
            kafka.told.append(None)

    producer.produce("t", b"v", None, 0, None, report)
    kafka.clients[0].fail(EPOCH)
    serves = threading.Thread(target=producer.serve, args=(5.0,), daemon=True)
    with lock:
        serves.start()
        is_held.set()
        for _ in range(100):
            try:
                producer.produce("t", b"v", None, 0, None, report)
            except BrokerError as error:  # noqa: PERF203
                assert error.is_fatal  # noqa: PT017 - until it is replaced
    serves.join(within(10))
    assert not serves.is_alive()
    assert kafka.told
    producer.close()


def test_a_forked_child_has_none(kafka: Kafka) -> None:
    producer = kafka.producer()
    child = os.fork()
    if not child:
        try:
            kafka.write(producer)
        except StateError:
            producer.close()  # and leaves the parent's alone
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    kafka.write(producer)
    producer.flush(within(5.0))
    assert kafka.told == [None]
    producer.close()


def test_a_thread_serves_and_goes_on_when_a_report_fails(kafka: Kafka) -> None:
    started: list[str] = []
    producer = ThreadedProducer(
        kafka.config,
        producer_settings(kafka.config),
        name="serves",
        max_block_s=10.0,
        on_start=lambda: started.append(threading.current_thread().name),
    )

    def broken(*_: object) -> None:
        producer.reported += 1
        raise ValueError("a callback's fault")

    def report(error: KafkaError | None, _: object) -> None:
        kafka.told.append(error)
        producer.reported += 1

    producer.produce("t", b"v", None, 0, None, broken)
    producer.produce("t", b"v", None, 0, None, report)
    producer.flush(within(10.0))
    assert (started, kafka.told) == (["serves"], [None])
    kafka.cluster.faults.is_down = True
    producer.produce("t", b"v", None, 0, None, report)
    with pytest.raises(DeadlineExceededError, match="confirming 1"):
        producer.close(0.1)
    assert len(kafka.told) == 2  # given up, and told so
    with pytest.raises(StateError):
        producer.produce("t", b"v", None, 0, None, report)


def test_a_thread_that_cannot_serve_tries_again_a_few_times_a_second(kafka: Kafka) -> None:
    """It spun, and filled the log, where ``poll`` itself raised."""
    other = kafka.producer()
    settings = producer_settings(kafka.config)
    producer = ThreadedProducer(kafka.config, settings, name="serves", max_block_s=10.0)
    client, polls = kafka.clients[1], []

    def poll(timeout: float) -> int:
        polls.append(timeout)
        raise RuntimeError("out of memory")

    client.poll = poll
    producer.produce("t", b"v", None, 0, None, kafka.report)
    wait_until(lambda: bool(polls), what="the first turn")
    for number in range(2000):  # meanwhile
        kafka.write(other)
        other.confirm(lambda count=number: len(kafka.told) > count, "writing", 10.0)
    assert len(polls) < 20
    del client.poll
    wait_until(lambda: len(kafka.told) == 2001, what="the report")
    producer.reported += 1
    producer.close(within(10.0))
    other.close()


def test_an_argument_of_another_type_is_not_waited_for(kafka: Kafka) -> None:
    producer = ThreadedProducer(kafka.config, producer_settings(kafka.config), name="serves")
    with pytest.raises((TypeError, AttributeError)):
        producer.produce("t", 5, None, 0, None, kafka.report)  # type: ignore[arg-type]
    producer.flush(1.0)
    producer.close(1.0)


def test_what_is_held_when_the_client_fails_in_the_last_flush_is_reported(kafka: Kafka) -> None:
    producer = kafka.producer()
    kafka.cluster.faults.is_down = True
    for _ in range(3):
        kafka.write(producer)
    kafka.clients[-1].fail(EPOCH)
    producer.close(5.0)
    assert len(kafka.told) == 3
    assert all(error is not None for error in kafka.told)


def test_a_report_that_raises_keeps_no_other_one_from_the_end_of_a_client(kafka: Kafka) -> None:
    producer = kafka.producer()
    kafka.cluster.faults.is_down = True

    def broken(*_: object) -> None:
        raise ValueError("a callback's fault")

    producer.produce("t", b"v", None, 0, None, broken)
    for _ in range(3):
        kafka.write(producer)
    producer.close()
    assert len(kafka.told) == 3


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_report_behind_a_fatal_error_may_call_what_it_likes(is_closed: bool) -> None:
    """librdkafka's client: it may serve reports while the error is raised already."""
    config = FixedNamespace().config
    told: list[object] = []
    changed = threading.Condition()

    def report(error: KafkaError | None, _: object) -> None:
        with changed:
            told.append(error)

    producer = IdempotentProducer(config, producer_settings(config, **{"message.timeout.ms": 300}))
    for _ in range(5):
        producer.produce("t", b"v", None, -1, None, report)
    time.sleep(0.2)
    fail_for_good(producer)
    if is_closed:
        producer.close(1.0)
    else:
        with suppress(BrokerError):
            producer.flush(2.0)
    assert len(told) == 5
    producer.close()


def test_an_event_loop_is_not_held_up_while_reports_are_served(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread that sends without a pause gives the one that serves them a turn."""
    slept: list[int] = []

    def sleep(seconds: float) -> None:
        slept.append(threading.get_ident())
        time.sleep(seconds)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    settings = producer_settings(kafka.config)
    producer = ThreadedProducer(kafka.config, settings, name="serves", max_block_s=10.0)

    def report(error: KafkaError | None, _: object) -> None:
        producer.reported += 1

    def send() -> bool:
        for _ in range(1000):
            producer.produce("t", b"v", None, 0, None, report)
        return threading.get_ident() in slept

    async def send_on_a_loop() -> bool:
        return send()

    assert not asyncio.run(send_on_a_loop())
    assert send()
    producer.close(within(10.0))


def test_a_send_on_an_event_loop_that_is_cancelled_has_sent_nothing() -> None:
    """Its caller has no delivery to ask, and sends it again."""

    async def cancelled_and_received() -> tuple[int, set[bytes | None]]:
        async with aio.Service(f"memory://{uuid.uuid4().hex}") as service:
            await service.create_topics(partitions=1, marker_partitions=1)
            queue, cancelled = service.queue("q"), 0
            async with queue.producer() as producer:
                for number in range(1010):
                    task = asyncio.ensure_future(producer.send(b"%d" % number))
                    await asyncio.sleep(0)
                    cancelled += task.cancel()
                    await asyncio.wait([task])
            received: set[bytes | None] = set()
            async with queue.consumer() as consumer:
                while messages := await consumer.receive_many(
                    500, within(30) if len(received) < 1010 - cancelled else 0
                ):
                    received |= {each.payload for each in messages}
                    for each in messages:
                        await each.ack()
        return cancelled, received

    cancelled, received = asyncio.run(cancelled_and_received())
    assert (cancelled, len(received)) == (2, 1008)
