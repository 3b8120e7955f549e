"""The claimant's steps, C1-C3: claiming, holding and releasing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.claim_fold import GROUP, TOPIC
from tests.unit.claimant_world import ClaimantWorld

from kafkamq.claims.engine import ClaimSession, Listener
from kafkamq.claims.holding import Holding
from kafkamq.claims.rules.steps import (
    Delivery,
    End,
    Fetch,
    Finish,
    LookUp,
    Phase,
    Stop,
    Write,
)
from kafkamq.errors import LeaseLostError
from kafkamq.types import MarshalRecord, MarshalType

AMO = Delivery.AT_MOST_ONCE


# ---- C1


def test_c1_claim_read_back_look_up_heartbeat_read_back_fetch() -> None:
    world = ClaimantWorld()
    world.offsets = (3, 1000, 7)
    claim = world.one(Write)
    assert claim.record == MarshalRecord(
        MarshalType.CLAIMING_PARTITION, 1000, "1", "me", GROUP, TOPIC, 0
    )
    assert claim.commit_offset == -1
    assert world.plan() == [], "one write at a time"
    token = world.land(claim)
    assert world.plan() == [LookUp()]
    assert world.plan() == []
    world.look_up()
    beat = world.one(Write)
    assert (beat.record.type, beat.record.offset) == (MarshalType.HEARTBEAT, 7)
    assert beat.commit_offset == 7
    assert not world.claimant.is_live(world.ms)
    world.land(beat)
    assert world.plan() == [Fetch(7)]
    assert world.claimant.is_live(world.ms)
    assert world.claimant.token == token == 0
    assert world.claimant.position == 7


def test_c1_nothing_is_believed_before_it_is_read() -> None:
    world = ClaimantWorld()
    claim = world.one(Write)
    world.land(claim, is_read=False)
    assert world.plan() == []
    assert world.claimant.token == -1


def test_c1_the_race_is_lost() -> None:
    world = ClaimantWorld()
    claim = world.one(Write)
    world.claims(1000, "other")
    world.land(claim)
    assert world.plan() == [Finish(End.REFUSED, -1)]
    assert world.claimant.phase is Phase.OVER
    assert world.plan() == []
    assert world.claimant.wake_ms() is None


def test_c1_what_is_held_or_paused_is_not_tried() -> None:
    world = ClaimantWorld()
    world.claims(1000, "other")
    assert world.plan() == [Finish(End.HELD, -1)]
    world = ClaimantWorld()
    world.pause(1000, 1100)
    assert world.plan() == [Finish(End.PAUSED, -1)]
    world.now_s = 1100
    world.attempt()
    assert world.one(Write)
    world = ClaimantWorld(ignores_pause=True)
    world.pause(1000, 1100)
    assert world.one(Write)


def test_c1_a_stale_one_is_taken_over_at_its_position() -> None:
    world = ClaimantWorld()
    world.claims(800, "other")
    world.beat(880, "other", 42)
    assert Fetch(42) in world.go()


def test_c1_a_claim_of_unknown_fate_is_repeated_and_counts_from_the_first() -> None:
    world = ClaimantWorld()
    first = world.one(Write)
    world.claimant.on_failed(first.ticket, world.ms)
    assert world.plan() == [], "not at once"
    world.now_s += 10
    second = world.one(Write)
    assert second.record.type is MarshalType.CLAIMING_PARTITION
    world.append(first.record, world.now_s)  # it arrives after all
    assert world.plan() == [LookUp()]
    assert world.claimant.lease_until_ms == 1_060_000
    world.land(second)
    world.look_up()
    assert Fetch(0) in world.go()
    assert world.claimant.token == 0


def test_c1_a_claim_that_is_not_confirmed_in_time_ends_and_is_released_when_it_shows() -> None:
    world = ClaimantWorld()
    claim = world.one(Write)
    world.claimant.on_failed(claim.ticket, world.ms)
    world.now_s += 60
    assert world.plan() == [Finish(End.TIMED_OUT, -1)]
    world.append(claim.record, world.now_s)
    assert world.owner(world.now_s) == "me.1"
    world.attempt()
    steps = world.go()
    assert world.written(steps) == ["ReleasingPartition 0", "ClaimingPartition 0", "Heartbeat 0"]
    assert Fetch(0) in steps


def test_c1_a_log_from_its_middle_is_read_for_two_intervals_first() -> None:
    world = ClaimantWorld(since_s=990)
    assert world.plan() == [Finish(End.HELD, -1)]
    world.now_s = 1110
    world.attempt()
    assert Fetch(0) in world.go()


def test_c1_a_failed_look_up_is_repeated() -> None:
    world = ClaimantWorld()
    world.land(world.one(Write))
    assert world.plan() == [LookUp()]
    world.claimant.on_lookup_failed(world.ms)
    assert world.plan() == []
    assert world.claimant.wake_ms() == world.ms + 500
    world.now_s += 0.5
    assert world.plan() == [LookUp()]


def test_c1_positions_outside_the_log_are_told() -> None:
    world = ClaimantWorld()
    world.claims(800, "other")
    world.beat(801, "other", 42)
    world.offsets = (50, 60, -1)
    assert Fetch(50, deleted=8) in world.go()
    world = ClaimantWorld()
    world.claims(800, "other")
    world.beat(801, "other", 42)
    world.offsets = (0, 20, -1)
    assert Fetch(20, beyond=22) in world.go()


# ---- C2


def test_c2_heartbeats_keep_it() -> None:
    world = ClaimantWorld()
    world.offsets = (0, 0, -1)
    world.go()
    steps = world.wait(600)
    beats = [step for step in steps if isinstance(step, Write)]
    assert 600 / 30 <= len(beats) <= 600 / 15
    assert LookUp() in steps
    assert world.claimant.is_live(world.ms)
    assert world.end() is None


@pytest.mark.parametrize(("random_unit", "after_s"), [(0, 15), (0.5, 22.5), (0.999, 29.985)])
def test_c2_heartbeats_are_spread_over_a_quarter_to_half_an_interval(
    random_unit: float, after_s: float
) -> None:
    world = ClaimantWorld()
    for _ in range(3):
        for step in world.plan(random_unit=random_unit):
            if isinstance(step, Write):
                world.land(step)
            elif isinstance(step, LookUp):
                world.look_up()
    assert world.claimant.wake_ms() == 1_000_000 or world.plan(random_unit=random_unit)
    assert world.claimant.wake_ms() == pytest.approx(1_000_000 + after_s * 1000, abs=1)


def test_c2_the_lease_counts_from_before_the_heartbeat_was_sent() -> None:
    world = ClaimantWorld()
    world.go()
    world.now_s += 30
    beat = world.one(Write)
    world.now_s += 10
    world.land(beat)
    assert world.claimant.lease_until_ms == 1_060_000, "it is read back by plan"
    world.plan()
    assert world.claimant.lease_until_ms == 1_090_000


def test_c2_after_the_lease_nothing_is_handed_out_and_it_is_given_up() -> None:
    world = ClaimantWorld()
    world.go()
    assert world.claimant.hand_out([0, 1], world.ms)
    world.now_s += 59.999
    assert world.claimant.hand_out([2], world.ms)
    world.now_s += 0.001
    assert not world.claimant.hand_out([3], world.ms)
    assert not world.claimant.is_live(world.ms)
    steps = world.plan()
    assert steps[0] == Stop(End.EXPIRED, is_lost=True)
    assert isinstance(steps[1], Write)
    assert steps[1].record.type is MarshalType.RELEASING_PARTITION
    assert steps[1].commit_offset == -1, "another may have committed since"
    with pytest.raises(LeaseLostError, match="no heartbeat was confirmed"):
        world.claimant.commit(0)
    world.land(steps[1])
    assert world.plan() == [Finish(End.EXPIRED, 0, is_confirmed=True)]
    assert world.at(world.now_s).is_claimable, "others need not wait for its end"


def test_c2_a_zombie_releases_nothing_that_it_lost() -> None:
    world = ClaimantWorld()
    world.go()
    world.claimant.hand_out(range(5), world.ms)
    world.now_s += 300
    world.claims(world.now_s, "other")
    world.beat(world.now_s, "other", 80)
    assert world.plan() == [Stop(End.TAKEN, is_lost=True), Finish(End.TAKEN, 0)]
    assert world.owner(world.now_s) == "other.i-other"


def test_c2_a_zombie_that_has_not_read_yet_moves_nothing() -> None:
    world = ClaimantWorld()
    world.go()
    world.now_s += 300
    steps = world.plan()  # it resumes, and has not read that another claimed
    world.claims(world.now_s, "other")
    world.beat(world.now_s, "other", 80)
    release = steps[-1]
    assert isinstance(release, Write)
    world.land(release)
    assert world.go() == [Finish(End.EXPIRED, 0)]
    claim = world.at(world.now_s)
    assert (claim.client, claim.offset) == ("other", 80)


def test_c2_a_heartbeat_that_came_too_late_is_not_believed() -> None:
    world = ClaimantWorld()
    world.go()
    world.now_s += 30
    beat = world.one(Write)
    world.now_s += 200
    world.claims(world.now_s, "other")
    world.land(beat)
    assert world.plan()[0] == Stop(End.TAKEN, is_lost=True)


def test_c2_failed_heartbeats_are_repeated_within_the_lease() -> None:
    world = ClaimantWorld()
    world.go()
    world.now_s += 30
    beat = world.one(Write)
    world.claimant.on_failed(beat.ticket, world.ms)
    world.claimant.on_written(beat.ticket, 99)  # too late an answer changes nothing
    assert world.claimant.wake_ms() == world.ms + 500
    world.now_s += 0.5
    world.land(world.one(Write))
    world.plan()
    assert world.claimant.lease_until_ms == world.ms + 60_000


# ---- C3


def test_c3_release_waits_for_verdicts_and_says_the_position() -> None:
    world = ClaimantWorld()
    world.go()
    world.claimant.hand_out(range(3), world.ms)
    world.claimant.commit(0)
    world.claimant.release(world.ms, drain_ms=5000)
    assert world.plan() == [Stop(End.RELEASED, is_lost=False)]
    assert not world.claimant.hand_out([3], world.ms)
    world.claimant.commit(1)
    assert world.plan() == []
    assert world.claimant.wake_ms() == world.ms + 5000
    world.now_s += 5
    release = world.one(Write)
    assert (release.record.offset, release.commit_offset) == (2, 2)
    with pytest.raises(LeaseLostError):
        world.claimant.commit(2)
    world.land(release)
    assert world.plan() == [Finish(End.RELEASED, 2, is_confirmed=True)]
    claim = world.at(world.now_s)
    assert (claim.client, claim.offset) == ("", 2)


def test_c3_release_is_at_once_when_nothing_is_outstanding() -> None:
    world = ClaimantWorld()
    world.go()
    world.claimant.hand_out(range(3), world.ms)
    for offset in range(3):
        world.claimant.commit(offset)
    world.claimant.release(world.ms, drain_ms=5000)
    assert world.written(world.go()) == ["ReleasingPartition 3"]
    assert world.end() is End.RELEASED


def test_c3_release_does_not_wait_for_what_gets_no_verdict() -> None:
    world = ClaimantWorld()
    world.go()
    world.claimant.hand_out(range(2), world.ms)
    world.claimant.commit(1)
    world.claimant.release(world.ms, drain_ms=5000)
    world.claimant.forget(0)
    assert world.written(world.go()) == ["ReleasingPartition 0"]


def test_c3_a_second_release_shortens_the_drain() -> None:
    """A member that gives a partition to another one is closed, or its group is paused."""
    world = ClaimantWorld()
    world.go()
    world.claimant.hand_out([0], world.ms)
    world.claimant.release(world.ms, drain_ms=2**62, reason=End.SHARED)
    assert "ReleasingPartition 0" not in world.written(world.wait(500))
    world.claimant.release(world.ms)
    assert "ReleasingPartition 0" in world.written(world.go())


def test_c3_while_it_drains_it_heartbeats() -> None:
    world = ClaimantWorld()
    world.go()
    world.claimant.hand_out([0], world.ms)
    world.claimant.release(world.ms, drain_ms=200_000)
    assert "Heartbeat 0" in world.written(world.wait(100))
    assert world.claimant.phase is Phase.DRAINING
    world.claimant.commit(0)
    assert "ReleasingPartition 1" in world.written(world.go())


class Flushing(Holding):
    """The holder of one claim; ``meanwhile`` is what happens while a flush waits."""

    def __init__(self, world: ClaimantWorld, meanwhile: Callable[[], object]) -> None:
        self.waits = 0
        self._meanwhile = meanwhile
        session = ClaimSession(world.claimant, 0, Listener(), start=Fetch(0))
        engine: Any = SimpleNamespace(
            lock=nullcontext(), drive=lambda _: None, wait_until=self._wait_until
        )
        self._sessions, self._engine = {session.place: session}, engine

    def _wait_until(self, is_done: Callable[[], bool], *_: object) -> None:
        while not is_done():
            self.waits += 1
            self._meanwhile()


@pytest.mark.parametrize("drain_ms", [0, 5000])
def test_c3_a_flush_waits_for_what_is_given_back(drain_ms: int) -> None:
    world = ClaimantWorld()
    world.go()
    world.claimant.hand_out(range(2), world.ms)
    world.claimant.commit(0)
    world.claimant.release(world.ms, drain_ms=drain_ms, reason=End.SHARED)
    if not drain_ms:
        world.plan()  # its release is on its way
    flushing = Flushing(world, lambda: world.wait(10))
    if drain_ms:
        flushing.flush()
    else:
        with pytest.raises(LeaseLostError):  # nobody ever reads it
            flushing.flush()
    assert flushing.waits


def test_c3_a_flush_is_done_when_the_release_says_the_position() -> None:
    world = ClaimantWorld()
    world.go()
    world.claimant.hand_out(range(1), world.ms)
    world.claimant.commit(0)

    def share() -> None:
        world.claimant.release(world.ms, drain_ms=5000, reason=End.SHARED)
        (_, release) = world.plan()
        assert isinstance(release, Write)
        world.land(release)
        world.go()

    Flushing(world, share).flush()
    assert world.end() is End.SHARED


def test_c3_a_claim_can_be_kept_for_a_restart() -> None:
    world = ClaimantWorld()
    world.go()
    world.claimant.hand_out([0], world.ms)
    world.claimant.commit(0)
    world.claimant.release(world.ms, keeps_claim=True)
    assert world.written(world.go()) == ["Heartbeat 1"]
    assert world.end() is End.KEPT
    assert world.owner(world.now_s) == "me.1"


def test_c3_a_kept_claim_is_not_renewed_after_its_lease() -> None:
    world = ClaimantWorld()
    world.go()
    world.now_s += 59
    world.claimant.release(world.ms, keeps_claim=True)
    beat = world.one(Write)
    world.claimant.on_failed(beat.ticket, world.ms)
    world.now_s += 1
    assert world.plan() == [Finish(End.KEPT, 0)]


def test_c3_release_that_cannot_be_written_ends_all_the_same() -> None:
    world = ClaimantWorld()
    world.go()
    world.claimant.release(world.ms)
    for _ in range(200):
        for step in world.plan():
            if isinstance(step, Write):
                world.claimant.on_failed(step.ticket, world.ms)
        world.now_s += 0.5
    assert world.end() is End.RELEASED


def test_c3_released_before_anything_was_written() -> None:
    world = ClaimantWorld()
    world.claimant.release(world.ms)
    assert world.plan() == [Finish(End.RELEASED, -1)]


@pytest.mark.parametrize("wins", [True, False])
def test_c3_released_while_the_claim_is_on_its_way(wins: bool) -> None:
    world = ClaimantWorld()
    claim = world.one(Write)
    world.claimant.release(world.ms)
    assert world.plan() == [], "what is under way is awaited"
    if not wins:
        world.claims(world.now_s, "other")
    world.land(claim)
    assert world.written(world.go()) == (["ReleasingPartition 0"] if wins else [])
    assert world.end() is End.RELEASED
    assert world.owner(world.now_s) == ("" if wins else "other.i-other")


def test_c3_released_while_the_claim_has_failed() -> None:
    world = ClaimantWorld()
    claim = world.one(Write)
    world.claimant.release(world.ms)
    world.claimant.on_failed(claim.ticket, world.ms)
    world.now_s += 30
    assert world.plan() == [], "it is not claimed again"
    world.now_s += 30
    assert world.plan() == [Finish(End.RELEASED, -1)]


def test_c3_a_release_can_move_the_position() -> None:
    world = ClaimantWorld()
    world.go()
    world.claimant.release(world.ms, offset=33)
    (release,) = [step for step in world.go() if isinstance(step, Write)]
    assert (release.record.offset, release.commit_offset) == (33, 33)
    assert world.at(world.now_s).offset == 33


def test_a_heartbeats_lateness_is_known() -> None:
    world = ClaimantWorld()
    world.go()
    world.now_s += 31
    world.plan()
    assert world.claimant.lateness_ms == 8500


def test_the_peers_rules_work_as_well() -> None:
    world = ClaimantWorld(rules="peer")
    world.offsets = (0, 0, -1)
    assert Fetch(0) in world.go()
    world.wait(300)
    assert world.end() is None
    world.beat(world.now_s, "zombie", 5)
    assert world.go()[0] == Stop(End.TAKEN, is_lost=True)
