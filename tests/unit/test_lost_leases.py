"""Who is told of lost leases and late verdicts, whatever ``on_lease_lost`` does; no broker."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.waiting import within

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.markers.ack_writer import AckWriter
from kafkamq.markers.message import MarkersMessage
from kafkamq.markers.rules.leases import Lease
from kafkamq.markers.state import ConsumerState
from kafkamq.queue.consumer import MAX_LATE, LostLeases
from kafkamq.queue.message import Message
from kafkamq.queue.namespace import NamespaceFacts
from kafkamq.types import MessageId

WAIT_S = within(20.0)
FACTS = NamespaceFacts(b"t" * 16, 8, 8, 604_800_000, 604_800_000, 1_000_000, 1_100_000)


def message(offset: int) -> Message:
    return cast("Message", SimpleNamespace(message_id=MessageId(0, offset)))


def tellers() -> int:
    return sum(thread.name == "kafkamq-lease-lost" for thread in threading.enumerate())


def test_one_thread_tells_however_long_it_takes() -> None:
    told: list[Message] = []
    has_begun, go_on = threading.Event(), threading.Event()

    def slow(each: Message) -> None:
        has_begun.set()
        assert go_on.wait(WAIT_S)
        told.append(each)

    leases = LostLeases("q", slow, 100)
    messages = [message(number) for number in range(50)]
    for each in messages:
        leases.lost(each)
        leases.tell_soon()  # as the keeper does, beat by beat
    assert has_begun.wait(WAIT_S)
    assert tellers() == 1
    go_on.set()
    leases.finish(WAIT_S)
    assert told == messages
    leases.lost(messages[0])
    leases.tell_soon()  # a thread that has ended is replaced when it is needed
    leases.finish(WAIT_S)
    assert len(told) == 51


def test_a_backlog_is_bounded_and_its_excess_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Message] = []
    has_begun, go_on = threading.Event(), threading.Event()

    def slow(each: Message) -> None:
        has_begun.set()
        assert go_on.wait(WAIT_S)
        told.append(each)

    leases = LostLeases("q", slow, 10)
    leases.lost(message(0))
    leases.tell_soon()
    assert has_begun.wait(WAIT_S)
    for number in range(1, 31):
        leases.lost(message(number))
    leases.finish(0.0)  # it has not returned: nobody waits for it beyond a bound
    go_on.set()
    leases.finish(WAIT_S)
    assert [each.message_id.offset for each in told] == list(range(11))
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "on_lease_lost is behind: more lost leases are not told",
        "on_lease_lost has not returned in time",
        "lost leases were not told: on_lease_lost was behind",
    ]
    assert cast("Any", caplog.records[-1]).count == 20


@pytest.mark.parametrize("raised", [ZeroDivisionError, SystemExit])
def test_one_that_raises_is_called_for_the_others(raised: type[BaseException]) -> None:
    told: list[Message] = []

    def broken(each: Message) -> None:
        told.append(each)
        raise raised

    leases = LostLeases("q", broken, 10)
    for number in range(3):
        leases.lost(message(number))
    leases.finish(WAIT_S)
    assert len(told) == 3
    assert tellers() == 0


class FakeNamespace:
    """Of a cluster that nobody reaches."""

    config = ServiceConfig(bootstrap_servers="127.0.0.1:1")

    def facts(self) -> NamespaceFacts:
        return FACTS

    def require(self, max_lease_ms: int) -> NamespaceFacts:
        del max_lease_ms
        return FACTS


class Record:
    """What a message keeps of Kafka's."""

    def value(self) -> bytes:
        return bytes(1000)


def test_late_verdicts_keep_no_payloads_and_are_named_once() -> None:
    """Who only acks never calls flush: what is kept for it must be small, and bounded."""
    state = ConsumerState(cast("Any", FakeNamespace()), QueueConfig(queue_id="q"))
    told: list[int] = []
    ack_writer = AckWriter(state, lambda each: told.append(each.message_id.offset))
    records = []
    try:
        for offset in range(100):
            record = Record()
            records.append(weakref.ref(record))
            late = MarkersMessage(ack_writer, cast("Any", record), offset)
            lease = late._lease = Lease(0, [offset], (b"t" * 16, 1), 0, "me")
            lease.log_begin_ms, lease.log_deadline_ms = 0, 10_000
            ack_writer.handed_out([late])
            ack_writer.check_late([lease], 10_001)
            del late, record
        ack_writer.lost_leases.finish(WAIT_S)
        gc.collect()
        assert not [record for record in records if record() is not None]
        assert told == list(range(100))
        error = ack_writer.lost_leases.take_late()
        assert error is not None
        assert error.messages == tuple(MessageId(0, offset, b"t" * 16, 1) for offset in range(100))
        assert ack_writer.lost_leases.take_late() is None
    finally:
        state.writer.close()


def test_late_verdicts_beyond_the_bound_are_counted() -> None:
    leases = LostLeases("q", None, 10)
    for offset in range(MAX_LATE + 5):
        leases.late(message(offset))
    error = leases.take_late()
    assert error is not None
    assert len(error.messages) == MAX_LATE
    assert str(error).startswith(f"{MAX_LATE + 5} verdicts came after the end of their leases: 0/0")
