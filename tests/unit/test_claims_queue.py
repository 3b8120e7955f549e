"""Queues on claims whose claims end while verdicts are under way."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest
from tests.waiting import wait_until, within

from kafkamq import LeaseLostError, Queue, Service
from kafkamq.claims import backend as claims
from kafkamq.claims import consumer as claims_consumer
from kafkamq.claims import consumer as reader
from kafkamq.claims import holding
from kafkamq.claims.backend import ClaimsConsumer
from kafkamq.claims.rules.steps import End
from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import BrokerError
from kafkamq.queue.backend import ConsumerPlan
from kafkamq.transport.clients import open_producer
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.memory.cluster import cluster_of
from kafkamq.types import Backend


class Record:
    def __init__(self, offset: int) -> None:
        self.place = offset

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self.place

    def key(self) -> None: ...
    def headers(self) -> None: ...
    def value(self) -> bytes:
        return b"v"

    def timestamp(self) -> tuple[int, int]:
        return (1, 0)


class Claimed:
    """A message of the claim with that token."""

    topic, partition = "t", 0

    def __init__(self, owner: Claims, offset: int, token: int) -> None:
        self.offset, self.token = offset, token
        self._owner = owner
        self._record = Record(offset)

    def commit(self) -> None:
        if self.token not in self._owner.live:
            raise LeaseLostError("the claim has ended")


class Claims:
    """In the place of a consumer of claims; ``live`` are the tokens whose commits count."""

    is_closed = False
    has_read = is_full = False

    def __init__(self, on_claim, on_lost, **_: object) -> None:
        self.on_claim, self.on_lost = on_claim, on_lost
        self.live: set[int] = set()
        self.confirmed = -1
        self.waiting: list[Claimed] = []

    def take_read(self, n: int, credit_of) -> list[Claimed]:
        count = min(n, credit_of(("t", 0)))
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken

    def is_held(self, topic: str, partition: int, token: int) -> bool:
        return token in self.live

    def confirmed_position(self, topic: str, partition: int) -> int:
        return self.confirmed

    def read(self, timeout: float) -> None: ...
    def forget(self, message: Claimed) -> None: ...
    def check(self) -> None: ...
    def flush(self, timeout: float) -> None: ...


class DeadLetterWriter:
    """Writes a dead letter when it is told to."""

    def __init__(self) -> None:
        self.letter: Future[None] = Future()
        self.is_wanted: Callable[[], bool] = lambda: True
        self.is_refused = False  # then it waits, else it is under way

    def write(self, *asked: Any) -> Future[None]:
        self.is_wanted = asked[-1]
        return self.letter

    def prune(self) -> None:
        if self.is_refused and not self.is_wanted():
            self.letter.cancel()

    def close(self, timeout_s: float) -> None: ...


class World:
    def __init__(self) -> None:
        self.dead_letters = DeadLetterWriter()
        self.lost: list[int] = []
        queue = QueueConfig(queue_id="q", backend=Backend.CLAIMS, topic="t", max_deliveries=1)
        self.consumer = ClaimsConsumer(
            ServiceConfig(bootstrap_servers="x:1"),
            queue,
            self.dead_letters,
            ConsumerPlan(on_lease_lost=lambda message: self.lost.append(message.message_id.offset)),
        )
        self.claims: Claims = self.consumer._claims  # type: ignore[assignment]

    def begin(self, token: int, count: int = 4) -> None:
        self.claims.live = {token}
        self.claims.on_claim("t", 0, token)
        self.claims.waiting = [Claimed(self.claims, offset, token) for offset in range(count)]

    def end(self, reason: End) -> None:
        self.claims.waiting = []
        self.claims.on_lost("t", 0, reason.value)

    def take(self) -> list:
        return self.consumer.receive_many(10, 0)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    class Part:
        """A cluster, its engine and its member."""

        def __init__(self, *_: object, **__: object) -> None:
            self.engine = self
            self.changed = threading.Condition(threading.RLock())

        def member(self, *_: object) -> Part:
            return self

        def consumer(self, *_: object, **options: object) -> Claims:
            return Claims(**options)  # type: ignore[arg-type]

    monkeypatch.setattr(claims, "Cluster", Part)
    return World()


def test_a_dead_letter_of_a_claim_that_has_ended_moves_nothing_on(world: World) -> None:
    """The claim was won back meanwhile: one message of a partition at a time all the same."""
    world.begin(token=1)
    (message,) = world.take()
    message.reject("no good")  # its dead letter is on its way
    world.end(End.EXPIRED)
    world.begin(token=2)
    (first,) = world.take()
    world.dead_letters.letter.set_result(None)
    assert world.take() == []
    first.ack()
    (second,) = world.take()
    assert [first.message_id.offset, second.message_id.offset] == [0, 1]


@pytest.mark.parametrize("reason", [End.PAUSED, End.BEHIND, End.STUCK, End.RELEASED])
def test_a_claim_that_is_given_back_takes_verdicts(world: World, reason: End) -> None:
    world.begin(token=1)
    (message,) = world.take()
    world.end(reason)
    assert world.take() == []
    message.ack()
    assert world.lost == []


@pytest.mark.parametrize("reason", [End.TAKEN, End.EXPIRED, End.UNCERTAIN, End.FENCED])
def test_a_claim_that_is_lost_takes_none(world: World, reason: End) -> None:
    world.begin(token=1)
    (message,) = world.take()
    world.end(reason)
    wait_until(lambda: world.lost == [0], "its owner is told")
    with pytest.raises(LeaseLostError):
        message.ack()


def test_what_is_left_of_a_claim_that_was_given_back_is_lost_when_it_is_won_back(
    world: World,
) -> None:
    world.begin(token=1)
    (message,) = world.take()
    world.end(End.BEHIND)
    world.begin(token=2)
    wait_until(lambda: world.lost == [0], "its owner is told")
    with pytest.raises(LeaseLostError):
        message.nack()


def test_flush_tells_of_verdicts_that_no_log_has(world: World) -> None:
    world.begin(token=1)
    (message,) = world.take()
    message.ack()
    world.claims.confirmed = 0  # no heartbeat has said so
    world.end(End.EXPIRED)
    with pytest.raises(LeaseLostError, match=r"t\[0\] ended before"):
        world.consumer.flush()
    world.consumer.flush()


def test_flush_tells_of_a_verdict_whose_claim_ended_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit was taken, and had not returned yet."""
    world.begin(token=1)
    (message,) = world.take()
    monkeypatch.setattr(Claimed, "commit", lambda _: world.end(End.EXPIRED))
    message.ack()
    with pytest.raises(LeaseLostError, match=r"t\[0\] ended before"):
        world.consumer.flush()


