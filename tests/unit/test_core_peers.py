"""What kafka-mq-go's and kmq's own tests check, in our form, as far as a core shows it.

The numbers are those of the list of behaviours in the documentation of earlier systems: 7-17 of
kafka-mq-go's unit tests, 20 and 22, and 30-32 of kmq's.
"""

from __future__ import annotations

from tests.unit.core_fold import START_MS, Fold, message

from kafkamq.markers.rules.delivery import Copy, DeadLetter, DueCause, Settle, decide
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.types import DeadLetterReason, Marker, MarkerType, MessageId, Outcome


def test_07_due_strictly_after_the_timeout_on_the_log_clock() -> None:
    fold = Fold()
    fold.start(START_MS, timeout=1000)
    fold.crawl(START_MS, START_MS + 1000, 100)
    assert fold.due() == set()
    fold.tick(START_MS + 1001)
    assert fold.due() == {1}


def test_08_several_starts_fall_due_one_after_the_other() -> None:
    fold = Fold()
    for number, timeout in enumerate((2000, 1000, 3000)):
        fold.start(START_MS, number, timeout=timeout)
    fold.crawl(START_MS, START_MS + 1001, 200)
    assert fold.due() == {1}
    fold.crawl(START_MS + 1001, START_MS + 3001, 200)
    by_deadline = sorted(fold.plan(), key=lambda action: action.deadline_ms)
    assert [action.message_id.offset for action in by_deadline] == [1, 0, 2]


def test_09_a_second_start_moves_the_deadline_and_not_the_position() -> None:
    fold = Fold()
    first = fold.start(START_MS, timeout=1000)
    fold.start(START_MS + 1000, timeout=1000)
    assert fold.lease_end() == START_MS + 2000
    assert fold.tracker.committable_offset() == first


def test_10_records_are_folded_in_offset_order_only() -> None:
    tracker = RedeliveryTracker()
    for offset in (0, 2, 1):
        marker = Marker(MarkerType.START, message(offset), 1000)
        tracker.apply(offset, START_MS, marker)
    assert tracker.in_progress() == {message(0), message(2)}  # 1 came too late to be new
    assert tracker.next_offset == 3


def test_11_a_keepalive_of_an_unknown_id_never_creates_an_entry() -> None:
    fold = Fold()
    fold.keepalive(START_MS, 4)
    assert fold.tracker.in_progress() == set()
    fold.start(START_MS, 4, timeout=1000)
    fold.keepalive(START_MS + 500, 4, timeout=1000)
    assert fold.lease_end(4) == START_MS + 1500


def test_12_an_end_closes_the_first_the_middle_or_the_last() -> None:
    for ended, position in ((0, 1), (1, 0), (2, 0)):
        fold = Fold()
        for number in range(3):
            fold.start(START_MS, number)
        fold.ack(START_MS, ended)
        assert fold.tracker.in_progress() == {message(n) for n in range(3) if n != ended}
        assert fold.tracker.committable_offset() == position
        fold.start(START_MS, ended)  # remembered (R12)
        assert fold.settle(ended).cause is DueCause.ALREADY_ENDED


def test_13_an_empty_queue_has_nothing_due() -> None:
    tracker = RedeliveryTracker(42)
    assert list(tracker.plan()) == []
    assert tracker.in_progress() == set()
    assert tracker.committable_offset() == 42


def test_14_the_end_of_the_only_start_frees_the_position() -> None:
    fold = Fold()
    fold.start(START_MS)
    fold.ack(START_MS)
    fold.tick(START_MS + 60_000)
    assert fold.plan() == []
    assert fold.tracker.committable_offset() == fold.tracker.next_offset == 3


def test_15_the_clock_is_the_logs() -> None:
    fold = Fold()
    fold.start(START_MS, timeout=1000)
    fold.start(START_MS + 700, 2)
    assert fold.tracker.clock_ms == START_MS + 700
    assert fold.due() == set()


def test_16_silence_moves_nothing_until_a_tick_says_the_time() -> None:
    fold = Fold()
    fold.start(START_MS, timeout=1000)
    for _ in range(5):
        assert fold.due() == set()  # however long we wait here
    fold.tick(START_MS + 800)
    fold.tick(START_MS + 1001)
    assert fold.due() == {1}


def test_17_an_undecodable_record_is_counted_and_passed() -> None:
    fold = Fold()
    fold.start(START_MS)
    fold.record(START_MS, None)
    fold.ack(START_MS)
    assert fold.tracker.malformed == 1
    assert fold.tracker.in_progress() == set()
    assert fold.tracker.next_offset == 3


def test_20_what_another_partition_holds_is_untouched() -> None:
    fold = Fold()
    fold.start(START_MS, MessageId(0, 1))
    fold.start(START_MS, MessageId(1, 1))
    fold.ack(START_MS, MessageId(1, 1))
    assert fold.tracker.in_progress() == {MessageId(0, 1)}


def test_22_only_starts_and_schedules_are_ever_settled() -> None:
    fold = Fold()
    fold.keepalive(START_MS, 1, timeout=10)
    fold.end(START_MS, Outcome.NACK, 1)
    fold.end(START_MS, Outcome.REJECT, 1)
    fold.end(START_MS, Outcome.RELEASE, 1)
    fold.tick(START_MS + 60_000)
    assert fold.plan() == []


def test_30_what_is_never_ended_comes_back_and_what_is_acked_does_not() -> None:
    fold = Fold()
    for number in range(21):
        fold.start(START_MS, number, timeout=1000)
    for number in range(21):
        if number % 5:
            fold.ack(START_MS + 10, number)
    fold.crawl(START_MS + 10, START_MS + 1001, 200)
    assert fold.due() == {0, 5, 10, 15, 20}


def test_31_three_deliveries_in_all_then_the_dead_letter_once() -> None:
    fold = Fold()
    at_ms = START_MS
    results: list[Copy | DeadLetter] = []
    count = 1
    for delivery in range(1, 5):
        start = Marker(
            MarkerType.START, message(delivery), 1000, delivery_count=count, max_deliveries=3
        )
        fold.record(at_ms, start)
        fold.crawl(at_ms, at_ms + 1001, 200)
        at_ms += 1001
        (settle,) = fold.tracker.plan()
        assert isinstance(settle, Settle)
        result = decide(settle, start, start_timestamp_ms=START_MS, max_deliveries=5)
        results.append(result)
        fold.redelivered(at_ms, delivery)
        if isinstance(result, DeadLetter):
            break
        count = result.delivery_count
    assert results == [Copy(2), Copy(3), DeadLetter(DeadLetterReason.MAX_DELIVERIES)]


def test_32_only_the_old_one_then_both() -> None:
    fold = Fold()
    fold.start(START_MS, 1, timeout=1000)
    fold.start(START_MS + 900, 2, timeout=1000)
    fold.crawl(START_MS + 900, START_MS + 1100, 100)
    assert fold.due() == {1}
    fold.crawl(START_MS + 1100, START_MS + 2000, 100)
    assert fold.due() == {1, 2}
