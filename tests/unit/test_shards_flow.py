"""Flow control: how much is held, how large a map grows, what stalls, how much a worker takes."""

from __future__ import annotations

from tests.unit.shard_records import partition_with, scheduler

from kafkamq.config import Options
from kafkamq.parallel.rules.flow import (
    FlowLimits,
    MapVerdict,
    PartitionFlow,
    Stall,
    StallDetector,
)
from kafkamq.parallel.rules.offsets import OffsetTracker
from kafkamq.parallel.wire.offsets import runs_of
from kafkamq.runtime.rules.pace import RateLimit, RunSize


def test_fetching_stops_when_full_and_starts_again_when_half_empty() -> None:
    flow = PartitionFlow(FlowLimits(max_open=100))
    assert [flow.fetch(count) for count in (0, 99, 100, 99, 51, 50, 99, 130, 60, 0)] == [
        True, True, False, False, False, True, True, False, False, True
    ]  # fmt: skip


def test_holes_of_a_map_do_not_count_as_held() -> None:
    """Or a partition with a large map would never be fetched."""
    tracker = OffsetTracker(0, highest_seen=99_999, incompletes=range(0, 90_000, 2))
    flow = PartitionFlow(FlowLimits(max_open=100))
    assert flow.fetch(tracker.open_count)
    tracker.add(range(100))
    assert tracker.open_count == 50
    tracker.add(range(100, 200))
    assert not flow.fetch(tracker.open_count)


def test_a_full_map_holds_back_new_work_until_its_holes_are_filled() -> None:
    flow = PartitionFlow(FlowLimits(max_free_map_chars=40, max_map_chars=50))
    target = scheduler()
    partition = partition_with(target, ["stuck", *[f"{index % 97}" for index in range(1_000)]])

    def judge() -> MapVerdict:
        progress = partition.tracker.progress()
        base = progress.committable_offset
        length = progress.highest_succeeded - base + 1
        holes = [hole for hole in sorted(progress.incompletes) if hole < base + length]
        chars = len(runs_of(base, length, holes)) * 8 // 3  # a map that shrinks with its holes
        verdict = flow.judge_map(chars if progress.needs_map else 0, progress)
        target.set_ceiling(partition, verdict.ceiling)
        return verdict

    assert judge() == MapVerdict(is_written=True, ceiling=None)
    stuck = target.take(0, 1)
    target.finish(target.take(0, 300))
    verdict = judge()
    assert verdict.ceiling == partition.tracker.highest_succeeded
    assert not verdict.is_written
    rounds = 0
    while judge().ceiling is not None:
        runs = target.take(0, 50)
        assert runs, "what is below the ceiling goes on"
        assert all(r.offset <= partition.ceiling for run in runs for r in run.records)
        target.finish(runs)
        rounds += 1
    assert rounds
    assert partition.tracker.committable_offset() == 0
    target.finish(stuck)
    while runs := target.take(0, 50):
        target.finish(runs)
        judge()
    assert partition.tracker.first_open() is None


def test_limits_of_a_map() -> None:
    flow = PartitionFlow(FlowLimits())
    tracker = OffsetTracker(0)
    tracker.add(range(10))
    tracker.complete([7])
    progress = tracker.progress()
    assert flow.judge_map(3072, progress) == MapVerdict(is_written=True, ceiling=None)
    assert flow.judge_map(3073, progress) == MapVerdict(is_written=True, ceiling=7)
    assert flow.judge_map(4095, progress) == MapVerdict(is_written=True, ceiling=7)
    assert flow.judge_map(4096, progress) == MapVerdict(is_written=False, ceiling=7)


def test_a_record_that_holds_the_offset_back_is_reported_once() -> None:
    tracker, stalls = OffsetTracker(0), StallDetector(stall_after_ms=1_000)
    assert stalls.observe(tracker.first_open(), 0) is None
    tracker.add([0, 1, 2, 3])
    assert stalls.observe(tracker.first_open(), 5_000) is None  # the clock starts here
    tracker.complete([1, 3])
    assert stalls.observe(tracker.first_open(), 5_999) is None
    assert stalls.observe(tracker.first_open(), 6_100) == Stall(offset=0, held_ms=1_100)
    assert stalls.observe(tracker.first_open(), 9_000) is None
    tracker.complete([0])
    assert stalls.observe(tracker.first_open(), 9_000) is None  # 2 is another one
    assert stalls.observe(tracker.first_open(), 10_000) == Stall(offset=2, held_ms=1_000)
    tracker.complete([2])
    assert stalls.observe(tracker.first_open(), 99_000) is None
    assert stalls.observe(tracker.first_open(), 199_000) is None


