"""A commit is done when Kafka has taken each of its partitions, and not only some."""

from __future__ import annotations

from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from tests.waiting import within

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, StateError
from kafkamq.spark.queues.position import QueuePosition
from kafkamq.transport.offset_commits import Commit, Committer, commit_all, commit_offsets

CONFIG = ServiceConfig(bootstrap_servers="127.0.0.1:1")


class Group:
    """In place of a consumer: refuses some partitions, as brokers may."""

    def __init__(self, refused: dict[int, int], *, fails: int | None = None) -> None:
        self.refused = refused
        self.fails = fails

    def commit(self, offsets: list[TopicPartition], asynchronous: bool) -> list[Any]:
        assert not asynchronous
        if self.fails is not None:
            raise KafkaException(KafkaError(self.fails))
        return [
            SimpleNamespace(
                topic=each.topic,
                partition=each.partition,
                offset=each.offset,
                error=KafkaError(code) if (code := self.refused.get(each.partition)) else None,
            )
            for each in offsets
        ]


def test_what_was_refused_is_named() -> None:
    group: Any = Group({1: KafkaError.ILLEGAL_GENERATION})
    refused = commit_offsets(group, {("t", 0): 5, ("t", 1): 7})
    assert {place: error.name() for place, error in refused.items()} == {
        ("t", 1): "ILLEGAL_GENERATION"
    }
    with pytest.raises(BrokerError, match=r"committing .*ILLEGAL_GENERATION"):
        commit_all(group, {("t", 0): 5, ("t", 1): 7}, "committing offsets")
    commit_all(group, {("t", 0): 5}, "committing offsets")


@pytest.mark.parametrize(
    ("code", "outcome"),
    [(KafkaError.REBALANCE_IN_PROGRESS, Commit.FAILED), (KafkaError._TIMED_OUT, Commit.FAILED)],
)
def test_a_commit_that_may_succeed_later_is_no_error(code: int, outcome: Commit) -> None:
    group: Any = Group({}, fails=code)
    committer = Committer("t", "g")
    committer.begin(group, {0: 1})
    assert committer.wait(within(10.0)) is outcome
    assert committer.finish(lambda: None, 10.0)


def test_a_commit_that_never_succeeds_is_one() -> None:
    group: Any = Group({0: KafkaError.GROUP_AUTHORIZATION_FAILED})
    committer = Committer("t", "g")
    committer.begin(group, {0: 1})
    with pytest.raises(BrokerError, match="GROUP_AUTHORIZATION_FAILED"):
        committer.wait(within(10.0))
    assert not committer.is_pending
    assert committer.finish(lambda: None, 10.0)


@pytest.mark.parametrize(
    ("code", "raised"),
    [
        (KafkaError.UNKNOWN_MEMBER_ID, StateError),
        (KafkaError.REBALANCE_IN_PROGRESS, StateError),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, BrokerError),
    ],
)
def test_a_position_of_spark_that_is_refused_for_one_partition_is_not_noted(
    monkeypatch: pytest.MonkeyPatch, code: int, raised: type[Exception]
) -> None:
    monkeypatch.setattr("kafkamq.transport.follower.open_consumer", lambda *_: Group({1: code}))
    position = QueuePosition(CONFIG, "q", "g", lambda _: True)
    with pytest.raises(raised):
        position.commit({0: 5, 1: 7}, b"t" * 16)
    assert not position.is_known


def test_a_commit_that_waits_for_its_turn_leaves_out_what_was_revoked_meanwhile() -> None:
    """Else it would set the new owner's position back, under a generation that is valid."""
    asked: list[dict[int, int]] = []

    class Client(Group):
        def commit(self, offsets: list[TopicPartition], asynchronous: bool) -> list[Any]:
            asked.append({each.partition: each.offset for each in offsets})
            return super().commit(offsets, asynchronous)

    client: Any = Client({})
    committer = Committer("t", "g")
    for revoked, left in (([0], [{1: 3}]), ([0, 1], [])):
        asked.clear()
        turn = Event()
        committer.ask(turn.wait)
        committer.begin(client, {0: 7, 1: 3})
        for partition in revoked:
            committer.forget(partition)
        turn.set()
        assert committer.wait(within(10.0)) is Commit.DONE
        assert asked == left
    assert committer.finish(lambda: None, 10.0)
