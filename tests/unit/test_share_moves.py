"""Records of a share group before the broker gives them up: none goes without a dead letter."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace

import pytest
from tests.unit.share_broker import Broker, open_share, share_group
from tests.waiting import deadline_after, wait_until

from kafkamq import Worker
from kafkamq.errors import DeadlineExceededError
from kafkamq.queue import topic_consumer as base
from kafkamq.queue.dead_letter_writer import TopicOutbox
from kafkamq.queue.sure_writer import Written
from kafkamq.queue.topic_consumer import TopicMessage
from kafkamq.share import backend as share
from kafkamq.testing import MemoryService
from kafkamq.types import DeadLetterReason


def payloads(broker: Broker) -> Counter[bytes | None]:
    return Counter(form.value for form in broker.dead_letters)


def test_what_is_rejected_while_dead_letters_are_refused_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For longer than all deliveries that the broker has: nothing is given up without a letter."""
    with share_group(monkeypatch, lock_s=0.6) as broker:
        broker.refuses_letters = True
        for number in range(5):
            broker.send(b"%d" % number)
        consumer = open_share(broker)
        try:
            for message in take(consumer, 5):
                message.reject("no good")
            wait_until(lambda: len(broker.log) >= 10, "copies at the tail")
            assert broker.dead_letters == []
            broker.mend()
            wait_until(lambda: broker.is_done, "the end of all of them")
        finally:
            consumer.close()
        assert broker.archived == []
        assert set(payloads(broker)) == {b"0", b"1", b"2", b"3", b"4"}
        headers = [dict(form.headers) for form in broker.dead_letters]
        assert {each["kafkamq-reason"] for each in headers} == {b"rejected"}
        assert {each["kafkamq-error"] for each in headers} == {b"no good"}
        assert {each["kafkamq-delivery-count"] for each in headers} == {b"1"}
        assert {each["kafkamq-origin"] for each in headers} == {
            b"t/0/%d/1000" % number for number in range(5)
        }


def test_what_was_delivered_too_often_is_kept_while_dead_letters_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with share_group(monkeypatch, lock_s=0.6) as broker:
        broker.refuses_letters = True
        broker.send(b"poison")
        (entry,) = broker.log
        entry.count = 4  # workers have died of it
        consumer = open_share(broker)
        try:
            wait_until(lambda: len(broker.log) > 1, "a copy at the tail")
            assert consumer.receive(0.1) is None
            broker.mend()
            wait_until(lambda: broker.is_done, "its end")
            assert consumer.receive(0.1) is None
        finally:
            consumer.close()
        assert broker.archived == []
        (letter,) = broker.dead_letters
        headers = dict(letter.headers)
        assert headers["kafkamq-reason"] == b"max-deliveries"
        assert headers["kafkamq-delivery-count"] == b"4"


def test_a_close_while_dead_letters_are_refused_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with share_group(monkeypatch, lock_s=30.0) as broker:
        broker.refuses_letters = True
        broker.send(b"poison")
        (entry,) = broker.log
        entry.count = 4
        consumer = open_share(broker)
        wait_until(lambda: consumer._moves.open_count, "its dead letter")
        with pytest.raises(Exception, match="are not confirmed"):
            consumer.close(timeout=0.5)
        assert broker.archived == []
        assert [entry.state for entry in broker.log] == ["ACCEPT", ""]
        broker.mend()
        consumer = open_share(broker)
        wait_until(lambda: broker.dead_letters and broker.is_done, "its dead letter")
        consumer.close()
        assert (payloads(broker), broker.archived) == ({b"poison": 1}, [])


def test_what_no_handler_saw_is_no_dead_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer's batch that is more than handlers can do within a few locks."""
    service = MemoryService()
    queue = service.queue("q", backend="share", topic="t")
    seen: Counter[bytes] = Counter()

    @queue.handler(concurrency=8)
    def handle(payload: bytes) -> None:
        time.sleep(0.1)
        seen[payload] += 1

    with share_group(monkeypatch, lock_s=0.8) as broker:
        for number in range(300):
            broker.send(b"%d" % number)
        service.open_consumer = lambda spec, plan: open_share(  # type: ignore[method-assign]
            broker, concurrency=plan.concurrency
        )
        with Worker(service, drain=1) as worker:
            wait_until(lambda: worker.handled >= 300 and broker.is_done, "all of them")
        assert (broker.dead_letters, broker.archived) == ([], [])
        assert len(seen) == 300


