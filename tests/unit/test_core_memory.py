"""R12 and R13: what ended stays ended for a while, and which markers are of the same message."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest
from tests.unit.core_fold import START_MS, Fold, T, message

from kafkamq.markers.rules.delivery import DueCause
from kafkamq.markers.rules.hold import CHUNK_OFFSETS
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.types import Marker, MarkerType, MessageBatch, MessageId, Outcome

ENDING = (Outcome.ACK, Outcome.REDELIVERED, Outcome.DEAD_LETTERED, Outcome.ALREADY_ENDED)
MEMORY_MS = 60_000


@pytest.mark.parametrize(
    ("outcome", "before"),
    [
        (outcome, before)
        for outcome in ENDING
        for before in ("unknown", "held", "waiting", "due")
        if (outcome, before) != (Outcome.ACK, "due")  # a late ACK ends nothing
    ],
)
def test_r12_a_zombies_late_start_is_not_tracked(outcome: Outcome, before: str) -> None:
    fold = Fold()
    fold.tick(START_MS)
    if before != "unknown":
        fold.start(START_MS)
    if before == "waiting":
        fold.nack(START_MS, delay=1000)
    if before == "due":
        fold.end(START_MS, Outcome.REJECT)
    fold.end(START_MS, outcome)
    fold.start(START_MS + 59_000, by="zombie")
    assert fold.settle().cause is DueCause.ALREADY_ENDED


def test_r12_who_begins_behind_the_end_finds_the_message_ended() -> None:
    """A zombie's START names message 1, which is done, and 2, which is then held for long."""
    fold = Fold()
    fold.start(START_MS, 1, by="b")
    fold.ack(START_MS, 1, by="b")
    late = fold.batch(START_MS, MarkerType.START, by="a", first=1, bits=0b11)
    assert fold.tracker.in_progress() == {message(1), message(2)}
    fold.end(START_MS, Outcome.ALREADY_ENDED, 1, by="")
    for number in range(1, 100):
        fold.keepalive(START_MS + 1000 * number, by="a")
    assert fold.tracker.committable_offset() == late
    again = RedeliveryTracker(late)
    for record in fold.records[late:]:
        again.apply(*record)
    assert again.in_progress() == fold.tracker.in_progress() == {message(2)}
    assert again.plan() == fold.plan() == []


def test_r12_what_ended_again_is_asked_for_until_its_end_is_read() -> None:
    fold = Fold(engine=("engine", 1))
    fold.ack(START_MS)
    fold.tick(START_MS, engine="engine", epoch=1)
    start = fold.start(START_MS + 10, by="zombie")
    assert fold.tracker.committable_offset() == start
    (action,) = asked = list(fold.tracker.plan())
    assert (action.start_offset, action.message_id) == (start, message(1))
    fold.ack(START_MS + 10, by="zombie")  # late: it had ended
    assert fold.tracker.late_verdicts == 1
    fold.tracker.aborted(asked)
    assert list(fold.tracker.plan()) == asked
    fold.end(START_MS + 20, Outcome.ALREADY_ENDED, by="")
    assert fold.state() == "ended"
    assert fold.tracker.committable_offset() == fold.offset
    fold.tick(START_MS + 20 + MEMORY_MS)
    assert fold.state() == "ended"
    fold.tick(START_MS + 21 + MEMORY_MS)
    assert fold.state() == "unknown"


@pytest.mark.parametrize(("late_ms", "remembered"), [(0, True), (1, False)])
def test_r12_for_sixty_seconds_of_log_time(late_ms: int, remembered: bool) -> None:
    fold = Fold()
    fold.start(START_MS)
    fold.ack(START_MS)
    fold.start(START_MS + MEMORY_MS + late_ms)
    assert fold.state() == ("due" if remembered else "held")


