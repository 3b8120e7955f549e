"""Records that are received one by one: slots that are relieved in the middle of a step."""

from __future__ import annotations

from tests.unit.test_parallel_work_queue import Room

from kafkamq.parallel.backend import SlotPool
from kafkamq.parallel.rules.offsets import OffsetTracker


def test_a_slot_that_is_relieved_before_its_first_record_gives_its_key_back() -> None:
    """Another partition goes, between the moment in which a slot has a run and that of a record."""
    room = Room()
    other = room.queue.assign(("topic", 1), OffsetTracker(0))
    pool = SlotPool(room.queue, 4, lambda: None)
    pool.start()
    room.add("aaa")
    room.speed_up()
    slot = pool._woken.popleft()
    assert room.queue.take(slot)
    run = next(slot.pending)
    slot.current = run, iter(run.records)
    room.queue.recall([other])
    record = pool.advance(slot)
    if record is None:  # its key is free for whoever comes next
        ((_, record),) = pool.advance_woken(4)
    assert record.offset == 0
    room.queue.scheduler.check()


def test_what_has_its_verdict_counts_before_its_run_has_ended() -> None:
    """``flush`` looks so: a slot may be at a run of several records."""
    room = Room()
    pool = SlotPool(room.queue, 1, lambda: None)
    pool.start()
    room.speed_up()
    room.add("aaa")
    ((slot, first),) = pool.advance_woken(1)
    second = pool.advance(slot)  # as an ack does
    assert (first.offset, second and second.offset) == (0, 1)
    room.queue.recall(())
    assert room.committable == 1
    assert pool.advance(slot) is not None  # the third
    room.queue.recall(())
    assert room.committable == 2
    room.queue.scheduler.check()
