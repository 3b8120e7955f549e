"""Maps that are too long to be committed whole."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import KafkaError, KafkaException
from tests.unit.test_parallel_work_queue import Room

from kafkamq.errors import BrokerError, DeadlineExceededError, LeaseLostError
from kafkamq.parallel.commits import Assignment, Committer, _cut, plan_commits
from kafkamq.parallel.rules.flow import FlowLimits, PartitionFlow, StallDetector
from kafkamq.parallel.rules.offsets import OffsetTracker
from kafkamq.parallel.wire.offsets import decode, encode
from kafkamq.transport.commits import OffsetCommit


def test_a_map_is_cut_to_what_fits() -> None:
    tracker = OffsetTracker(100)
    tracker.add(range(100, 60_100))
    chance = random.Random(3)
    tracker.complete([offset for offset in range(101, 60_100) if chance.random() < 0.5])
    progress = tracker.progress()
    whole = encode(100, progress.highest_succeeded, progress.incompletes)
    assert len(whole) > 4096
    cut, end = _cut(progress, len(whole), FlowLimits())
    assert 3000 < len(cut) < 4096
    found = decode(100, cut)
    assert found.highest_seen == end < progress.highest_succeeded
    assert found.incompletes == tuple(each for each in progress.incompletes if each <= end)


def test_where_nothing_fits_there_is_no_map() -> None:
    tracker = OffsetTracker(0)
    tracker.add([0, 1, 2, 3])
    tracker.complete([3])
    limits = FlowLimits(max_free_map_chars=1, max_map_chars=1)
    assert _cut(tracker.progress(), 8, limits) == ("", -1)


def test_that_a_map_was_cut_is_counted_each_time_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    room = Room()
    queue, partition = room.queue, room.partition
    partition.tracker.add(range(60_000))
    chance = random.Random(3)
    done = [offset for offset in range(1, 60_000) if chance.random() < 0.5]
    partition.tracker.complete(done[:-3])
    limits = FlowLimits()
    assignment = Assignment(
        partition, PartitionFlow(limits), StallDetector(stall_after_ms=1000), 0, -1
    )
    for offset in done[-3:]:
        partition.tracker.complete([offset])
        plan = plan_commits([assignment], queue, room.stats, limits, with_maps=True)
        (commit,) = plan.commits
        assert 3000 < len(commit.metadata) < 4096
        found = decode(0, commit.metadata)
        assert set(found.incompletes).isdisjoint(done)  # what it says is true as far as it goes
        assert partition.ceiling == offset
    assert room.stats.maps_cut == 3
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    assert "is cut" in caplog.text
    partition.tracker.complete(range(60_000))
    (commit,) = plan_commits([assignment], queue, room.stats, limits, with_maps=True).commits
    assert (commit.offset, commit.metadata) == (60_000, "")
    assert partition.ceiling is None and not assignment.is_cut


def test_a_commit_is_of_the_log_that_it_was_planned_of() -> None:
    """Offsets of a log that was replaced call records done that nobody has read."""
    room = Room()
    limits = FlowLimits()
    assignment = Assignment(
        room.partition, PartitionFlow(limits), StallDetector(stall_after_ms=1000), 0, -1
    )
    plan = plan_commits([assignment], room.queue, room.stats, limits, with_maps=True)
    assert plan.commits and plan.is_current()
    room.queue.close(room.partition)
    assert not plan.is_current()


class Commits:
    """Answers with these errors, then with none."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.offsets: list[int] = []

    def commit(self, commits: list[OffsetCommit], is_current: Callable[[], bool]) -> None:
        assert is_current(), "nothing has gone since it was planned"
        if self.codes:
            raise KafkaException(KafkaError(self.codes.pop(0)))
        self.offsets += [each.offset for each in commits]

    def tend(self) -> None:
        pass


@contextmanager
def committing(
    commits: Commits,
    fail: Callable[[Exception], object] = pytest.fail,
    look: Callable[[Room], None] = lambda room: None,
) -> Iterator[Committer]:
    """A committer at work, whose one record is done; ``look`` is called before each look at it."""
    room = Room()
    assignment = Assignment(
        room.partition, PartitionFlow(FlowLimits()), StallDetector(stall_after_ms=1000), 0, -1
    )

    def assignments() -> list[Assignment]:
        look(room)
        return [assignment]

    committer = Committer(room.queue.config, room.queue, commits, assignments, room.stats, fail)
    room.add("a")
    room.partition.tracker.complete([0])
    committer.start()
    try:
        yield committer
    finally:
        assert committer.end(20)


