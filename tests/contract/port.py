"""A cluster to try the port's contract on: in memory, or a real broker."""

from __future__ import annotations

import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]
from tests.sure_producer import write_records
from tests.waiting import deadline_after, wait_until, within

from kafkamq.config import ServiceConfig
from kafkamq.transport.admin import Admin
from kafkamq.transport.clients import Consumer, Producer, open_consumer, open_producer
from kafkamq.transport.follower import OnCommit
from kafkamq.transport.memory.cluster import MemoryKafka, cluster_of
from kafkamq.transport.settings import (
    consumer_settings,
    producer_settings,
    transactional_settings,
)

__all__ = [
    "KINDS",
    "Kafka",
    "Member",
    "Reports",
    "eventually",
    "opened",
    "parts",
    "poll_all",
    "refusal",
]

KINDS = ("memory", "broker")


class Reports(list[tuple["KafkaError | None", Message]]):
    """A delivery callback that keeps what it was told."""

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        self.append((error, message))

    @property
    def codes(self) -> list[str]:
        """The names of the errors; empty: delivered."""
        return ["" if error is None else error.name() for error, _ in self]


class Kafka:
    """Clients and topics of one test; all of them are closed at its end."""

    def __init__(self, servers: str, stack: ExitStack) -> None:
        self.config = ServiceConfig(bootstrap_servers=servers)
        self.is_memory = servers.startswith("memory://")
        self._stack = stack
        self.admin = stack.enter_context(Admin(self.config))

    @property
    def cluster(self) -> MemoryKafka:
        """The one in memory."""
        return cluster_of(self.config.bootstrap_servers)

    def topic(self, partitions: int = 1, name: str = "", **settings: str) -> str:
        """A new topic, known to the broker."""
        name = name or f"port-{uuid.uuid4().hex[:10]}"
        config = {key.replace("_", "."): value for key, value in settings.items()}
        new = NewTopic(name, partitions, 1, config=config)
        self.admin.wait(self.admin.client.create_topics([new])[name], "creating")
        wait_until(lambda: name in self.admin.topics([name]))
        return name

    def delete(self, topic: str) -> None:
        self.admin.wait(self.admin.client.delete_topics([topic])[topic], "deleting")
        wait_until(lambda: topic not in self.admin.topics([topic]))

    def add_partition(self, topic: str) -> None:
        """One more partition, of which clients hear in time."""
        count = self.admin.topics([topic])[topic].partitions
        if self.is_memory:
            self.cluster.add_partitions(topic, 1)
        else:
            from confluent_kafka.admin import NewPartitions  # type: ignore[attr-defined]

            client: Any = self.admin.client
            client.create_partitions([NewPartitions(topic, count + 1)])[topic].result(within(10))
        wait_until(lambda: self.admin.topics([topic])[topic].partitions > count)

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        if self.is_memory:
            self.cluster.delete_records(topic, partition, before)
            return
        client: Any = self.admin.client
        for future in client.delete_records([TopicPartition(topic, partition, before)]).values():
            future.result(within(10))

    def consumer(
        self, group: str = "kafkamq.reader", on_commit: OnCommit | None = None, **settings: object
    ) -> Consumer:
        """A consumer with our settings and these, ``_`` for ``.``."""
        told = {} if on_commit is None else {"on_commit": on_commit}
        ours = {"fetch.wait.max.ms": 20, **_dotted(settings)}
        made = open_consumer({**consumer_settings(self.config, group_id=group, **ours), **told})
        self._stack.callback(made.close)
        return made

    def producer(self, **settings: object) -> Producer:
        made = open_producer(producer_settings(self.config, **_dotted(settings)))
        self._stack.callback(_end, made)
        return made

    def transactional(self, transactional_id: str, **settings: object) -> Producer:
        """One whose ``init_transactions`` was called."""
        made = open_producer(
            transactional_settings(
                self.config, transactional_id=transactional_id, **_dotted(settings)
            )
        )
        self._stack.callback(_end, made)
        eventually(lambda: made.init_transactions(10.0))
        return made

    def fill(self, topic: str, count: int, partition: int = 0) -> None:
        """Records 0, 1, ... of one partition."""
        records = [(b"%d" % number, b"k", partition, ()) for number in range(count)]
        write_records(self.producer(), topic, records)


