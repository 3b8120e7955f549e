"""R15-R17 and R20: what is planned, what counts as asked, when a tracker is live, its position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from tests.unit.core_fold import START_MS, Fold, T, message

from kafkamq.markers.rules.delivery import Carry, DueCause, Settle, each_message, settled_of
from kafkamq.markers.rules.hold import CHUNK_OFFSETS, MAX_HOLDS, Hold
from kafkamq.markers.rules.redelivery import MAX_PLAN, RedeliveryTracker
from kafkamq.types import Marker, MarkerType, MessageBatch, MessageId, Outcome

ENGINE = ("engine-1", 7)


def two_due(**options: object) -> Fold:
    fold = Fold(**options)
    fold.start(START_MS, 1)
    fold.start(START_MS, 2)
    fold.start(START_MS, 3, timeout=60_000)
    fold.crawl(START_MS, START_MS + T + 1)
    return fold


def test_r15_what_was_asked_for_is_not_asked_for_again() -> None:
    fold = two_due()
    assert {action.message_id.offset for action in fold.tracker.plan()} == {1, 2}
    assert list(fold.tracker.plan()) == []
    fold.crawl(START_MS + T + 1, START_MS + 30_000)  # never by time
    assert list(fold.tracker.plan()) == []


def test_r15_a_due_entry_stays_until_its_end_is_read() -> None:
    fold = two_due()
    fold.tracker.plan()
    assert message(1) in fold.tracker.in_progress()
    assert fold.tracker.committable_offset() == 0
    fold.redelivered(START_MS + T + 2, 1)
    assert message(1) not in fold.tracker.in_progress()
    assert fold.tracker.committable_offset() == 1


@pytest.mark.parametrize("outcome", [Outcome.ACK, Outcome.NACK, Outcome.REJECT, Outcome.RELEASE])
def test_r15_no_verdict_of_a_worker_clears_a_due_entry(outcome: Outcome) -> None:
    fold = two_due()
    fold.end(START_MS + T + 2, outcome, 1)
    assert fold.due() == {1, 2}
    fold.tracker.plan()
    fold.end(START_MS + T + 3, outcome, 1)
    assert fold.due() == set()
    assert message(1) in fold.tracker.in_progress()


def test_r15_a_known_abort_asks_again_for_those_alone() -> None:
    fold = two_due()
    first, second = fold.tracker.plan()
    fold.tracker.aborted([first])
    assert [action.message_id for action in fold.tracker.plan()] == [first.message_id]
    fold.tracker.aborted([second])
    fold.redelivered(START_MS + T + 2, 2)
    assert list(fold.tracker.plan()) == []


def test_r15_an_abort_of_what_ended_meanwhile_changes_nothing() -> None:
    fold = two_due()
    actions = fold.tracker.plan()
    fold.redelivered(START_MS + T + 2, 1)
    fold.redelivered(START_MS + T + 2, 2)
    fold.tracker.aborted(actions)
    fold.tracker.check()
    assert fold.plan() == []


def test_r15_the_abort_of_a_carry_does_not_ask_again_for_the_settlement() -> None:
    """The carry's transaction aborts after its SCHEDULE fell due and was planned as due."""
    fold = Fold(carry_after_ms=100)
    fold.schedule(START_MS, 1000)
    fold.tick(START_MS + 101)
    (carry,) = fold.tracker.plan()
    assert isinstance(carry, Carry)
    fold.tick(START_MS + 1001)
    (settle,) = fold.tracker.plan()
    assert isinstance(settle, Settle)
    fold.tracker.aborted([carry])
    assert list(fold.tracker.plan()) == [], "the settlement is still under way"
    fold.tracker.aborted([settle])
    assert list(fold.tracker.plan()) == [settle]


def test_r15_the_abort_of_an_older_delivery_does_not_touch_the_newer_one() -> None:
    fold = Fold()
    fold.start(START_MS)
    fold.crawl(START_MS, START_MS + T + 1)
    (old,) = fold.tracker.plan()
    fold.redelivered(START_MS + T + 1)
    at_ms = START_MS + T + 61_002
    fold.start(at_ms)  # forgotten by now (R12)
    fold.crawl(at_ms, at_ms + T + 1)
    (new,) = fold.tracker.plan()
    fold.tracker.aborted([old])
    assert list(fold.tracker.plan()) == []
    fold.tracker.aborted([new])
    assert list(fold.tracker.plan()) == [new]