def test_a_nack_in_the_last_delivery_but_one_costs_no_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Given back unseen three times, nacked once: a handler has seen it once of four."""
    with share_group(monkeypatch, lock_s=30.0) as broker:
        broker.send(b"x")
        consumer = open_share(broker)
        try:
            give_back_unseen(consumer, 3)
            for delivery in range(1, 5):
                (message,) = take(consumer, 1)
                assert message.delivery_count == delivery
                message.nack(reason="again")
            wait_until(lambda: broker.is_done, "its end")
        finally:
            consumer.close()
        assert broker.archived == []
        (letter,) = broker.dead_letters
        assert dict(letter.headers)["kafkamq-error"] == b"again"
        assert dict(letter.headers)["kafkamq-delivery-count"] == b"4"


def test_an_ack_that_came_too_late_does_not_make_unseen_deliveries_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its message would be a dead letter in its second delivery to a handler."""
    with share_group(monkeypatch, lock_s=30.0) as broker:
        broker.send(b"x")
        consumer = open_share(broker)
        try:
            give_back_unseen(consumer, 3)
            (message,) = take(consumer, 1)
            broker.log[0].until_s = 0.0
            message.ack()
            (message,) = take(consumer, 1)
            assert message.delivery_count == 2
            message.ack()
            wait_until(lambda: broker.is_done, "its end")
        finally:
            consumer.close()
        assert (broker.dead_letters, broker.archived) == ([], [])


def test_members_that_leave_slowly_do_not_keep_others_from_copying(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else what was on its last delivery but one would be a dead letter that no handler saw."""
    monkeypatch.setattr(share, "QUIET_S", 0.2)
    with share_group(monkeypatch, lock_s=60.0) as broker:
        broker.lets_leave.clear()
        broker.send(b"x")
        (entry,) = broker.log
        entry.count = 3
        consumer = open_share(broker)  # of several members, of which one gets it
        try:
            wait_until(lambda: entry.count == 4, "its delivery")
            with pytest.raises(DeadlineExceededError, match="leaving the share group"):
                consumer.close(timeout=2.0)
        finally:
            broker.lets_leave.set()
        assert [each.form.value for each in broker.log] == [b"x", b"x"]
        assert broker.log[0].state == "ACCEPT"


def test_a_letter_that_is_too_large_refers_to_its_payload() -> None:
    record = SimpleNamespace(
        topic=lambda: "t",
        partition=lambda: 3,
        offset=lambda: 7,
        key=lambda: b"k",
        value=lambda: b"x" * 1000,
        headers=lambda: [("h", b"1"), ("kafkamq-origin", b"other/1/2/3")],
        timestamp=lambda: (1, 1000),
    )
    made: list = []
    box = TopicOutbox.__new__(TopicOutbox)
    box._topic, box._queue_id = "dead_letters", "q"
    write = lambda make, *_: made.append(make) or Written()  # noqa: E731
    box._writer = SimpleNamespace(write=write)  # type: ignore[assignment]
    acknowledger = SimpleNamespace(queue_id="q")
    message = TopicMessage(acknowledger, record, place=None)  # type: ignore[arg-type]
    box.write(message, DeadLetterReason.REJECTED, "no good")
    whole, referring, bare = (made[0](refusals) for refusals in range(3))
    assert (whole.key, whole.value) == (b"q\x00k", b"x" * 1000)
    assert dict(whole.headers)["kafkamq-origin"] == b"t/3/7/1000"  # not another queue's
    assert (referring.key, referring.value) == (b"q\x00k", None)
    assert dict(referring.headers)["h"] == b"1"
    assert dict(referring.headers)["kafkamq-payload-at"] == b"t/3/7/1000"
    assert (bare.key, bare.value) == (None, None)
    assert "h" not in dict(bare.headers)
    assert dict(bare.headers)["kafkamq-queue-id"] == b"q"


def give_back_unseen(consumer, times: int) -> None:
    """A message that is there; the broker counts these deliveries."""
    for _ in range(times):
        (message,) = take(consumer, 1)
        with consumer._changed:
            consumer._held.clear()
            consumer._give_back(message)


def take(consumer, count: int) -> list:
    found: list = []
    deadline_s = deadline_after(30)
    while len(found) < count:
        assert time.monotonic() < deadline_s
        found += consumer.receive_many(count - len(found), 0.1)
    return found


def test_dead_letters_that_are_not_written_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are held with their payloads: beyond it nothing more is handed out."""
    monkeypatch.setattr(base, "MAX_UNWRITTEN", 2)
    with share_group(monkeypatch, lock_s=30.0) as broker:
        broker.refuses_letters = True
        for number in range(3):
            broker.send(b"%d" % number)
        consumer = open_share(broker)
        try:
            for message in [*take(consumer, 1), *take(consumer, 1)]:
                message.reject("no good")
            assert consumer.receive_many(1, timeout=0) == []
            assert len(consumer._ready) == 1
            broker.mend()
            (third,) = take(consumer, 1)
            third.ack(wait=True)
        finally:
            consumer.close()
