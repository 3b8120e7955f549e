"""Commits by the thread that polls: who makes one, and who hears of its answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from tests.waiting import wait_until, within

from kafkamq.config import ServiceConfig
from kafkamq.transport.commits import CommitTurns, GroupOffsets, OffsetCommit

COMMIT = OffsetCommit("t", 0, 7, "map")


class Client:
    """Keeps who commits what and how."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.tell = settings["on_commit"]
        self.commits: list[tuple[bool, int, int]] = []  # asynchronous, offset, thread
        self.error: KafkaError | None = None
        self.member = ""

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> object:
        self.commits.append((asynchronous, offsets[0].offset, threading.get_ident()))
        if self.error is not None:
            raise KafkaException(self.error)
        return None if asynchronous else offsets

    def assign(self, partitions: list[TopicPartition]) -> None:
        """All that is asked for is assigned."""

    resume = incremental_unassign = assign

    def memberid(self) -> str:
        return self.member

    def consumer_group_metadata(self) -> bytes:
        return b"group;" + self.member.encode()


@pytest.fixture(autouse=True)
def _clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kafkamq.transport.follower.open_consumer", lambda settings, _: Client(settings)
    )


class Parts:
    """The owner is the test's thread; another one commits."""

    def __init__(self) -> None:
        group = GroupOffsets(ServiceConfig(bootstrap_servers="127.0.0.1:1"), "g")
        group.place({("t", 0): 0})
        self.group = group
        self.client: Any = group.client
        self.commits = CommitTurns(group)
        self.commits.serve()
        self.outcome: list[object] = []
        self.is_current = True

    def commit(self) -> threading.Thread:
        def run() -> None:
            try:
                self.commits.commit([COMMIT], lambda: self.is_current)
            except KafkaException as error:
                self.outcome.append(error.args[0].code())
            else:
                self.outcome.append("committed")

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def serve_until_begun(self) -> None:
        def served() -> bool:
            self.commits.serve()
            return bool(self.client.commits)

        wait_until(served)


def answered(parts: Parts, error: int | None = None, of_one: int | None = None) -> None:
    place: Any = TopicPartition("t", 0, COMMIT.offset)
    if of_one is not None:
        place = SimpleNamespace(topic="t", partition=0, offset=7, error=KafkaError(of_one))
    parts.client.tell(None if error is None else KafkaError(error), [place])


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (lambda parts: answered(parts), "committed"),
        (lambda parts: answered(parts, KafkaError.ILLEGAL_GENERATION), 22),
        (lambda parts: answered(parts, of_one=KafkaError.OFFSET_METADATA_TOO_LARGE), 12),
    ],
)
def test_the_polling_thread_begins_it_and_hears_of_it(
    answer: Callable[[Parts], None], outcome: object
) -> None:
    parts = Parts()
    thread = parts.commit()
    parts.serve_until_begun()
    assert parts.client.commits == [(True, 7, threading.get_ident())]
    parts.client.tell(None, [TopicPartition("t", 0, 6)])  # an older one's
    assert parts.outcome == []
    answer(parts)
    thread.join(within(10))
    assert parts.outcome == [outcome]


def test_what_the_client_refuses_at_once_is_told() -> None:
    parts = Parts()
    parts.client.error = KafkaError(KafkaError._STATE)
    thread = parts.commit()
    parts.serve_until_begun()
    thread.join(within(10))
    assert parts.outcome == [KafkaError._STATE]


@pytest.mark.parametrize("by", ["the polling thread", "the other one"])
def test_what_waits_for_a_partition_that_has_gone_is_not_committed(by: str) -> None:
    """Brokers would take it from any member, and set the position of the new owner back."""
    parts = Parts()
    parts.group.drop([("t", 0)])
    if by == "the other one":
        parts.commits.tend()
    thread = parts.commit()
    while thread.is_alive():
        if by == "the polling thread":
            parts.commits.serve()
        thread.join(0.01)
    assert parts.outcome == [KafkaError.UNKNOWN_MEMBER_ID]
    assert parts.client.commits == []


def test_a_commit_without_an_answer_is_not_made_again_when_its_log_was_replaced() -> None:
    """The records at those offsets are others by now, and nobody has read them."""
    parts = Parts()
    thread = parts.commit()
    parts.serve_until_begun()
    parts.is_current = False
    with parts.commits.inside():
        while thread.is_alive():
            parts.commits.tend()
            thread.join(0.01)
    assert parts.outcome == [KafkaError.UNKNOWN_MEMBER_ID]
    assert len(parts.client.commits) == 1


@pytest.mark.parametrize("is_begun", [False, True])
def test_inside_a_rebalance_the_polling_thread_waits_for_the_answer(is_begun: bool) -> None:
    parts = Parts()
    thread = parts.commit()
    if is_begun:
        parts.serve_until_begun()
    with parts.commits.inside():
        while thread.is_alive():
            parts.commits.tend()
            thread.join(0.01)
    assert parts.outcome == ["committed"]
    assert parts.client.commits[-1] == (False, 7, threading.get_ident())
    answered(parts)  # too late: nobody asks any more


def test_who_commits_does_so_itself_while_the_polling_thread_waits() -> None:
    parts = Parts()
    parts.commits.tend()
    thread = parts.commit()
    thread.join(within(10))
    assert parts.outcome == ["committed"]
    assert parts.client.commits == [(False, 7, thread.ident)]
    with parts.commits.inside():  # it polls again
        thread = parts.commit()
        thread.join(0.1)
        assert thread.is_alive() and len(parts.client.commits) == 1
    parts.serve_until_begun()
    wait_until(lambda: parts.commits.serve() or len(parts.client.commits) == 2)
    answered(parts)
    thread.join(within(10))
    assert not thread.is_alive()


def test_without_a_member_its_group_stays_the_last_one() -> None:
    parts = Parts()
    parts.commits.note_member()
    assert parts.commits.member == b""
    parts.client.member = "m-1"
    parts.commits.note_member()
    parts.client.member = ""
    parts.commits.note_member()
    assert parts.commits.member == b"group;m-1"