def test_r15_a_carry_is_asked_for_once_too() -> None:
    fold = Fold(carry_after_ms=1000)
    first = fold.schedule(START_MS, 60_000)
    fold.tick(START_MS + 1001)
    assert list(fold.tracker.plan()) == [Carry(first, message(first), 60_000 - 1001)]
    assert list(fold.tracker.plan()) == []


# ---- R16


def test_r16_a_plan_has_its_limit_and_the_rest_comes_next() -> None:
    fold = Fold()
    for number in range(30):
        fold.start(START_MS, (number % 3) * CHUNK_OFFSETS + number)
    fold.crawl(START_MS, START_MS + T + 1)
    offsets: list[int] = []
    for size in (12, 12, 6, 0):
        actions = fold.tracker.plan(limit=12)
        assert len(actions) == size
        planned = [action.start_offset for action in actions]
        assert planned == sorted(planned)
        offsets += planned
    assert sorted(offsets) == list(range(30))
    fold.tracker.check()


def test_r16_fifty_thousand_at_most() -> None:
    assert MAX_PLAN == 50_000
    tracker = RedeliveryTracker()
    for number in range(MAX_PLAN + 5):
        tracker.apply(number, START_MS, _start(number))
    for step in range(1, 8):
        tracker.apply(MAX_PLAN + 4 + step, START_MS + step * 500, None)
    assert len(tracker.plan()) == MAX_PLAN
    assert len(tracker.plan()) == 5


def _start(number: int) -> Marker:
    return Marker(MarkerType.START, message(number), T)


# ---- R32


def batch_due(*batches: MessageBatch) -> Fold:
    fold = Fold()
    for batch in batches:
        fold.record(START_MS, Marker(MarkerType.START, None, T, batches=(batch,), consumer_id="a"))
    fold.crawl(START_MS, START_MS + T + 1)
    return fold


def of(actions: Iterable[Settle | Carry]) -> list[int]:
    return [action.message_id.offset for action in each_message(actions)]


def test_r32_an_action_is_a_copy_of_a_holds_bits() -> None:
    fold = batch_due(MessageBatch(0, b"", 0, 60, (1 << 10) - 1))
    first, second = fold.tracker.plan()
    assert isinstance(first, Settle)
    assert isinstance(second, Settle)
    assert (first.message_id.offset, first.bits) == (60, 0b1111)
    assert (second.message_id.offset, second.bits) == (64, 0b111111)
    fold.redelivered(START_MS + T + 2, 61)
    assert (first.message_id.offset, first.bits) == (60, 0b1111)
    assert fold.tracker.open_count() == 9


def test_r32_actions_of_one_start_come_by_their_lowest_bits() -> None:
    """Two of its holds lie between each other: one was renewed, and fell due by itself."""
    fold = Fold()
    batch = MessageBatch(0, b"", 0, 0, 0b1111)
    fold.record(START_MS, Marker(MarkerType.START, None, T, batches=(batch,), consumer_id="a"))
    inner = MessageBatch(0, b"", 0, 1, 0b11)
    fold.record(START_MS, Marker(MarkerType.END, None, batches=(inner,), outcome=Outcome.REJECT))
    fold.crawl(START_MS, START_MS + T + 1)
    planned = [(action.message_id.offset, action.bits) for action in settles(fold)]
    assert planned == [(0, 0b1001), (1, 0b11)]


def settles(fold: Fold) -> list[Settle]:
    return [action for action in fold.tracker.plan() if isinstance(action, Settle)]


def test_r16_a_plan_may_be_cut_at_any_bit() -> None:
    fold = batch_due(MessageBatch(0, b"", 0, 60, (1 << 10) - 1))
    assert of(fold.tracker.plan(limit=7)) == [60, 61, 62, 63, 64, 65, 66]
    fold.tracker.check()
    assert of(fold.tracker.plan(limit=2)) == [67, 68]
    assert of(fold.tracker.plan()) == [69]
    assert fold.tracker.due_count() == 10


