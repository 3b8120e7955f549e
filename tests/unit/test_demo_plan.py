"""What the demo sends, and what it makes of the topics while it runs."""

from __future__ import annotations

from collections import Counter

import pytest

from kafkamq.dev.demo.follow import DemoRecorder
from kafkamq.dev.demo.plan import KIND_HEADER, Kind, check_input, from_input, kind_of, synthetic
from kafkamq.errors import ConfigError
from kafkamq.types import Marker, MarkerType, MessageId, Outcome, OutgoingMessage


def test_shares_are_exact_and_follow_the_seed() -> None:
    planned = synthetic(10_000, 7)
    kinds = Counter(item.kind for item in planned)
    assert kinds == {Kind.NORMAL: 9800, Kind.POISON: 100, Kind.SLOW: 100}
    assert sum(item.message.delay > 0 for item in planned) == 200
    assert not any(item.message.delay and item.kind is not Kind.NORMAL for item in planned)
    assert Counter(item.queue_id for item in planned).most_common()[-1][1] == 3333
    assert len({item.message.id for item in planned}) == 10_000
    assert planned == synthetic(10_000, 7)
    assert planned != synthetic(10_000, 8)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 300])
def test_few_messages_have_one_of_each_sort_when_they_can(count: int) -> None:
    planned = synthetic(count, 1)
    kinds = Counter(item.kind for item in planned)
    assert len(planned) == count
    if count >= 10:
        assert all(kinds[kind] for kind in Kind)


def test_the_kind_travels_in_a_header() -> None:
    for item in synthetic(300, 1):
        assert item.message.headers is not None
        assert kind_of(item.message.headers[KIND_HEADER]) is item.kind
    assert kind_of(None) is Kind.NORMAL
    assert kind_of(b"whatever") is Kind.NORMAL


def test_the_users_own_messages_stay_what_they_are() -> None:
    message = OutgoingMessage(payload=b"x", headers={"h": b"1"}, delay=1.5, id="a", key="k")
    (item,) = from_input([("mine", Kind.SLOW, message)], 1)
    assert (item.queue_id, item.kind) == ("mine", Kind.SLOW)
    assert (item.message.payload, item.message.id, item.message.key) == (b"x", "a", "k")
    assert (item.message.delay, item.message.headers) == (1.5, {"h": b"1", KIND_HEADER: b"slow"})


def test_input_that_the_verdict_cannot_tell_apart_is_refused() -> None:
    a = OutgoingMessage(payload=b"1", id="a")
    nameless = OutgoingMessage(payload=b"2")
    check_input([(1, a), (2, nameless), (3, nameless)], source="f")
    with pytest.raises(ConfigError, match=r"f, line 5: the id 'a' was used in line 1"):
        check_input([(1, a), (5, a)], source="f")
    with pytest.raises(ConfigError, match="no message"):
        check_input([], source="f")


def marker(kind: MarkerType, offset: int = 0, **fields: object) -> Marker:
    return Marker(kind, message_id=MessageId(0, offset), **fields)  # type: ignore[arg-type]


def test_the_recorder_is_settled_when_every_copy_has_its_end() -> None:
    recorder = DemoRecorder()
    assert not recorder.snapshot(2).is_settled
    recorder.message((0, 0), is_first=True)
    recorder.marker((1, 0), marker(MarkerType.START))
    assert (recorder.snapshot(2).sent, recorder.snapshot(2).held) == (1, 1)
    recorder.marker((1, 1), Marker(MarkerType.SCHEDULE))
    assert recorder.snapshot(2).sent == 2
    recorder.marker((1, 2), marker(MarkerType.END, outcome=Outcome.NACK))
    assert recorder.snapshot(2).held == 1
    recorder.marker((1, 3), marker(MarkerType.END, outcome=Outcome.REDELIVERED))
    recorder.message((0, 1), is_first=False)
    assert not recorder.snapshot(2).is_settled
    recorder.marker((1, 4), marker(MarkerType.END, 1, outcome=Outcome.ACK))
    assert not recorder.snapshot(2).is_settled
    fired = Marker(
        MarkerType.END, message_id=MessageId(1, 1), of_schedule=True, outcome=Outcome.REDELIVERED
    )
    recorder.marker((1, 5), fired)
    recorder.message((0, 2), is_first=True)
    assert not recorder.snapshot(2).is_settled
    recorder.marker((1, 6), marker(MarkerType.END, 2, outcome=Outcome.ACK))
    assert recorder.snapshot(2).is_settled
    assert not recorder.snapshot(3).is_settled
    assert (recorder.snapshot(2).acked, recorder.snapshot(2).redelivered) == (2, 1)


def test_an_ack_behind_the_trackers_end_changes_nothing() -> None:
    recorder = DemoRecorder()
    recorder.marker((1, 0), marker(MarkerType.END, outcome=Outcome.REDELIVERED))
    recorder.marker((1, 1), marker(MarkerType.END, outcome=Outcome.ACK))
    assert recorder.ended == {(0, 0): Outcome.REDELIVERED}