@pytest.mark.parametrize("reason", [End.EXPIRED, End.BEHIND])
def test_flush_tells_of_a_dead_letter_that_its_claim_did_not_wait_for(
    world: World, reason: End
) -> None:
    """The letter is not written any more: the next owner decides on its message."""
    world.begin(token=1)
    world.claims.confirmed = 0
    world.dead_letters.is_refused = True
    (message,) = world.take()
    message.reject("no good")
    world.end(reason)
    if reason is End.BEHIND:  # it is given back, and there until the log has its release
        assert not world.dead_letters.letter.cancelled()
        world.claims.confirmed = -1
        world.dead_letters.prune()
    assert world.dead_letters.letter.cancelled()
    with pytest.raises(LeaseLostError, match="may be delivered again"):
        world.consumer.flush()


def test_flush_says_nothing_of_verdicts_that_the_log_has(world: World) -> None:
    world.begin(token=1)
    (message,) = world.take()
    message.ack()
    world.claims.confirmed = 1
    world.end(End.EXPIRED)
    world.consumer.flush()


def test_flush_of_a_consumer_that_has_failed_confirms_nothing(world: World) -> None:
    world.begin(token=1)
    (message,) = world.take()
    world.consumer._fail(BrokerError("gone", code="_AUTHENTICATION"))
    with pytest.raises(BrokerError, match="gone"):
        message.ack(wait=True)


def test_what_waits_for_a_retry_is_not_handed_out_when_the_lease_has_ended(world: World) -> None:
    """The engine's thread, which will tell of the end, has not run since."""
    world.begin(token=1)
    (message,) = world.take()
    world.consumer.put_back([message])
    world.claims.live.clear()
    assert world.take() == []


@dataclass
class Bills:
    """A queue in memory."""

    queue: Queue
    servers: str

    def produce(self, partition: int, count: int) -> None:
        producer = open_producer({"bootstrap.servers": self.servers})
        for number in range(count):
            producer.produce("bills", b"%d" % number, partition=partition)
        producer.flush(10)


@pytest.fixture
def bills() -> Iterator[Bills]:
    servers = f"memory://{uuid.uuid4().hex}"
    cluster_of(servers).create_topic("bills", 4)
    with Service(servers, "n") as service:
        queue = service.queue("bills", backend="claims", topic="bills", redelivery_timeout=4)
        queue.create_topics()
        yield Bills(queue, servers)


def test_what_was_read_ahead_is_not_handed_out_after_a_long_pause(
    bills: Bills, monkeypatch: pytest.MonkeyPatch
) -> None:
    bills.produce(0, 10)
    with bills.queue.consumer() as consumer:
        message = consumer.receive(within(30))
        assert message is not None
        message.ack()
        # A process that was stopped goes on, and the application's thread is the first to run.
        for module in (holding, claims_consumer):
            monkeypatch.setattr(module, "monotonic_ms", lambda: monotonic_ms() + 60_000)
        assert consumer.receive_many(10, 0.1) == []
        monkeypatch.undo()


