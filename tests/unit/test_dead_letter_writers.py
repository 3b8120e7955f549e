"""Dead letters that are refused for a while, and those that go elsewhere than to Kafka."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import KafkaError
from tests.waiting import wait_until, within

from kafkamq import (
    ConfigError,
    DeadlineExceededError,
    LeaseLostError,
    OutgoingDeadLetter,
    ParallelConsumer,
    Reject,
    Service,
)
from kafkamq.queue.sure_writer import SureWriter
from kafkamq.testing import MemoryService
from kafkamq.transport.clients import open_producer
from kafkamq.transport.memory.cluster import MemoryKafka, cluster_of, forget_cluster
from kafkamq.transport.memory.state import Fault

REFUSED = Fault(error=KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))


class Kafka:
    """A cluster in memory with a topic of work, and one of dead letters that may be refused."""

    def __init__(self) -> None:
        self.servers = f"memory://{uuid4().hex}"
        self.cluster: MemoryKafka = cluster_of(self.servers)
        for name in ("work", "dead"):
            self.cluster.create_topic(name, 1)
        self.asked = 0
        self.is_refusing = False
        self.cluster.faults.plan = self._plan

    def _plan(self, kind: str, _: object, place: Any) -> Fault | None:
        if kind == "produce" and place and place[0] == "dead":
            self.asked += 1
            return REFUSED if self.is_refusing else None
        return None

    def fill(self, count: int) -> None:
        producer = open_producer({"bootstrap.servers": self.servers})
        for number in range(count):
            producer.produce("work", b"%d" % number, b"k%d" % number)
        producer.flush(within(30))

    def letters(self) -> list[bytes | None]:
        log = self.cluster.topics["dead"].partitions[0]
        return [record.value for record in log.records]


@pytest.fixture
def kafka() -> Iterator[Kafka]:
    made = Kafka()
    yield made
    forget_cluster(made.servers)


class Shelf:
    """Keeps dead letters; refuses as often as told."""

    def __init__(self, refusals: int = 0) -> None:
        self.refusals = refusals
        self.letters: list[OutgoingDeadLetter] = []

    def write(self, letter: OutgoingDeadLetter) -> None:
        if self.refusals:
            self.refusals -= 1
            raise ConnectionError("nobody there")
        self.letters.append(letter)


def test_refused_dead_letters_are_written_when_they_are_taken_again(kafka: Kafka) -> None:
    """Until then one of them asks for all, and no handler is called again."""
    count, handled, told = 300, [], []

    def reject(record: Any) -> Reject:
        handled.append(record.offset)
        return Reject("poison")

    kafka.is_refusing = True
    kafka.fill(count)
    consumer = ParallelConsumer(
        "work",
        bootstrap_servers=kafka.servers,
        group_id="g",
        concurrency=4,
        dead_letter_topic="dead",
        on_dead_letter=lambda record, _: told.append(record.offset),
    )
    with consumer:
        consumer.poll(reject)
        wait_until(lambda: len(handled) == count, "all are rejected")
        assert kafka.asked < count / 3
        kafka.is_refusing = False
        wait_until(lambda: len(told) == count, "all are told")
        assert sorted(kafka.letters(), key=int) == [b"%d" % each for each in range(count)]
    assert sorted(handled) == sorted(told) == list(range(count))


def test_dead_letters_of_a_parallel_consumer_go_where_its_own_writer_puts_them(
    kafka: Kafka,
) -> None:
    shelf, told = Shelf(refusals=3), []
    kafka.fill(20)
    consumer = ParallelConsumer(
        "work",
        bootstrap_servers=kafka.servers,
        group_id="g",
        dead_letter_writer=shelf,
        on_dead_letter=lambda record, reason: told.append(reason),
    )
    with consumer:
        consumer.poll(lambda _: Reject("no good"))
        wait_until(lambda: len(told) == 20)
    assert (kafka.asked, set(told)) == (0, {"rejected"})
    letters = sorted(shelf.letters, key=lambda each: each.place.offset)
    assert [each.payload for each in letters] == [b"%d" % each for each in range(20)]
    first = letters[0]
    assert (first.key, first.queue_id, first.delivery_count) == (b"k0", "g", 1)
    assert (first.reason.value, first.error) == ("rejected", "no good")


def test_a_dead_letter_without_an_answer_does_not_keep_what_is_done_from_its_commit(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer leaves its group, too; before, the next member waited for its time-out."""

    end = SureWriter.close

    def no_answer(writer: SureWriter, _: float) -> None:
        end(writer, 0.0)
        raise DeadlineExceededError("no answer")

    def work(record: Any) -> Reject | None:
        handled.append(record.offset)
        return Reject("poison") if record.offset == 5 else None

    handled: list[int] = []
    kafka.fill(6)
    kafka.is_refusing = True
    monkeypatch.setattr(SureWriter, "close", no_answer)
    settings = {"bootstrap_servers": kafka.servers, "group_id": "g", "dead_letter_topic": "dead"}
    with ParallelConsumer("work", commit_interval=60.0, **settings) as first:
        first.poll(work)
        wait_until(lambda: len(handled) == 6)
    kafka.is_refusing = False
    with ParallelConsumer("work", **settings) as second:
        second.poll(work)
        wait_until(lambda: len(handled) > 6)
    assert handled == [0, 1, 2, 3, 4, 5, 5]