def test_r32_what_aborted_is_asked_again_by_its_bits() -> None:
    fold = batch_due(MessageBatch(0, b"", 0, 0, 0b11111))
    (action,) = fold.tracker.plan()
    fold.tracker.aborted([each_message([action])[3]])
    fold.tracker.check()
    assert of(fold.tracker.plan()) == [3]
    fold.tracker.aborted([action])
    assert sorted(of(fold.tracker.plan())) == [0, 1, 2, 3, 4]


def test_r32_what_aborted_in_pieces_is_asked_again_in_pieces() -> None:
    fold = batch_due(MessageBatch(0, b"", 0, 0, (1 << 320) - 1))
    planned = each_message(fold.tracker.plan())
    fold.tracker.aborted(planned[::-2])  # the last page first: it moves to another leaf then
    fold.tracker.check()
    assert sorted(of(fold.tracker.plan())) == list(range(1, 320, 2))


def test_r32_rows_that_aborted_are_one_action_again() -> None:
    """A settlement names what it did not do by messages: the holds do not fall apart for it."""
    fold = batch_due(MessageBatch(0, b"", 0, 0, (1 << 100) - 1))
    rows = each_message(fold.tracker.plan())
    for left in (rows, rows, rows[40:]):
        fold.tracker.aborted(left)
        fold.tracker.check()
        planned = [(action.message_id.offset, action.bits.bit_count()) for action in settles(fold)]
        assert planned == ([(0, 64), (64, 36)] if left is rows else [(40, 24), (64, 36)])


def test_of_a_plan_that_was_cut_the_messages_that_are_done_are_known() -> None:
    fold = batch_due(MessageBatch(0, b"", 0, 0, (1 << 100) - 1))
    planned = list(fold.tracker.plan())
    rows = each_message(planned)
    assert sorted(count for _, count in settled_of(planned, ())) == [36, 64]
    assert [count for _, count in settled_of(planned, rows[40:])] == [40]
    assert list(settled_of(planned, rows)) == []


def test_r31_what_splits_off_keeps_all_facts() -> None:
    fold = Fold()
    batch = MessageBatch(0, b"", 0, 0, 0b111)
    first = fold.record(START_MS, Marker(MarkerType.START, None, T, batches=(batch,)))
    nack = Marker(MarkerType.END, None, 40, batches=(batch,), outcome=Outcome.NACK)
    verdict = fold.record(START_MS + 10, nack)
    fold.tick(START_MS + 60)
    for offset in range(3):
        assert list(fold.tracker.plan(limit=1)) == [
            Settle(
                first,
                message(offset),
                False,
                DueCause.NACKED,
                START_MS,
                START_MS + 60,
                START_MS + 50,
                verdict,
            )
        ]


def test_r27_a_record_means_all_of_its_batches() -> None:
    fold = Fold()
    batches = MessageBatch(0, b"", 0, 0, 0b11), MessageBatch(1, b"", 0, 9, 0b1)
    fold.record(START_MS, Marker(MarkerType.START, None, T, batches=batches))
    expected = {message(0), message(1), MessageId(1, 9)}
    assert fold.tracker.in_progress() == expected
    fold.record(START_MS, Marker(MarkerType.END, None, batches=batches))
    assert fold.tracker.in_progress() == set()


def test_r27_a_start_of_what_is_held_in_part_takes_up_the_rest() -> None:
    fold = Fold()
    fold.start(START_MS, 1)
    batch = MessageBatch(0, b"", 0, 0, 0b111)
    fold.record(START_MS + 10, Marker(MarkerType.START, None, T, batches=(batch,)))
    assert fold.tracker.in_progress() == {message(0), message(1), message(2)}
    fold.crawl(START_MS + 10, START_MS + T + 11)
    starts = {of([action])[0]: action.start_offset for action in each_message(fold.plan())}
    assert starts == {0: 1, 1: 0, 2: 1}


def test_r07_a_keepalive_of_messages_renews_these_alone() -> None:
    fold = Fold()
    for offset in (1, 2, 3):
        fold.start(START_MS, offset)
    batch = MessageBatch(0, b"", 0, 1, 0b11)
    marker = Marker(MarkerType.KEEPALIVE, None, 2 * T, batches=(batch,), consumer_id="a")
    fold.record(START_MS + 10, marker)
    assert [fold.lease_end(of) - START_MS for of in (1, 2, 3)] == [2 * T + 10, 2 * T + 10, T]


