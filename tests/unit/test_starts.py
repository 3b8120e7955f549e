"""Reports of STARTs find their messages, whatever fails or comes late."""

from __future__ import annotations

from dataclasses import replace

import pytest
from confluent_kafka import KafkaError
from tests.unit.worker_parts import FACTS, FixedNamespace, Parts, deliver, record, starts_of

from kafkamq.markers.rules.pipeline import RunState
from kafkamq.queue.wire.keys import marker_partition
from kafkamq.transport.producer import NEVER_REPORTED

T_MS = 30_000


def route_of(partition: int) -> int:
    return marker_partition(partition, 0, FACTS.marker_partitions)


# Partitions of the queue that go to marker partitions of their own.
ONE = 0
OTHER = next(p for p in range(1, 99) if route_of(p) != route_of(ONE))
TIMED_OUT = KafkaError(KafkaError._MSG_TIMED_OUT)


def parts(**queue: object) -> Parts:
    return Parts(FixedNamespace(), redelivery_timeout_ms=T_MS, **queue)


def held(worker: Parts) -> list[tuple[int, int]]:
    leases = worker.state.leases.open()
    return sorted((lease.partition, offset) for lease in leases for offset in lease.held)


def test_all_are_there() -> None:
    worker = parts()
    worker.poll(*map(record, (10, 11, 12)))
    step = worker.start()
    for start in starts_of(step):
        assert worker.starter.is_waiting
        assert not worker.see()
        deliver(start)
    assert not worker.see()
    assert not worker.starter.is_waiting
    assert worker.commit() == [(0, 10), (0, 11), (0, 12)]