T = TypeVar("T")
_LOADING = ("COORDINATOR_LOAD_IN_PROGRESS", "COORDINATOR_NOT_AVAILABLE", "NOT_COORDINATOR")


def eventually(call: Callable[[], T]) -> T:
    """Again, while the coordinator of a group or transaction is not there yet."""
    until = deadline_after(20.0)
    while True:
        try:
            return call()
        except KafkaException as error:
            inner = error.args[0]
            passes = inner.retriable() or inner.name() in _LOADING
            if not passes or time.monotonic() > until:
                raise
        time.sleep(0.05)


def _dotted(settings: dict[str, object]) -> dict[str, object]:
    return {name.replace("_", "."): value for name, value in settings.items()}


def _end(producer: Producer) -> None:
    try:
        producer.purge()
        producer.flush(0.5)
        with warnings.catch_warnings():  # of a transaction that cannot be aborted any more
            warnings.simplefilter("ignore", RuntimeWarning)
            producer.close()
    except (KafkaException, SystemError, RuntimeError):
        pass


@contextmanager
def opened(kind: str, request: pytest.FixtureRequest) -> Iterator[Kafka]:
    """The cluster of a kind."""
    servers = f"memory://{uuid.uuid4().hex[:8]}"
    if kind == "broker":
        servers = request.getfixturevalue("bootstrap")
    with ExitStack() as stack:
        kafka = Kafka(servers, stack)
        if kafka.is_memory:
            kafka.cluster.settings["group.consumer.heartbeat.interval.ms"] = "200"
        yield kafka


def refusal(call: Callable[[], object]) -> KafkaError:
    """The error that a call raises."""
    with pytest.raises(KafkaException) as caught:
        call()
    error: KafkaError = caught.value.args[0]
    return error


def parts(topic: str, *numbers: int, offset: int = 0) -> list[TopicPartition]:
    return [TopicPartition(topic, number, offset) for number in numbers]


class Member:
    """A member of a group that writes down what it is told."""

    def __init__(self, kafka: Kafka, name: str, group: str, topic: str, **settings: object) -> None:
        self.name = name
        self.topic = topic
        self.told: list[tuple[str, list[int]]] = []
        self.events: list[Message] = []
        self.records: list[Message] = []
        ours = {"client_id": name, **settings}
        self.is_eager = "range" in str(settings.get("partition_assignment_strategy", ""))
        self.client = kafka.consumer(group, **ours)
        self.client.subscribe(
            [topic],
            on_assign=self._assigned,
            on_revoke=lambda _, given: self._note("revoke", given),
            on_lost=lambda _, given: self._note("lost", given),
        )

    def _note(self, what: str, given: Sequence[TopicPartition]) -> None:
        self.told.append((what, sorted(each.partition for each in given)))

    def _assigned(self, client: Consumer, given: Sequence[TopicPartition]) -> None:
        self._note("assign", given)
        wanted = [TopicPartition(each.topic, each.partition, 0) for each in given]
        if self.is_eager:
            client.assign(wanted)
        elif wanted:
            client.incremental_assign(wanted)

    @property
    def partitions(self) -> set[int]:
        return {each.partition for each in self.client.assignment()}

    def what(self, kind: str) -> list[list[int]]:
        """What it was told of that kind, without empty lists."""
        return [given for what, given in self.told if what == kind and given]

    def poll(self, timeout: float = 0.02) -> None:
        message = self.client.poll(timeout)
        if message is not None:
            (self.records if message.error() is None else self.events).append(message)


def poll_all(members: Iterable[Member], until: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Poll all of them in turn until it is so."""
    every = list(members)
    deadline = deadline_after(timeout_s)
    while not until():
        assert time.monotonic() < deadline, [(each.name, each.told) for each in every]
        for each in every:
            each.poll()