def test_r31_what_splits_off_has_its_own_grace() -> None:
    fold = Fold()
    batch = MessageBatch(0, b"", 0, 0, 0b11)
    fold.record(START_MS, Marker(MarkerType.START, None, T, batches=(batch,), consumer_id="a"))
    fold.tick(START_MS + 2 * T)  # a gap: both have their grace
    fold.keepalive(START_MS + 2 * T, 1, by="b")
    fold.tick(START_MS + 4 * T)  # R3: armed again for the one that was renewed
    assert fold.due() == {0}
    assert fold.state(1) == "held"


def test_r12_a_start_takes_up_those_of_a_batch_that_have_not_ended() -> None:
    fold = Fold()
    fold.ack(START_MS, 2)
    batch = MessageBatch(0, b"", 0, 0, 0b1111)
    fold.record(START_MS, Marker(MarkerType.START, None, T, batches=(batch,), consumer_id="a"))
    assert [fold.state(number) for number in range(4)] == ["held", "held", "due", "held"]
    assert fold.settle(2).cause is DueCause.ALREADY_ENDED


def test_r09_a_late_verdict_on_a_batch_is_one_for_each_message_that_is_due() -> None:
    fold = batch_due(MessageBatch(0, b"", 0, 0, 0b111))
    batch = MessageBatch(0, b"", 0, 1, 0b111)
    fold.record(START_MS + T + 1, Marker(MarkerType.END, None, batches=(batch,), consumer_id="a"))
    assert fold.tracker.late_verdicts == 2
    assert fold.state(3) == "ended"


# ---- R17


def test_r17_nothing_is_planned_before_the_engine_read_its_own_tick() -> None:
    fold = two_due(engine=ENGINE)
    assert not fold.tracker.is_live
    assert list(fold.tracker.plan()) == []
    fold.tick(START_MS + T + 2, engine="engine-1", epoch=6)  # its own, of an earlier start
    fold.tick(START_MS + T + 2, engine="engine-2", epoch=7)
    assert list(fold.tracker.plan()) == []
    fold.tick(START_MS + T + 2, engine="engine-1", epoch=7)
    assert fold.tracker.is_live
    assert len(fold.tracker.plan()) == 2


def test_r17_nothing_is_carried_either() -> None:
    fold = Fold(engine=ENGINE, carry_after_ms=1000)
    fold.schedule(START_MS, 60_000)
    fold.tick(START_MS + 1001)
    assert list(fold.tracker.plan()) == []
    fold.tick(START_MS + 1002, engine="engine-1", epoch=7)
    assert len(fold.tracker.plan()) == 1


def test_r17_what_a_predecessor_settled_is_not_fired_again() -> None:
    fold = two_due(engine=ENGINE)
    fold.redelivered(START_MS + T + 1, 1)  # by the predecessor, before our init
    fold.tick(START_MS + T + 2, engine="engine-1", epoch=7)
    assert [action.message_id for action in fold.tracker.plan()] == [message(2)]


def test_r17_later_ticks_ask_for_nothing_again() -> None:
    fold = two_due(engine=ENGINE)
    fold.tick(START_MS + T + 2, engine="engine-1", epoch=7)
    fold.tracker.plan()
    fold.tick(START_MS + T + 3, engine="engine-1", epoch=7)
    assert list(fold.tracker.plan()) == []


def test_r17_a_tracker_without_an_engine_is_live() -> None:
    assert RedeliveryTracker().is_live


# ---- R20


def test_r20_position_is_the_smallest_start_of_an_open_entry() -> None:
    fold = Fold(next_offset=100)
    assert fold.tracker.committable_offset() == 100
    fold.tick(START_MS)
    assert fold.tracker.committable_offset() == 101
    first = fold.start(START_MS, 1)
    second = fold.start(START_MS, CHUNK_OFFSETS)
    third = fold.schedule(START_MS, 60_000)
    fold.start(START_MS, 1)  # a second START moves nothing
    assert fold.tracker.committable_offset() == first
    fold.ack(START_MS, 1)
    assert fold.tracker.committable_offset() == second
    fold.nack(START_MS, CHUNK_OFFSETS, delay=1000)  # waiting is open
    assert fold.tracker.committable_offset() == second
    fold.tick(START_MS + 1001)  # due is open
    assert fold.tracker.committable_offset() == second
    fold.redelivered(START_MS + 1001, CHUNK_OFFSETS)
    assert fold.tracker.committable_offset() == third
    fold.end(START_MS + 1001, Outcome.ACK, third, of_schedule=True)
    assert fold.tracker.committable_offset() == fold.offset