@pytest.mark.parametrize(
    ("codes", "committed"),
    [
        ([], [1]),
        ([KafkaError.STALE_MEMBER_EPOCH, KafkaError.NOT_COORDINATOR], [1]),
        ([KafkaError.ILLEGAL_GENERATION, KafkaError.REBALANCE_IN_PROGRESS], [1]),  # a join ended
        ([KafkaError.FENCED_MEMBER_EPOCH], []),  # another has the partition already
    ],
)
def test_the_last_commit_of_a_partition_is_made_again(
    codes: list[int], committed: list[int]
) -> None:
    commits = Commits(*codes)
    with committing(commits) as committer:
        assert committer.commit_at_last(20)
        assert commits.offsets == committed
        assert commits.codes == []
        assert (committer.refusal is None) is bool(committed)


@pytest.mark.parametrize(
    ("codes", "error"),
    [
        ([], None),
        ([KafkaError.COORDINATOR_NOT_AVAILABLE] * 3, None),  # made again
        ([KafkaError.COORDINATOR_NOT_AVAILABLE] * 10_000, DeadlineExceededError),
        ([KafkaError.FENCED_MEMBER_EPOCH], BrokerError),
        ([KafkaError.GROUP_AUTHORIZATION_FAILED], BrokerError),
    ],
)
def test_done_is_what_kafka_has_confirmed(codes: list[int], error: type[Exception] | None) -> None:
    commits = Commits(*codes)
    with committing(commits, lambda error: None) as committer:
        if error is None:
            committer.see_committed(20)
            assert commits.offsets == [1]
            committer.see_committed(20)  # there is nothing more to commit
            assert commits.offsets == [1]
        else:
            with pytest.raises(error):
                committer.see_committed(0.5)
            assert commits.offsets == []


def test_what_went_before_its_commit_is_not_done() -> None:
    def close_at_the_third(room: Room) -> None:
        if room.stats.commit_failures == 2:
            room.queue.scheduler.close(room.partition)

    commits = Commits(*[KafkaError.COORDINATOR_NOT_AVAILABLE] * 10_000)
    with (
        committing(commits, look=close_at_the_third) as committer,
        pytest.raises(LeaseLostError),
    ):
        committer.see_committed(20)


class ShortMetadata(Commits):
    """A coordinator that takes no maps, until it does."""

    def __init__(self) -> None:
        super().__init__()
        self.takes_maps = False
        self.metadata: list[str] = []

    def commit(self, commits: list[OffsetCommit], is_current: Callable[[], bool]) -> None:
        self.metadata += [each.metadata for each in commits]
        if not self.takes_maps and any(each.metadata for each in commits):
            raise KafkaException(KafkaError(KafkaError.OFFSET_METADATA_TOO_LARGE))
        super().commit(commits, is_current)


def test_maps_that_were_refused_are_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr("kafkamq.parallel.commits.monotonic", lambda: now_s[0])
    room, commits = Room(), ShortMetadata()
    assignment = Assignment(
        room.partition, PartitionFlow(FlowLimits()), StallDetector(stall_after_ms=1000), 0, -1
    )
    committer = Committer(
        room.queue.config,
        room.queue,
        commits,
        lambda: [assignment],
        room.stats,
        pytest.fail,
    )
    room.add("abcdefghi")
    room.partition.tracker.complete([8])
    done = iter(range(7))

    def commit_after(seconds: float) -> list[bool]:
        """One more is done, before one that is not; whether each commit that follows has a map."""
        now_s[0] += seconds
        room.partition.tracker.complete([next(done)])
        commits.metadata.clear()
        while assignment.committed_version != room.partition.tracker.version:
            committer._commit()
        return [bool(each) for each in commits.metadata]

    assert commit_after(0) == [True, False]
    assert commit_after(59) == [False]
    assert commit_after(1) == [True, False]  # still refused: the pause is twice as long
    assert commit_after(60) == [False]
    commits.takes_maps = True
    assert commit_after(60) == [True]
    assert commit_after(0) == [True]
    commits.takes_maps = False
    assert commit_after(0) == [True, False]
