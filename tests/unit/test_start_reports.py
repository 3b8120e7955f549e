"""Reports of a batch's STARTs find their messages, whatever fails or comes late."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError
from confluent_kafka import Message as Record

from kafkamq.markers.rules.lease import Lease
from kafkamq.markers.start_reports import RouteStarts

LOG_APPEND_TIME = 2


def route(count: int) -> RouteStarts:
    starts = RouteStarts()
    for number in range(count):
        starts.groups.append([Lease(0, [number], (b"", 0), 0, "me")])
        starts.values.append(b"start %d" % number)
    return starts


def record(number: int, log_ms: int) -> Record:
    return Record(
        value=b"start %d" % number, timestamp=(LOG_APPEND_TIME, log_ms), offset=1000 + number
    )


def numbers(starts: RouteStarts) -> list[tuple[int, int]]:
    found = [(lease, *where) for group, *where in starts.delivered() for lease in group]
    assert all(offset == 1000 + lease.offsets[0] for lease, _, offset in found)
    return [(lease.offsets[0], log_ms) for lease, log_ms, _ in found]


def test_all_are_there() -> None:
    starts = route(3)
    assert [start["value"] for start in starts.starts()] == starts.values
    for number in range(3):
        assert not starts.is_reported
        starts.report(None, record(number, 100 + number))
    assert starts.is_reported
    assert starts.error is None
    assert numbers(starts) == [(0, 100), (1, 101), (2, 102)]


def test_leases_count_from_when_starts_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late their reports are served: a broker may have had them all the while."""
    now_ms = 5000
    monkeypatch.setattr("kafkamq.markers.start_reports.monotonic_ms", lambda: now_ms)
    starts = route(2)
    starts.starts()
    now_ms = 12_000  # the process stood still
    for number in range(2):
        starts.report(None, record(number, 100))
    assert starts.written_ms == 5000


def test_one_has_failed() -> None:
    starts = route(3)
    starts.report(None, record(0, 100))
    starts.report(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), record(1, -1))
    starts.report(None, record(2, 102))
    assert starts.is_reported
    assert starts.error is not None
    assert numbers(starts) == [(0, 100), (2, 102)]


def test_another_order_is_no_other_message() -> None:
    starts = route(2)
    starts.report(None, record(1, 101))
    starts.report(None, record(0, 100))
    assert sorted(numbers(starts)) == [(0, 100), (1, 101)]


def test_what_comes_after_the_end_of_the_batch_is_told() -> None:
    starts, late = route(3), []
    starts.report(None, record(0, 100))
    starts.give_up(lambda lease, log_ms, offset: late.append((lease.offsets[0], log_ms, offset)))
    assert numbers(starts) == [(0, 100)]
    starts.report(None, record(2, 102))
    starts.report(KafkaError(KafkaError._MSG_TIMED_OUT), record(1, -1))
    assert late == [(2, 102, 1002)]


def test_a_batch_that_was_interrupted_has_a_message_without_start() -> None:
    starts = route(2)
    del starts.values[-1]
    starts.report(None, record(0, 100))
    assert numbers(starts) == [(0, 100)]