def test_r20_a_carried_schedule_lets_the_position_go_on() -> None:
    fold = Fold()
    first = fold.schedule(START_MS, 60_000)
    other = fold.start(START_MS, 1)
    assert fold.tracker.committable_offset() == first
    fold.schedule(START_MS, 50_000, first=first)
    assert fold.tracker.committable_offset() == other


def test_r20_a_restart_from_there_rebuilds_every_open_entry() -> None:
    fold = Fold()
    fold.start(START_MS, 1)
    fold.ack(START_MS, 1)
    fold.start(START_MS + 100, 2)
    fold.keepalive(START_MS + 200)
    fold.start(START_MS + 300, 3)
    fold.nack(START_MS + 400, 3, delay=9000)
    fold.schedule(START_MS + 500, 9000)
    resume = fold.tracker.committable_offset()
    again = Fold(next_offset=resume)
    for offset, at_ms, marker in fold.records[resume:]:
        assert again.record(at_ms, marker) == offset
    assert again.tracker.in_progress() == fold.tracker.in_progress()
    assert again.tracker.scheduled() == fold.tracker.scheduled()
    for of in (2, 3):
        left = fold.lease_end(of) - fold.tracker.clock_ms
        assert again.lease_end(of) - again.tracker.clock_ms == left


def test_r20_records_below_the_position_were_folded_already() -> None:
    tracker = RedeliveryTracker(10)
    tracker.apply(9, START_MS, _start(1))
    assert tracker.in_progress() == set()
    assert tracker.next_offset == 10


@pytest.mark.parametrize("chunks", [10, 3000])
def test_what_a_loop_asks_for_does_not_go_through_all_holds(chunks: int) -> None:
    """One delayed message in each chunk: the loop asks every 20 ms, whatever the log does."""
    tracker = RedeliveryTracker()
    for number in range(chunks):
        schedule = Marker(MarkerType.SCHEDULE, None, 86_400_000)
        tracker.apply(number * CHUNK_OFFSETS, START_MS, schedule)
    looked: list[int] = []

    class Looked(list[Hold]):
        def __iter__(self) -> Iterator[Hold]:
            looked.append(len(self))
            return super().__iter__()

    for leaf in tracker.table.leaves():
        leaf.holds = Looked(leaf.holds)
    for _ in range(3):
        assert tracker.next_wake().deadline_ms == START_MS + 86_400_000
        assert tracker.plan() == []
        assert tracker.committable_offset() == 0
        assert (tracker.open_count(), tracker.due_count()) == (chunks, 0)
    assert 0 < sum(looked) <= 6 * MAX_HOLDS


def test_r23_nothing_is_held_for_longer_than_the_log_is_kept() -> None:
    """A worker that asks for a year, in a log of two hours: its START would be deleted."""
    fold = Fold(longest_ms=3_600_000)
    year = 365 * 86_400_000
    fold.start(START_MS, 1, timeout=year, max_lease=year)
    fold.start(START_MS, 2)
    fold.nack(START_MS, 2, delay=year)
    fold.tick(START_MS + 3_600_000)
    assert fold.state(1) == "held"
    assert fold.state(2) == "waiting"
    fold.tick(START_MS + 3_600_001)
    assert fold.settle(1).cause is DueCause.MAX_LEASE
    assert fold.settle(2).cause is DueCause.NACKED


def test_r04_a_chunk_that_is_filled_again_says_when_it_changes() -> None:
    """Its last message was settled, and the next one waits longer than ended ones are known.

    In another chunk something is due, which changes by no clock.
    """
    fold = Fold()
    first = CHUNK_OFFSETS
    for offset in (0, first):
        fold.start(START_MS, offset)
    fold.crawl(START_MS, START_MS + T + 1)
    fold.tracker.plan()
    assert fold.tracker.next_wake().deadline_ms is None
    fold.redelivered(START_MS + T + 2, first)
    fold.start(START_MS + T + 3, first + 1, timeout=120_000)
    deadline_ms = fold.tracker.next_wake().deadline_ms
    assert deadline_ms is not None
    assert deadline_ms <= START_MS + T + 3 + 120_000
    fold.tracker.check()