def test_r12_counted_from_the_last_end_of_the_chunk() -> None:
    fold = Fold()
    fold.start(START_MS, 1)
    fold.ack(START_MS, 1)
    fold.start(START_MS + 50_000, 2)
    fold.ack(START_MS + 50_000, 2)
    fold.tick(START_MS + 50_000 + MEMORY_MS)
    assert fold.state(1) == "ended"
    assert fold.state(2) == "ended"
    fold.tick(START_MS + 50_001 + MEMORY_MS)
    assert fold.state(1) == "unknown"
    assert fold.state(2) == "unknown"


def test_r12_other_chunks_do_not_prolong_it() -> None:
    fold = Fold()
    fold.ack(START_MS, 1)
    fold.ack(START_MS + 50_000, 1 + CHUNK_OFFSETS)
    fold.tick(START_MS + MEMORY_MS + 1)
    assert fold.state(1) == "unknown"
    assert fold.state(1 + CHUNK_OFFSETS) == "ended"


def test_r12_a_chunk_is_not_kept_for_leases_that_have_ended() -> None:
    fold = Fold()
    fold.start(START_MS, timeout=3_600_000)
    fold.ack(START_MS)
    fold.tick(START_MS + MEMORY_MS + 1)
    assert not fold.tracker.table.logs


def test_r12_a_tracker_without_a_store_remembers_no_chunk() -> None:
    fold = Fold()
    for number in range(100):
        at_ms = START_MS + number * 2 * MEMORY_MS
        fold.start(at_ms, number * CHUNK_OFFSETS)
        fold.ack(at_ms, number * CHUNK_OFFSETS)
    fold.tick(START_MS + 200 * MEMORY_MS)
    assert not fold.tracker.table.logs


def test_r12_a_repeated_end_changes_nothing() -> None:
    fold = Fold()
    fold.ack(START_MS)
    fold.ack(START_MS + 50_000)
    fold.tick(START_MS + MEMORY_MS + 1)
    assert fold.state() == "unknown"


def test_r12_what_was_forgotten_does_not_come_back_with_the_next_end() -> None:
    fold = Fold()
    fold.start(START_MS, 3, timeout=200_000)  # keeps the chunk
    fold.ack(START_MS, 1)
    fold.tick(START_MS + MEMORY_MS + 1)
    fold.ack(START_MS + MEMORY_MS + 1, 2)
    assert fold.state(1) == "unknown"
    assert fold.state(2) == "ended"


@pytest.mark.parametrize("first", [0, 1, 7, 8, 4095])
def test_r12_one_bit_each(first: int) -> None:
    fold = Fold()
    fold.ack(START_MS, first)
    assert fold.state(first) == "ended"
    for other in (0, 1, 6, 7, 8, 9, 4094, 4095):
        if other != first:
            assert fold.state(other) == "unknown"


def test_r12_memory_of_a_quiet_chunk_is_dropped() -> None:
    fold = Fold()
    for chunk in range(20):
        fold.ack(START_MS, chunk * CHUNK_OFFSETS)
    (log,) = fold.tracker.table.logs.values()
    assert len(log.ended) == 20
    fold.tick(START_MS + MEMORY_MS + 1)
    assert fold.tracker.table.logs == {}


def test_r12_a_chunk_in_which_more_ends_keeps_no_other_one() -> None:
    fold = Fold()
    for chunk in range(20):
        fold.ack(START_MS, chunk * CHUNK_OFFSETS)
    for number in range(1, 20):
        fold.ack(START_MS + number * 10_000, number)
    (log,) = fold.tracker.table.logs.values()
    assert list(log.ended) == [0]


def test_r12_ends_far_apart_in_a_chunk_are_each_remembered() -> None:
    fold, random = Fold(), Random(3)
    ended = random.sample(range(CHUNK_OFFSETS), 40)
    for offset in ended:
        fold.ack(START_MS, offset)
    for offset in ended + random.sample(range(CHUNK_OFFSETS), 40):
        assert (fold.state(offset) == "ended") is (offset in ended)


