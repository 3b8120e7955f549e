"""Records that are received one by one: slots that are relieved in the middle of a step."""

from __future__ import annotations

from tests.unit.test_parallel_desk import Room

from kafkamq.core.offsets import OffsetTracker
from kafkamq.kafka.backends.slots import SlotPool


def test_a_slot_that_is_relieved_before_its_first_record_gives_its_key_back() -> None:
    """Another partition goes, between the moment in which a slot has a run and that of a record."""
    room = Room()
    other = room.desk.assign(("topic", 1), OffsetTracker(0))
    pool = SlotPool(room.desk, 4, lambda: None)
    pool.start()
    room.add("aaa")
    room.speed_up()
    slot = pool._woken.popleft()
    assert room.desk.exchange(slot)
    run = next(slot.pending)
    slot.current, slot.failed, slot.is_at_run = (run, iter(run.records)), None, True
    room.desk.recall([other])
    record = pool.advance(slot)
    if record is None:  # its key is free for whoever comes next
        ((_, record),) = pool.advance_woken(4)
    assert record.offset == 0
    room.desk.scheduler.check()
