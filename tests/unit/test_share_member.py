"""Members of a share group whose client reports errors: which end them, and which do not."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from tests.waiting import within

from kafkamq import BrokerError
from kafkamq.share import backend as share
from kafkamq.share.backend import Member


class Client:
    """Polls as it is told: an error is raised, or comes in the place of a record."""

    def __init__(self, polls: list[Callable[[], list[object]]]) -> None:
        self.polls = polls
        self.was_closed = False

    def set_acknowledgement_commit_callback(self, _: object) -> None: ...
    def subscribe(self, _: list[str]) -> None: ...
    def commit_sync(self, _: float) -> None: ...

    def poll(self, _: float) -> list[object]:
        return self.polls.pop(0)() if self.polls else []

    def close(self) -> None:
        self.was_closed = True


class Bad:
    """What a client gives where it has no record."""

    def __init__(self, code: int, *, fatal: bool = False) -> None:
        self._error = KafkaError(code, "", fatal)

    def error(self) -> KafkaError:
        return self._error


class Good:
    def error(self) -> None: ...


class Owner:
    def __init__(self) -> None:
        self.records = 0
        self.failure: BaseException | None = None
        self.changed = threading.Event()

    def arrived(self, _: Member, records: list[object], __: int) -> None:
        self.records += len(records)
        self.changed.set()

    def has_room(self) -> bool:
        return True

    def failed(self, _: Member, error: BaseException) -> None:
        self.failure = error
        self.changed.set()


def raises(code: int, *, fatal: bool = False) -> Callable[[], list[object]]:
    def poll() -> list[object]:
        raise KafkaException(KafkaError(code, "", fatal))

    return poll


def run(
    monkeypatch: pytest.MonkeyPatch, *polls: Callable[[], list[object]]
) -> tuple[Owner, Client]:
    """A member's life until records or its end have come."""
    owner, client = Owner(), Client(list(polls))
    monkeypatch.setattr(share, "open_share_consumer", lambda _: client)
    monkeypatch.setattr(share, "AGAIN_S", 0.01)
    member = Member({}, "topic", owner, number=0)
    member.start()
    assert owner.changed.wait(within(30))
    member.stop()
    member.leave()
    assert member.join(within(30))
    assert client.was_closed
    return owner, client


def test_an_outage_does_not_end_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, _ = run(
        monkeypatch,
        raises(KafkaError._TIMED_OUT),
        lambda: [Bad(KafkaError._TRANSPORT)],
        lambda: [Bad(KafkaError.UNKNOWN_TOPIC_OR_PART)],
        lambda: [Good(), Good()],
    )
    assert (owner.records, owner.failure) == (2, None)


def test_records_beside_an_error_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, _ = run(monkeypatch, lambda: [Bad(KafkaError._TRANSPORT), Good()])
    assert (owner.records, owner.failure) == (1, None)


@pytest.mark.parametrize(
    "poll",
    [
        raises(KafkaError.GROUP_MAX_SIZE_REACHED, fatal=True),
        raises(KafkaError._AUTHENTICATION),
        lambda: [Bad(KafkaError.TOPIC_AUTHORIZATION_FAILED)],
    ],
)
def test_what_waiting_does_not_mend_ends_a_member(
    monkeypatch: pytest.MonkeyPatch, poll: Callable[[], list[object]]
) -> None:
    owner, _ = run(monkeypatch, poll)
    assert isinstance(owner.failure, BrokerError)


def test_a_topic_that_is_gone_ends_a_member_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "PATIENCE_S", 0.05)
    owner, _ = run(monkeypatch, *[raises(KafkaError.UNKNOWN_TOPIC_OR_PART)] * 1000)
    assert isinstance(owner.failure, BrokerError)


def test_a_verdict_waits_for_its_answer_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on its way from the queue to the client: a flush that looked there was over."""
    member = Member({}, "topic", Owner(), number=0)  # type: ignore[arg-type]
    counts: list[int] = []

    class Verdicts(queue.SimpleQueue[Any]):
        def get_nowait(self) -> Any:
            item = super().get_nowait()
            counts.append(member.unconfirmed_count)
            return item

    class Asked(Client):
        def acknowledge(self, *_: object) -> None: ...

    member._client, member._verdicts = Asked([]), Verdicts()
    place = SimpleNamespace(partition=0, offset=1)
    message: Any = SimpleNamespace(message_id=place, _record=None)
    member.add(message)
    member.acknowledge(message, 1)
    member._serve(0.0)
    assert counts == [1]
    assert member.unconfirmed_count == 1  # no answer yet
    member._answered({TopicPartition("topic", 0): {1}}, None)
    assert member.unconfirmed_count == 0
