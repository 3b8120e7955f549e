"""Queues on claims whose claims end while verdicts are under way."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from tests.waiting import wait_until

from kafkamq import LeaseLostError
from kafkamq.claims import partition_reader as reader
from kafkamq.claims import queue_consumer as claims
from kafkamq.claims.queue_consumer import ClaimsConsumer
from kafkamq.claims.rules.steps import End
from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import BrokerError
from kafkamq.queue.backend import ConsumerPlan
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

    def __init__(self) -> None:
        self.live: set[int] = set()
        self.confirmed = -1

    def confirmed_position(self, topic: str, partition: int) -> int:
        return self.confirmed

    def flush(self, timeout: float) -> None: ...


class DeadLetterWriter:
    """Writes a dead letter when it is told to."""

    def __init__(self) -> None:
        self.letter: Future[None] = Future()

    def write(self, *_: object) -> Future[None]:
        return self.letter

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
        for offset in range(count):
            self.consumer._add(Claimed(self.claims, offset, token))  # type: ignore[arg-type]

    def end(self, reason: End) -> None:
        self.consumer._claim_ended("t", 0, reason.value)

    def take(self) -> list:
        return self.consumer.receive_many(10, 0)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    class Part:
        """A cluster, and its member."""

        def __init__(self, *_: object, **__: object) -> None: ...
        def member(self, *_: object) -> Part:
            return self

        def consumer(self, *_: object, **__: object) -> Claims:
            return Claims()

    monkeypatch.setattr(claims, "Cluster", Part)
    monkeypatch.setattr(ClaimsConsumer, "_feed", lambda _: None)
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
