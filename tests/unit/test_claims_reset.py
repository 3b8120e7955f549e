"""Setting the position of a live group: everything moves, or nothing does."""

from __future__ import annotations

import pytest
from tests.unit.claim_fold import GROUP, TOPIC, ClaimFold

from kafkamq.claims.admin import PositionChange, ResetPhase, WriteGroup
from kafkamq.claims.rules.claimant import Claimant, Phase
from kafkamq.claims.rules.steps import ClaimantConfig, Fetch, LookUp, Write
from kafkamq.types import MarshalType, PartitionId


class Office(ClaimFold):
    """An admin, one consumer that may respect pauses, one log and one clock for all."""

    def __init__(
        self, targets: dict[int, int], *, patience_s: float = 100, paused_until_s: int = 0
    ) -> None:
        super().__init__("safe")
        self.now_s = 1000.0
        self.committed: dict[int, int] = {}
        self.offsets = (0, 1000)
        self.silent: set[int] = set()  # partitions whose writes fail from now on
        self.group_writes_fail = False
        self.resumes_fail = False
        self.unread_from = 1 << 62
        self.consumers: dict[int, Claimant] = {}
        self.started: list[int] = []  # where consumers began
        self.change = PositionChange(
            {(TOPIC, partition): offset for partition, offset in targets.items()},
            lambda place: self.claimant("adm", place[1], ignores_pause=True),
            group=GROUP,
            client="adm",
            instance="1",
            pauses={4: paused_until_s},
            read_to=lambda number: min(self.log.next_offset, self.unread_from),
            monotonic_ms=self.ms,
            patience_ms=round(patience_s * 1000),
        )

    @property
    def ms(self) -> int:
        return round(self.now_s * 1000)

    def claimant(self, client: str, partition: int, **more: bool) -> Claimant:
        config = ClaimantConfig(
            client=client,
            instance="1",
            group=GROUP,
            topic=TOPIC,
            partition=partition,
            release_if_behind=False,
            reclaim=False,
            **more,
        )
        return Claimant(self.log, config)

    def perform(self, claimant: Claimant, step: Write, partition: int) -> None:
        if partition in self.silent and claimant.config.client == "adm":
            claimant.on_failed(step.ticket, self.ms)
            return
        if step.commit_offset >= 0:
            self.committed[partition] = step.commit_offset
        claimant.on_written(step.ticket, self.append(step.record, self.now_s))

    def admin(self) -> None:
        while steps := self.change.plan(self.ms, self.now_s):
            for place, step in steps:
                if isinstance(step, WriteGroup):
                    self.write_group(step)
                elif place is not None:
                    self.admin_step(place, step)

    def write_group(self, step: WriteGroup) -> None:
        assert step.coordination_partition == 4
        if self.group_writes_fail or (self.resumes_fail and not step.record.expires_at_s):
            self.change.on_group_failed(step.ticket, self.ms)
        else:
            at = self.append(step.record, self.now_s)
            self.change.on_group_written(step.ticket, at)

    def admin_step(self, place: PartitionId, step: object) -> None:
        claimant = self.change.claimant(place)
        if isinstance(step, LookUp):
            committed = self.committed.get(place[1], -1)
            self.change.on_offsets(place, *self.offsets, committed, monotonic_ms=self.ms)
        elif isinstance(step, Write) and claimant is not None:
            self.perform(claimant, step, place[1])

    def consume(self, partition: int) -> None:
        """A member of the group works, or tries to."""
        claimant = self.consumers.get(partition)
        if claimant is None or claimant.phase is Phase.OVER:
            claimant = self.consumers[partition] = self.claimant("c", partition)
        while steps := claimant.plan(self.ms, self.now_s):
            for step in steps:
                if isinstance(step, Write):
                    self.perform(claimant, step, partition)
                elif isinstance(step, LookUp):
                    claimant.on_offsets(
                        *self.offsets, self.committed.get(partition, -1), monotonic_ms=self.ms
                    )
                elif isinstance(step, Fetch):
                    self.started.append(step.offset)

    def run(self, seconds: float, *consuming: int) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s and not self.change.is_over:
            self.admin()
            for partition in consuming:
                self.consume(partition)
            self.now_s += 1


def test_a_live_group_is_moved_and_goes_on() -> None:
    office = Office({0: 5, 1: 7})
    for partition in (0, 1):
        office.consume(partition)
        office.consumers[partition].hand_out(range(50), office.ms)
        for offset in range(50):
            office.consumers[partition].commit(offset)
    office.run(60, 0, 1)
    assert office.change.is_over
    assert office.change.failures == {}
    assert office.change.moved == {(TOPIC, 0): 5, (TOPIC, 1): 7}
    assert office.committed == {0: 5, 1: 7}
    office.consume(0)
    office.consume(1)
    assert office.started == [0, 0, 5, 7]
    assert not office.log.is_paused(GROUP, now_s=office.now_s)


def test_while_it_goes_on_the_group_stays_away() -> None:
    office = Office({0: 5})
    office.consume(0)
    office.silent.add(0)
    office.run(50, 0)
    assert office.change.phase is ResetPhase.CLAIMING
    assert office.log.is_paused(GROUP, now_s=office.now_s)
    assert office.consumers[0].phase is Phase.OVER