def test_a_queue_writes_no_dead_letter_of_a_partition_that_went(kafka: Kafka) -> None:
    """Who has it now decides on its messages: they would have two."""
    kafka.cluster.add_partitions("work", 2)
    producer = open_producer({"bootstrap.servers": kafka.servers})
    for number in range(2):
        producer.produce("work", b"%d" % number, None, number)
    producer.flush(within(30))
    kafka.is_refusing = True
    with Service(kafka.servers, "n", dead_letter_topic="dead") as service:
        queue = service.queue("q", backend="offsets", topic="work")
        with queue.consumer() as first, ExitStack() as later:
            rejected: list[Any] = []
            while len(rejected) < 2:
                rejected += first.receive_many(2, within(30))
            for message in rejected:
                message.reject("no good")
            wait_until(lambda: kafka.asked > 0, "they are refused")
            second = later.enter_context(queue.consumer())
            (again,) = second.receive_many(1, within(30))
            again.reject("no good")
            kafka.is_refusing = False
            second.flush(within(30))
            with pytest.raises(LeaseLostError, match="may be delivered again"):
                first.flush(within(30))
    assert sorted(map(bytes, kafka.letters())) == [b"0", b"1"]


def test_a_writer_that_has_not_written_when_it_returns_keeps_no_dead_letter() -> None:
    """Such as a function that hands back a coroutine: it is given the letter again."""

    class Later(Shelf):
        def write(self, letter: OutgoingDeadLetter) -> object:
            if self.refusals:
                self.refusals -= 1
                return iter(())
            return super().write(letter)

    shelf = Later(refusals=2)
    with MemoryService() as service:
        queue = service.queue("q", backend="claims", dead_letter_writer=shelf)
        queue.producer().send(b"x").result(within(30))
        with queue.consumer() as consumer:
            (message,) = consumer.receive_many(1, within(30))
            message.reject("no good")
            wait_until(lambda: shelf.letters)
            consumer.flush(within(30))
    assert [each.payload for each in shelf.letters] == [b"x"]


def test_what_cannot_write_dead_letters_is_refused() -> None:
    class Async:
        async def write(self, letter: OutgoingDeadLetter) -> None: ...

    class Yields:
        def write(self, letter: OutgoingDeadLetter) -> Iterator[None]:
            yield

    make = partial(ParallelConsumer, "t", bootstrap_servers="memory://none", group_id="g")
    queue = partial(MemoryService().queue, "q", backend="offsets")
    for writer, said in (
        (print, "give an object with write"),
        (Async(), "write is async"),
        (Yields(), "yields"),
    ):
        with pytest.raises(ConfigError, match=said):
            queue(dead_letter_writer=writer)
        with pytest.raises(ConfigError, match=said):
            make(dead_letter_writer=writer)
    with pytest.raises(ConfigError, match="give one of them"):
        make(dead_letter_topic="d", dead_letter_writer=Shelf())