def test_a_partition_whose_first_message_waits_holds_no_other_one_back(bills: Bills) -> None:
    """Though more stands behind it than a consumer may have in flight."""
    bills.produce(0, 1500)
    with bills.queue.consumer() as consumer:
        message = consumer.receive(within(30))
        assert message is not None
        message.nack(delay=600)
        bills.produce(1, 20)
        seen = 0
        while seen < 20:
            message = consumer.receive(within(30))
            assert message is not None
            assert message.message_id.partition == 1
            message.ack()
            seen += 1


def test_a_consumer_that_starts_later_gets_its_share(bills: Bills) -> None:
    for partition in range(4):
        bills.produce(partition, 1)
    with bills.queue.consumer() as first:
        for _ in range(4):
            message = first.receive(within(30))
            assert message is not None
            message.ack()
        for partition in range(4):
            bills.produce(partition, 1000)
        with bills.queue.consumer() as second:
            seen: set[int] = set()

            def receive_both() -> bool:
                for consumer in (first, second):
                    for message in consumer.receive_many(1, 0.01):
                        message.ack()
                        if consumer is second:
                            seen.add(message.message_id.partition)
                return len(seen) >= 2

            wait_until(receive_both, "the second consumer has two of four partitions")


def test_a_share_is_given_at_once_though_messages_wait_for_their_retries(bills: Bills) -> None:
    """It waited two intervals, here twenty minutes, for verdicts that could not come."""
    for partition in range(4):
        bills.produce(partition, 1)
    with Service(bills.servers, "slow") as service:
        queue = service.queue("bills", backend="claims", topic="bills", redelivery_timeout=1200)
        queue.create_topics()
        with queue.consumer() as first:
            for _ in range(4):
                message = first.receive(within(30))
                assert message is not None
                message.nack(delay=600)
            with queue.consumer() as second:
                wait_until(lambda: second.receive_many(1, 0.1), "the second has a partition")


def test_who_may_be_handed_no_more_behind_a_slow_message_does_not_spin(
    bills: Bills, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MAX_BEHIND", 10)
    looks: list[float] = []
    fill = reader.PartitionReader.fill

    def count(each: reader.PartitionReader, timeout_s: float) -> None:
        looks.append(timeout_s)
        fill(each, timeout_s)

    bills.produce(0, 20)
    with bills.queue.consumer(ordering="unordered") as consumer:
        slow = consumer.receive(within(30))
        assert slow is not None
        for _ in range(9):
            message = consumer.receive(within(30))
            assert message is not None
            message.ack()
        monkeypatch.setattr(reader.PartitionReader, "fill", count)
        assert consumer.receive_many(1, 0.3) == []
        assert len(looks) < 100  # it was thousands
        slow.ack()
        assert consumer.receive(within(30)) is not None


@pytest.mark.parametrize(("partitions", "count"), [(1, 1), (4, 5)])
def test_who_waits_for_retries_alone_hardly_looks_for_messages(
    bills: Bills, monkeypatch: pytest.MonkeyPatch, partitions: int, count: int
) -> None:
    """It did so 200 times a second, whether anything else could be handed out or not."""
    for partition in range(partitions):
        bills.produce(partition, count)
    looks: list[float] = []
    fill = reader.PartitionReader.fill

    def note(each: reader.PartitionReader, timeout_s: float) -> None:
        looks.append(timeout_s)
        fill(each, timeout_s)

    with bills.queue.consumer() as consumer:
        for _ in range(partitions):
            message = consumer.receive(within(30))
            assert message is not None
            message.nack(delay=600)
        consumer.receive(0.1)  # it has read all that there is
        monkeypatch.setattr(reader.PartitionReader, "fill", note)
        assert consumer.receive_many(1, 0.4) == []
        assert len(looks) < 20
        bills.produce(0, 1)  # behind the one that waits
        assert consumer.receive_many(1, 0.1) == []


@pytest.mark.parametrize(
    ("outstanding", "offset", "is_full"),
    [(1, 100_000, True), (1, 99_999, False), (0, 10_000_000, False)],
)
def test_a_message_without_a_verdict_holds_so_many_back(outstanding, offset, is_full) -> None:
    class ClaimSession:
        class claimant:  # noqa: N801 - an attribute
            position = 0

    ClaimSession.claimant.outstanding = outstanding  # type: ignore[attr-defined]
    assert reader._is_full(ClaimSession, offset) is is_full  # type: ignore[arg-type]