def test_leases_count_from_when_starts_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late their reports are served: a broker may have had them all the while."""
    now_ms = 5000
    monkeypatch.setattr("kafkamq.markers.starts.monotonic_ms", lambda: now_ms)
    worker = parts()
    worker.poll(record(10))
    step = worker.start()
    now_ms = 12_000  # the process stood still
    deliver(*starts_of(step))
    worker.see()
    (lease,) = worker.state.leases.open()
    assert (lease.begin_ms, lease.deadline_ms) == (5000, 5000 + T_MS)


def test_one_has_failed() -> None:
    worker = parts()
    worker.poll(*map(record, (10, 11, 12)))
    first, second, third = starts_of(worker.start())
    deliver(first, third)
    second.reported(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), None)
    assert worker.see() == [second]
    ((run,),) = [list(each.runs) for each in (second,)]
    gone, position = worker.pipeline.give_up(run)
    worker.starter.give_up(gone)
    assert position == 10
    assert held(worker) == []
    assert worker.state.leases.may_be_lapsed  # two are in the log: polled again, these count


def test_another_order_is_no_other_message() -> None:
    worker = parts()
    worker.poll(record(10), record(11))
    first, second = starts_of(worker.start())
    deliver(second, log_ms=101, offset=1)
    deliver(first, log_ms=100, offset=0)
    worker.see()
    found = {lease.offsets[0]: lease for lease in worker.state.leases.open()}
    assert [(found[at].log_begin_ms, found[at].start_offset) for at in (10, 11)] == [
        (100, 0),
        (101, 1),
    ]


def test_what_comes_after_the_end_of_its_run_is_remembered() -> None:
    worker = parts()
    worker.poll(record(10), record(11))
    first, second = starts_of(worker.start())
    (run,) = worker.pipeline.under_way()
    worker.starter.give_up(worker.pipeline.give_up(run)[0])
    assert not worker.state.leases.may_be_lapsed
    second.reported(TIMED_OUT, None)
    worker.see()
    assert not worker.state.leases.may_be_lapsed
    deliver(first)
    worker.see()
    assert worker.state.leases.may_be_lapsed


def test_the_same_start_of_two_runs_is_told_apart() -> None:
    """A message that is STARTed again, under the same id, has an equal record (no value tells)."""
    worker = parts()
    worker.poll(record(10))
    (former,) = starts_of(worker.start())
    (run,) = worker.pipeline.under_way()
    worker.pipeline.give_up(run)
    worker.poll(record(10))
    (latter,) = starts_of(worker.start())
    assert former.value == latter.value
    deliver(former)
    worker.see()
    assert [each.state for each in worker.pipeline.under_way()] == [RunState.SENT]
    deliver(latter)
    worker.see()
    assert [each.state for each in worker.pipeline.under_way()] == [RunState.IN_LOG]


def test_what_its_client_never_reports_has_failed() -> None:
    worker = parts()
    worker.poll(record(10))
    (start,) = starts_of(worker.start())
    worker.starter.wait(0.0)  # no client has it
    assert worker.see() == [start]
    assert start.error is NEVER_REPORTED


def test_a_second_start_goes_where_the_first_one_is() -> None:  # R26
    """Marker partitions may have been added since: nobody would end the first one."""
    worker = parts()
    moved = next(
        number
        for number in range(99)
        if marker_partition(number, 0, FACTS.marker_partitions) != marker_partition(number, 0, 64)
    )
    worker.poll(record(10, partition=moved))
    first = worker.start()
    deliver(*starts_of(first))
    worker.see()
    (run,) = worker.pipeline.under_way()
    worker.starter.give_up(worker.pipeline.give_up(run)[0])
    worker.state.facts = replace(worker.state.facts, marker_partitions=64)
    worker.poll(record(10, partition=moved), record(11, partition=moved))
    again = worker.start()
    routes = {
        start.leases[0].offsets[0]: number
        for number, starts in again.starts.items()
        for start in starts
    }
    assert routes == {
        10: next(iter(first.starts)),
        11: marker_partition(moved, 11, 64),
    }


# What waits for one marker partition.


def test_what_is_reported_goes_on_and_the_rest_follows() -> None:
    worker = parts()
    worker.poll(*(record(at, partition=p) for p, at in ((ONE, 10), (OTHER, 20), (ONE, 11))))
    step = worker.start()
    deliver(*step.starts[route_of(ONE)])
    worker.see()
    assert worker.commit() == [(ONE, 10), (ONE, 11)]
    assert worker.starter.late_partitions(0) == {OTHER}
    deliver(*step.starts[route_of(OTHER)])
    worker.see()
    assert worker.starter.late_partitions(0) == set()
    assert worker.commit() == [(OTHER, 20)]


def test_a_marker_partition_that_is_known_to_be_late_is_not_waited_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    like_other = next(p for p in range(OTHER + 1, 99) if route_of(p) == route_of(OTHER))
    now_ms = 1000
    monkeypatch.setattr("kafkamq.markers.starts.monotonic_ms", lambda: now_ms)
    worker = parts()
    worker.poll(record(20, partition=OTHER))
    worker.start()
    now_ms = 5000
    worker.poll(record(10, partition=ONE), record(30, partition=like_other))
    worker.start()
    assert worker.starter.late_partitions(1000) == {OTHER, like_other}


def test_what_went_to_another_member_while_it_waited_is_not_handed_out() -> None:
    worker = parts()
    worker.poll(record(10, partition=ONE), record(20, partition=OTHER))
    step = worker.start()
    deliver(*step.starts[route_of(ONE)])
    worker.see()
    worker.starter.give_up(worker.pipeline.revoked([OTHER]))
    assert worker.commit() == [(ONE, 10)]
    assert worker.starter.late_partitions(0) == set()
    deliver(*step.starts[route_of(OTHER)])  # polled again, its first START counts
    worker.see()
    assert worker.state.leases.may_be_lapsed
    assert held(worker) == [(ONE, 10)]
    assert OTHER not in worker.pipeline.committable().offsets


def test_a_start_that_is_confirmed_behind_its_lease_is_not_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = parts()
    worker.poll(record(10))
    step = worker.start()
    deliver(*starts_of(step))
    worker.see()
    written_ms = starts_of(step)[0].written_ms
    monkeypatch.setattr("kafkamq.markers.starts.monotonic_ms", lambda: written_ms + T_MS)
    worker.pipeline.committing(worker.pipeline.committable())
    assert worker.pipeline.covered.offsets == {0: 11}  # committed all the same
    assert worker.starter.finish(worker.pipeline.committed()) == []