@pytest.mark.parametrize(
    ("target", "expected"), [(2000, 1000), (-5, 10), (3, 10), (10, 10), (999, 999)]
)
def test_targets_are_clamped_to_what_exists(target: int, expected: int) -> None:
    office = Office({0: target})
    office.offsets = (10, 1000)
    office.run(60)
    assert office.change.moved == {(TOPIC, 0): expected}
    assert office.at(office.now_s).offset == expected


def test_a_target_of_zero_also_moves_the_commit() -> None:
    """Zero in the coordination log means that nothing is known; the commit must say it too."""
    office = Office({0: 0})
    office.beat(800, "c", 50)
    office.release(801, "c", 50)
    office.committed[0] = 50
    office.run(60)
    assert office.committed[0] == 0
    assert office.at(office.now_s).offset == 0


def test_nothing_moves_when_one_partition_is_not_released() -> None:
    """A member that does not know pauses: the last Go version."""
    office = Office({0: 5, 1: 7}, patience_s=90)
    office.claims(1000, "c", partition=0)
    office.beat(1000, "c", 40, partition=0)
    office.release(1000, "c", 40, partition=0)
    office.claims(1000, "go", partition=1)
    for _ in range(10):
        office.run(15)
        office.beat(office.now_s, "go", 60, partition=1)
    assert office.change.is_over
    assert office.change.moved == {}
    assert "held by another" in office.change.failures[(TOPIC, 1)]
    assert "another partition" in office.change.failures[(TOPIC, 0)]
    assert office.at(office.now_s, 0).offset == 40
    assert office.at(office.now_s, 0).is_claimable
    assert office.at(office.now_s, 1).offset == 60
    assert not office.log.is_paused(GROUP, now_s=office.now_s)


def test_a_partition_that_is_lost_before_the_move_is_claimed_again() -> None:
    office = Office({0: 5, 1: 7}, patience_s=300)
    office.claims(1000, "go", partition=1)
    office.run(30)
    office.now_s += 100  # the admin was stopped, and lost partition 0
    office.claims(office.now_s, "other", partition=0)
    office.release(office.now_s, "other", 44, partition=0)
    office.run(100)
    assert office.change.moved == {(TOPIC, 0): 5, (TOPIC, 1): 7}


def test_a_group_that_cannot_be_paused_is_left_alone() -> None:
    office = Office({0: 5}, patience_s=20)
    office.group_writes_fail = True
    office.run(30)
    office.group_writes_fail = False
    office.run(30)
    assert office.change.is_over
    assert "paused" in office.change.failures[(TOPIC, 0)]
    assert office.at(office.now_s).token == -1


def test_a_resume_that_cannot_be_written_ends() -> None:
    office = Office({0: 5}, patience_s=20)
    office.resumes_fail = True
    office.run(100)
    assert office.change.is_over
    assert office.change.moved == {(TOPIC, 0): 5}
    assert not office.change.is_resumed
    assert office.log.is_paused(GROUP, now_s=office.now_s)


def test_it_is_over_when_the_resume_was_read_back() -> None:
    """Who asks for the pause right after it must not see it any more."""
    office = Office({0: 5})
    office.resumes_fail = True
    office.run(5)
    assert office.change.phase is ResetPhase.RESUMING
    office.resumes_fail = False
    office.unread_from = office.log.next_offset
    office.run(5)
    assert not office.log.is_paused(GROUP, now_s=office.now_s)
    assert office.change.phase is ResetPhase.RESUMING
    office.unread_from = 1 << 62
    office.run(1)
    assert office.change.is_over
    assert office.change.is_resumed


@pytest.mark.parametrize(("until_s", "left_s"), [(9000, 9000), (1100, 1100), (999, 0)])
def test_a_pause_that_was_there_before_goes_on(until_s: int, left_s: int) -> None:
    office = Office({0: 5}, paused_until_s=until_s)
    office.run(60)
    assert office.change.moved == {(TOPIC, 0): 5}
    assert office.log.paused_until(GROUP) == left_s
    assert office.change.is_resumed


def test_a_move_that_is_not_confirmed_is_told() -> None:
    office = Office({0: 5, 1: 7})
    while office.change.phase is not ResetPhase.MOVING:
        steps = office.change.plan(office.ms, office.now_s)
        for place, step in steps:
            if isinstance(step, WriteGroup):
                office.write_group(step)
            elif place is not None:
                if office.change.phase is ResetPhase.MOVING and place[1] == 1:
                    office.silent.add(1)
                office.admin_step(place, step)
    office.run(200)
    assert office.change.is_over
    assert office.change.moved == {(TOPIC, 0): 5}
    assert "may not have moved" in office.change.failures[(TOPIC, 1)]


def test_no_target_is_no_work() -> None:
    office = Office({})
    office.run(5)
    assert office.change.is_over
    assert office.change.failures == {}


def test_a_pause_outlasts_the_attempt() -> None:
    office = Office({0: 5}, patience_s=100)
    (step,) = [step for _, step in office.change.plan(office.ms, office.now_s)]
    assert isinstance(step, WriteGroup)
    assert step.record.type is MarshalType.RELEASE_GROUP
    assert step.record.version == 0
    assert step.record.expires_at_s == 1000 + 200 + 60
