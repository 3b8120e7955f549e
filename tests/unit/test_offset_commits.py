"""A commit is done when Kafka has taken each of its partitions, and not only some."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError
from kafkamq.transport.commits import GroupOffsets, PendingCommit

CONFIG = ServiceConfig(bootstrap_servers="127.0.0.1:1")


class Group:
    """In place of a consumer: refuses some partitions, as brokers may."""

    def __init__(self, refused: dict[int, int], *, fails: int | None = None) -> None:
        self.begun: list[list[TopicPartition]] = []
        self.refused = refused
        self.fails = fails

    def commit(self, offsets: list[TopicPartition], asynchronous: bool) -> list[Any]:
        if self.fails is not None:
            raise KafkaException(KafkaError(self.fails))
        if asynchronous:
            self.begun.append(offsets)
            return []
        return [
            SimpleNamespace(
                topic=each.topic,
                partition=each.partition,
                offset=each.offset,
                error=KafkaError(code) if (code := self.refused.get(each.partition)) else None,
            )
            for each in offsets
        ]


def offsets_of(group: Group, monkeypatch: pytest.MonkeyPatch) -> tuple[GroupOffsets, Any]:
    """The group's offsets, and the client's one callback for all commits."""
    told: list[Any] = []

    def opened(settings: dict[str, Any], _: object) -> Group:
        told.append(settings["on_commit"])
        return group

    monkeypatch.setattr("kafkamq.transport.follower.open_consumer", opened)
    return GroupOffsets(CONFIG, "g"), told[0]


def test_what_was_refused_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    group, _ = offsets_of(Group({1: KafkaError.ILLEGAL_GENERATION}), monkeypatch)
    refused = group.commit_each({("t", 0): 5, ("t", 1): 7})
    assert {place: error.name() for place, error in refused.items()} == {
        ("t", 1): "ILLEGAL_GENERATION"
    }
    with pytest.raises(BrokerError, match=r"committing.*ILLEGAL_GENERATION"):
        group.commit({("t", 0): 5, ("t", 1): 7})
    group.commit({("t", 0): 5})
    assert group.commit_each({}) == {}


def test_the_late_answer_of_a_commit_that_was_given_up_is_no_other_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Group({})
    group, tell = offsets_of(client, monkeypatch)
    given_up, same, other = (group.begin({("t", 0): at}) for at in (5, 5, 6))
    assert not any(each.is_answered for each in (given_up, same, other))

    def outcomes() -> list[str]:
        return [_outcome(each) for each in (given_up, same, other)]

    tell(KafkaError(KafkaError.REBALANCE_IN_PROGRESS), client.begun[0])
    assert outcomes() == ["REBALANCE_IN_PROGRESS", "none yet", "none yet"]
    tell(None, client.begun[2])
    assert outcomes() == ["REBALANCE_IN_PROGRESS", "none yet", "done"]
    tell(None, [TopicPartition("t", 0, 4)])  # nobody's
    tell(None, client.begun[1])
    assert outcomes() == ["REBALANCE_IN_PROGRESS", "done", "done"]


def test_metadata_with_memory_behind_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """confluent-kafka reads on where no NUL was committed, and wants to decode all of it."""

    class Found:
        topic, partition, offset, error = "t", 0, 5, None

        @property
        def metadata(self) -> str:
            return b"bAALzgcA\xb0\x01".decode()

    class Client(Group):
        def committed(self, _: object, timeout: float) -> list[Found]:
            return [Found()]

    group, _ = offsets_of(Client({}), monkeypatch)
    (found,) = group.committed_with_metadata([("t", 0)])
    assert (found.offset, found.metadata) == (5, "bAALzgcA\ufffd\x01")
    assert group.committed([("t", 0)]) == {("t", 0): 5}


def _outcome(commit: PendingCommit) -> str:
    if not commit.is_answered:
        return "none yet"
    return "done" if commit.error is None else commit.error.name()


def test_a_commit_that_the_client_refuses_at_once_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, _ = offsets_of(Group({}, fails=KafkaError._STATE), monkeypatch)
    assert _outcome(group.begin({("t", 0): 5})) == "_STATE"
    assert not group.begun
