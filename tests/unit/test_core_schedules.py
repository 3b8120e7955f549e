"""R19, and what else a SCHEDULE does: fire, be carried, be cancelled."""

from __future__ import annotations

from tests.unit.core_fold import START_MS, Fold, message

from kafkamq.markers.rules.delivery import Carry, DueCause, Settle
from kafkamq.markers.rules.snapshot import restore_tracker, take_snapshot
from kafkamq.types import MessageId, Outcome

CARRY_MS = 10_000


def test_r14_a_schedule_fires_once_its_delay_has_passed() -> None:
    fold = Fold()
    first = fold.schedule(START_MS, 5000)
    fold.tick(START_MS + 5000)
    assert fold.plan() == []
    fold.tick(START_MS + 5001)
    settle = fold.settle(first, of_schedule=True)
    assert settle.cause is DueCause.SCHEDULED
    assert (settle.start_offset, settle.begin_ms) == (first, START_MS)
    assert settle.deadline_ms == START_MS + 5000


def test_r19_one_that_grows_old_is_carried_with_what_remains() -> None:
    fold = Fold(carry_after_ms=CARRY_MS)
    first = fold.schedule(START_MS, 25_000)
    fold.tick(START_MS + CARRY_MS)
    assert fold.plan() == []
    fold.tick(START_MS + CARRY_MS + 1)
    assert fold.plan() == [Carry(first, message(first), 25_000 - CARRY_MS - 1)]


def test_r19_the_carried_one_replaces_it_and_is_carried_again() -> None:
    fold = Fold(carry_after_ms=CARRY_MS)
    first = fold.schedule(START_MS, 25_000)
    fold.tick(START_MS + CARRY_MS + 1)
    fold.tracker.plan()
    at_ms = START_MS + CARRY_MS + 2
    second = fold.schedule(at_ms, 25_000 - CARRY_MS - 1, first=first)
    assert fold.plan() == []
    assert fold.tracker.committable_offset() == second
    fold.tick(at_ms + CARRY_MS + 1)
    (carry,) = fold.plan()
    assert (carry.start_offset, carry.message_id) == (second, message(first))
    third = fold.schedule(at_ms + CARRY_MS + 1, 100, first=first)
    fold.tick(at_ms + CARRY_MS + 102)
    (settle,) = fold.plan()
    assert (settle.start_offset, settle.message_id) == (third, message(first))


def test_r19_a_short_one_is_never_carried() -> None:
    fold = Fold(carry_after_ms=CARRY_MS)
    fold.schedule(START_MS, CARRY_MS)
    fold.tick(START_MS + CARRY_MS + 1)
    assert [type(action) for action in fold.plan()] == [Settle]


def test_r19_leases_are_never_carried() -> None:
    fold = Fold(carry_after_ms=CARRY_MS)
    fold.start(START_MS, 1, timeout=60_000)
    fold.start(START_MS, 2)
    fold.nack(START_MS, 2, delay=60_000)
    fold.tick(START_MS + 3 * CARRY_MS)
    assert fold.plan() == []


def test_r19_one_that_falls_due_while_it_is_to_be_carried_fires() -> None:
    fold = Fold(carry_after_ms=CARRY_MS)
    first = fold.schedule(START_MS, CARRY_MS + 500)
    fold.tick(START_MS + CARRY_MS + 100)
    assert isinstance(fold.tracker.plan()[0], Carry)
    fold.tick(START_MS + CARRY_MS + 501)
    (settle,) = fold.tracker.plan()
    assert isinstance(settle, Settle)
    fold.schedule(START_MS + CARRY_MS + 502, 400, first=first)  # the carry comes too late
    assert list(fold.tracker.plan()) == []
    fold.end(START_MS + CARRY_MS + 503, Outcome.REDELIVERED, first, of_schedule=True)
    assert fold.tracker.scheduled() == set()


def test_r19_a_carried_one_whose_first_record_is_gone_is_taken_as_it_is() -> None:
    fold = Fold(next_offset=900)
    fold.schedule(START_MS, 1000, first=3)
    assert fold.tracker.scheduled() == {MessageId(0, 3)}
    fold.tick(START_MS + 1001)
    assert fold.settle(3, of_schedule=True).start_offset == 900


def test_r19_a_cancel_names_the_first_record_whatever_was_carried() -> None:
    fold = Fold(carry_after_ms=CARRY_MS)
    first = fold.schedule(START_MS, 25_000)
    fold.schedule(START_MS + CARRY_MS + 1, 15_000, first=first)
    fold.end(START_MS + CARRY_MS + 2, Outcome.ACK, first, of_schedule=True)
    assert fold.tracker.scheduled() == set()
    assert fold.tracker.committable_offset() == fold.offset


def test_r19_the_age_is_kept_through_a_state_store() -> None:
    fold = Fold(carry_after_ms=CARRY_MS)
    first = fold.schedule(START_MS, 25_000)
    snapshot = take_snapshot(fold.tracker)
    restored = restore_tracker(
        snapshot.index, snapshot.changed.__getitem__, partition=0, carry_after_ms=CARRY_MS
    )
    restored.apply(1, START_MS + CARRY_MS + 1, None)
    assert restored.plan() == [Carry(first, message(first), 15_000 - 1)]