@pytest.mark.parametrize("batches", [1, 64])
def test_r12_memory_of_messages_far_apart(batches: int) -> None:
    tracker = RedeliveryTracker()
    count = 6400
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(0, count, batches):
        chunks = range(number, number + batches)
        named = tuple(MessageBatch(0, b"", 0, chunk * CHUNK_OFFSETS + 7, 1) for chunk in chunks)
        end = Marker(MarkerType.END, outcome=Outcome.ACK, batches=named)
        tracker.apply(number, START_MS + number, end)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 380 * count


def test_r12_a_schedule_that_ended_is_remembered_too() -> None:
    fold = Fold()
    first = fold.schedule(START_MS, 5000)
    fold.end(START_MS, Outcome.ACK, first, of_schedule=True)  # cancelled
    fold.schedule(START_MS + 10, 4000, first=first)  # a carry that was under way
    fold.crawl(START_MS + 10, START_MS + 6000)
    assert fold.settle(first, of_schedule=True).cause is DueCause.ALREADY_ENDED
    fold.end(START_MS + 6000, Outcome.ALREADY_ENDED, first, of_schedule=True)
    assert fold.plan() == []


def test_r12_a_late_cancel_stops_nothing() -> None:
    fold = Fold()
    first = fold.schedule(START_MS, 100)
    fold.tick(START_MS + 101)
    fold.end(START_MS + 101, Outcome.ACK, first, of_schedule=True)
    assert fold.settle(first, of_schedule=True)
    assert fold.tracker.late_verdicts == 1


# ---- R13

TOPIC = bytes(range(16))
OTHERS = [
    MessageId(1, 5, TOPIC, 3),  # partition
    MessageId(0, 6, TOPIC, 3),
    MessageId(0, 5, bytes(16), 3),
    MessageId(0, 5, TOPIC, 4),
    MessageId(0, 5, b"", 3),
    MessageId(0, 5, TOPIC, 0),
    MessageId(0, 5),
    MessageId(0, 5 + CHUNK_OFFSETS, TOPIC, 3),
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_r13_another_topic_epoch_partition_or_offset_is_another_message(other: MessageId) -> None:
    one = MessageId(0, 5, TOPIC, 3)
    fold = Fold()
    fold.start(START_MS, one)
    fold.start(START_MS, other)
    assert fold.tracker.in_progress() == {one, other}
    fold.keepalive(START_MS, other, timeout=60_000)
    assert fold.lease_end(one) == START_MS + T
    fold.ack(START_MS, other)
    assert fold.tracker.in_progress() == {one}
    fold.ack(START_MS, one)
    assert fold.tracker.in_progress() == set()
    assert fold.state(MessageId(0, 5, TOPIC, 9)) == "unknown"


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_r13_the_memory_of_ends_goes_by_the_whole_identity(other: MessageId) -> None:
    fold = Fold()
    fold.ack(START_MS, other)
    fold.start(START_MS, MessageId(0, 5, TOPIC, 3))
    assert fold.tracker.in_progress() == {MessageId(0, 5, TOPIC, 3)}


def test_r13_a_schedule_is_named_by_its_marker_partition_and_offset() -> None:
    fold = Fold(next_offset=70, partition=5)
    offset = fold.schedule(START_MS, 1000)
    assert fold.tracker.scheduled() == {MessageId(5, offset)} == {MessageId(5, 70)}
    carried = fold.schedule(START_MS + 10, 900, first=offset)
    assert fold.tracker.scheduled() == {MessageId(5, 70)}
    again = fold.schedule(START_MS + 20, 800, first=offset)  # names the first one, always
    assert fold.tracker.scheduled() == {MessageId(5, 70)}
    fold.tick(START_MS + 821)
    assert fold.settle(MessageId(5, 70), of_schedule=True).start_offset == again > carried


def test_r13_a_schedule_and_a_message_of_equal_numbers_are_two() -> None:
    fold = Fold()
    offset = fold.schedule(START_MS, 1000)
    fold.start(START_MS, MessageId(0, offset))
    fold.end(START_MS, Outcome.ACK, MessageId(0, offset), of_schedule=True)
    assert fold.tracker.scheduled() == set()
    assert fold.tracker.in_progress() == {MessageId(0, offset)}