def test_large_records_are_held_in_smaller_numbers() -> None:
    limits = FlowLimits(max_open=1000, max_open_bytes=1_000_000)
    flow = PartitionFlow(limits)
    flow.observe([])
    flow.observe([10] * 100)
    assert (flow.max_open, flow.resume_open) == (1000, 500)
    flow.observe([10_000] * 100)
    assert 100 <= flow.max_open <= 102
    assert flow.resume_open == flow.max_open // 2
    assert not flow.fetch(102)
    assert not flow.fetch(52)
    assert flow.fetch(50)
    flow.observe([5_000_000] * 100)
    assert flow.max_open == 1  # one at a time goes on always
    assert not flow.fetch(1)
    assert flow.fetch(0)
    flow.observe([0] * 1000)
    assert flow.max_open == 1000


def test_a_stall_is_told_once() -> None:
    stalls = StallDetector(stall_after_ms=100)
    assert stalls.observe(7, 0) is None
    assert stalls.observe(7, 100) is not None
    assert stalls.observe(7, 1_000) is None
    assert stalls.observe(8, 1_001) is None
    assert stalls.observe(8, 1_101) is not None


def test_holes_that_are_still_to_be_polled_are_no_stall() -> None:
    tracker = OffsetTracker(5, highest_seen=9, incompletes=(5, 7))
    assert tracker.first_open() is None
    tracker.add([5, 6])
    assert tracker.first_open() == 5


def test_run_sizes_follow_the_time_a_record_takes() -> None:
    size = RunSize(max_records=64, target_us=1_000)
    assert size.size(10_000, 4) == 1  # nothing is known yet
    size.observe(1_000, 1_000.0)
    assert size.is_light
    assert size.size(10_000, 4) == size.size(20, 4) == 64  # spreading would cost more
    size.observe(1, 50_000.0)  # one slow record is enough
    assert not size.is_light
    assert size.size(10_000, 4) == 19
    assert size.size(40, 4) == 5  # something for each worker, twice
    assert size.size(15, 4) == 1  # two each, and who is through early would find nothing
    assert size.size(2, 4) == size.size(0, 4) == size.size(0, 0) == 1
    size.observe(1, 5_000_000.0)
    assert size.size(10_000, 4) == 1
    for _ in range(200):
        size.observe(64, 64 * 100.0)
    assert 8 <= size.size(10_000, 4) <= 10


def test_a_stall_of_the_interpreter_counts_as_little_as_it_is() -> None:
    size = RunSize(max_records=512)
    for _ in range(100):
        for _ in range(20):
            size.observe(512, 512.0)
        size.observe(512, 5_512.0)  # another thread had its 5 ms
        assert size.is_light
        assert size.size(10_000, 16) > 60


def test_run_sizes_take_any_measurement() -> None:
    size = RunSize(max_records=8)
    for records, elapsed_us in ((0, 5.0), (1, 0.0), (3, -1.0), (1, 1e12)):
        size.observe(records, elapsed_us)
        assert 1 <= size.size(100, 2) <= 8
    for _ in range(200):
        size.observe(5_000, 0.0)
    assert size.size(100, 2) == 8


def test_a_rate_is_held_over_any_stretch_of_time() -> None:
    limit = RateLimit(250.0, burst_ms=100)
    started, now_ms = 0, 0.0
    while now_ms < 10_000.0:
        take = limit.available(now_ms)
        limit.spend(take)
        started += take
        now_ms += 3.0
    assert 2_450 <= started <= 2_550
    assert limit.available(now_ms + 60_000.0) == 25  # a pause is not made up beyond the burst


def test_a_slow_rate_lets_one_start_at_a_time() -> None:
    limit = RateLimit(0.5)
    assert limit.available(0.0) == 1
    limit.spend(1)
    assert limit.available(1_000.0) == 0
    assert limit.available(2_000.0) == 1
    assert RateLimit(Options.max_rate.most).available(0.0) == 1
