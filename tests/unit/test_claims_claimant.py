"""The claimant's steps, C1-C3: claiming, holding and releasing."""

from __future__ import annotations

import pytest
from tests.unit.claim_desk import Desk
from tests.unit.claim_fold import GROUP, TOPIC

from kafkamq.claims.rules.steps import (
    ClaimantConfig,
    Delivery,
    End,
    Fetch,
    Finish,
    LookUp,
    Phase,
    Stop,
    Write,
)
from kafkamq.errors import ConfigError, LeaseLostError
from kafkamq.types import MarshalRecord, MarshalType

AMO = Delivery.AT_MOST_ONCE


# ---- C1


def test_c1_claim_read_back_look_up_heartbeat_read_back_fetch() -> None:
    desk = Desk()
    desk.offsets = (3, 1000, 7)
    claim = desk.one(Write)
    assert claim.record == MarshalRecord(
        MarshalType.CLAIMING_PARTITION, 1000, "1", "me", GROUP, TOPIC, 0
    )
    assert claim.commit_offset == -1
    assert desk.plan() == [], "one write at a time"
    token = desk.land(claim)
    assert desk.plan() == [LookUp()]
    assert desk.plan() == []
    desk.look_up()
    beat = desk.one(Write)
    assert (beat.record.type, beat.record.offset) == (MarshalType.HEARTBEAT, 7)
    assert beat.commit_offset == 7
    assert not desk.claimant.is_live(desk.ms)
    desk.land(beat)
    assert desk.plan() == [Fetch(7)]
    assert desk.claimant.is_live(desk.ms)
    assert desk.claimant.token == token == 0
    assert desk.claimant.position == 7


def test_c1_nothing_is_believed_before_it_is_read() -> None:
    desk = Desk()
    claim = desk.one(Write)
    desk.land(claim, is_read=False)
    assert desk.plan() == []
    assert desk.claimant.token == -1


def test_c1_the_race_is_lost() -> None:
    desk = Desk()
    claim = desk.one(Write)
    desk.claims(1000, "other")
    desk.land(claim)
    assert desk.plan() == [Finish(End.REFUSED, -1)]
    assert desk.claimant.phase is Phase.OVER
    assert desk.plan() == []
    assert desk.claimant.wake_ms() is None


def test_c1_what_is_held_or_paused_is_not_tried() -> None:
    desk = Desk()
    desk.claims(1000, "other")
    assert desk.plan() == [Finish(End.HELD, -1)]
    desk = Desk()
    desk.pause(1000, 1100)
    assert desk.plan() == [Finish(End.PAUSED, -1)]
    desk.now_s = 1100
    desk.attempt()
    assert desk.one(Write)
    desk = Desk(ignores_pause=True)
    desk.pause(1000, 1100)
    assert desk.one(Write)


def test_c1_a_stale_one_is_taken_over_at_its_position() -> None:
    desk = Desk()
    desk.claims(800, "other")
    desk.beat(880, "other", 42)
    assert Fetch(42) in desk.go()


def test_c1_a_claim_of_unknown_fate_is_repeated_and_counts_from_the_first() -> None:
    desk = Desk()
    first = desk.one(Write)
    desk.claimant.on_failed(first.ticket, desk.ms)
    assert desk.plan() == [], "not at once"
    desk.now_s += 10
    second = desk.one(Write)
    assert second.record.type is MarshalType.CLAIMING_PARTITION
    desk.append(first.record, desk.now_s)  # it arrives after all
    assert desk.plan() == [LookUp()]
    assert desk.claimant.lease_until_ms == 1_060_000
    desk.land(second)
    desk.look_up()
    assert Fetch(0) in desk.go()
    assert desk.claimant.token == 0


def test_c1_a_claim_that_is_not_confirmed_in_time_ends_and_is_released_when_it_shows() -> None:
    desk = Desk()
    claim = desk.one(Write)
    desk.claimant.on_failed(claim.ticket, desk.ms)
    desk.now_s += 60
    assert desk.plan() == [Finish(End.TIMED_OUT, -1)]
    desk.append(claim.record, desk.now_s)
    assert desk.owner(desk.now_s) == "me.1"
    desk.attempt()
    steps = desk.go()
    assert desk.written(steps) == ["ReleasingPartition 0", "ClaimingPartition 0", "Heartbeat 0"]
    assert Fetch(0) in steps


def test_c1_a_log_from_its_middle_is_read_for_two_intervals_first() -> None:
    desk = Desk(since_s=990)
    assert desk.plan() == [Finish(End.HELD, -1)]
    desk.now_s = 1110
    desk.attempt()
    assert Fetch(0) in desk.go()


def test_c1_a_failed_look_up_is_repeated() -> None:
    desk = Desk()
    desk.land(desk.one(Write))
    assert desk.plan() == [LookUp()]
    desk.claimant.on_lookup_failed(desk.ms)
    assert desk.plan() == []
    assert desk.claimant.wake_ms() == desk.ms + 500
    desk.now_s += 0.5
    assert desk.plan() == [LookUp()]


def test_c1_positions_outside_the_log_are_told() -> None:
    desk = Desk()
    desk.claims(800, "other")
    desk.beat(801, "other", 42)
    desk.offsets = (50, 60, -1)
    assert Fetch(50, deleted=8) in desk.go()
    desk = Desk()
    desk.claims(800, "other")
    desk.beat(801, "other", 42)
    desk.offsets = (0, 20, -1)
    assert Fetch(20, beyond=22) in desk.go()


# ---- C2


def test_c2_heartbeats_keep_it() -> None:
    desk = Desk()
    desk.offsets = (0, 0, -1)
    desk.go()
    steps = desk.wait(600)
    beats = [step for step in steps if isinstance(step, Write)]
    assert 600 / 30 <= len(beats) <= 600 / 15
    assert LookUp() in steps
    assert desk.claimant.is_live(desk.ms)
    assert desk.end() is None


@pytest.mark.parametrize(("random_unit", "after_s"), [(0, 15), (0.5, 22.5), (0.999, 29.985)])
def test_c2_heartbeats_are_spread_over_a_quarter_to_half_an_interval(
    random_unit: float, after_s: float
) -> None:
    desk = Desk()
    for _ in range(3):
        for step in desk.plan(random_unit=random_unit):
            if isinstance(step, Write):
                desk.land(step)
            elif isinstance(step, LookUp):
                desk.look_up()
    assert desk.claimant.wake_ms() == 1_000_000 or desk.plan(random_unit=random_unit)
    assert desk.claimant.wake_ms() == pytest.approx(1_000_000 + after_s * 1000, abs=1)


def test_c2_the_lease_counts_from_before_the_heartbeat_was_sent() -> None:
    desk = Desk()
    desk.go()
    desk.now_s += 30
    beat = desk.one(Write)
    desk.now_s += 10
    desk.land(beat)
    assert desk.claimant.lease_until_ms == 1_060_000, "it is read back by plan"
    desk.plan()
    assert desk.claimant.lease_until_ms == 1_090_000


def test_c2_after_the_lease_nothing_is_handed_out_and_it_is_given_up() -> None:
    desk = Desk()
    desk.go()
    assert desk.claimant.hand_out([0, 1], desk.ms)
    desk.now_s += 59.999
    assert desk.claimant.hand_out([2], desk.ms)
    desk.now_s += 0.001
    assert not desk.claimant.hand_out([3], desk.ms)
    assert not desk.claimant.is_live(desk.ms)
    steps = desk.plan()
    assert steps[0] == Stop(End.EXPIRED, is_lost=True)
    assert isinstance(steps[1], Write)
    assert steps[1].record.type is MarshalType.RELEASING_PARTITION
    assert steps[1].commit_offset == -1, "another may have committed since"
    with pytest.raises(LeaseLostError, match="no heartbeat was confirmed"):
        desk.claimant.commit(0)
    desk.land(steps[1])
    assert desk.plan() == [Finish(End.EXPIRED, 0, is_confirmed=True)]
    assert desk.at(desk.now_s).is_claimable, "others need not wait for its end"


def test_c2_a_zombie_releases_nothing_that_it_lost() -> None:
    desk = Desk()
    desk.go()
    desk.claimant.hand_out(range(5), desk.ms)
    desk.now_s += 300
    desk.claims(desk.now_s, "other")
    desk.beat(desk.now_s, "other", 80)
    assert desk.plan() == [Stop(End.TAKEN, is_lost=True), Finish(End.TAKEN, 0)]
    assert desk.owner(desk.now_s) == "other.i-other"


def test_c2_a_zombie_that_has_not_read_yet_moves_nothing() -> None:
    desk = Desk()
    desk.go()
    desk.now_s += 300
    steps = desk.plan()  # it resumes, and has not read that another claimed
    desk.claims(desk.now_s, "other")
    desk.beat(desk.now_s, "other", 80)
    release = steps[-1]
    assert isinstance(release, Write)
    desk.land(release)
    assert desk.go() == [Finish(End.EXPIRED, 0)]
    claim = desk.at(desk.now_s)
    assert (claim.client, claim.offset) == ("other", 80)


def test_c2_a_heartbeat_that_came_too_late_is_not_believed() -> None:
    desk = Desk()
    desk.go()
    desk.now_s += 30
    beat = desk.one(Write)
    desk.now_s += 200
    desk.claims(desk.now_s, "other")
    desk.land(beat)
    assert desk.plan()[0] == Stop(End.TAKEN, is_lost=True)


def test_c2_failed_heartbeats_are_repeated_within_the_lease() -> None:
    desk = Desk()
    desk.go()
    desk.now_s += 30
    beat = desk.one(Write)
    desk.claimant.on_failed(beat.ticket, desk.ms)
    desk.claimant.on_written(beat.ticket, 99)  # too late an answer changes nothing
    assert desk.claimant.wake_ms() == desk.ms + 500
    desk.now_s += 0.5
    desk.land(desk.one(Write))
    desk.plan()
    assert desk.claimant.lease_until_ms == desk.ms + 60_000


def test_c2_a_shorter_lease_can_be_set_and_a_longer_one_than_two_intervals_cannot() -> None:
    desk = Desk(lease_ms=20_000, interval_ms=60_000)
    desk.go()
    desk.now_s += 20
    assert not desk.claimant.is_live(desk.ms)
    with pytest.raises(ConfigError, match="lease_ms"):
        Desk(lease_ms=120_000)


# ---- C3


def test_c3_release_waits_for_verdicts_and_says_the_position() -> None:
    desk = Desk()
    desk.go()
    desk.claimant.hand_out(range(3), desk.ms)
    desk.claimant.commit(0)
    desk.claimant.release(desk.ms, drain_ms=5000)
    assert desk.plan() == [Stop(End.RELEASED, is_lost=False)]
    assert not desk.claimant.hand_out([3], desk.ms)
    desk.claimant.commit(1)
    assert desk.plan() == []
    assert desk.claimant.wake_ms() == desk.ms + 5000
    desk.now_s += 5
    release = desk.one(Write)
    assert (release.record.offset, release.commit_offset) == (2, 2)
    with pytest.raises(LeaseLostError):
        desk.claimant.commit(2)
    desk.land(release)
    assert desk.plan() == [Finish(End.RELEASED, 2, is_confirmed=True)]
    claim = desk.at(desk.now_s)
    assert (claim.client, claim.offset) == ("", 2)


def test_c3_release_is_at_once_when_nothing_is_outstanding() -> None:
    desk = Desk()
    desk.go()
    desk.claimant.hand_out(range(3), desk.ms)
    for offset in range(3):
        desk.claimant.commit(offset)
    desk.claimant.release(desk.ms, drain_ms=5000)
    assert desk.written(desk.go()) == ["ReleasingPartition 3"]
    assert desk.end() is End.RELEASED


def test_c3_while_it_drains_it_heartbeats() -> None:
    desk = Desk()
    desk.go()
    desk.claimant.hand_out([0], desk.ms)
    desk.claimant.release(desk.ms, drain_ms=200_000)
    assert "Heartbeat 0" in desk.written(desk.wait(100))
    assert desk.claimant.phase is Phase.DRAINING
    desk.claimant.commit(0)
    assert "ReleasingPartition 1" in desk.written(desk.go())


def test_c3_a_claim_can_be_kept_for_a_restart() -> None:
    desk = Desk()
    desk.go()
    desk.claimant.hand_out([0], desk.ms)
    desk.claimant.commit(0)
    desk.claimant.release(desk.ms, keeps_claim=True)
    assert desk.written(desk.go()) == ["Heartbeat 1"]
    assert desk.end() is End.KEPT
    assert desk.owner(desk.now_s) == "me.1"


def test_c3_a_kept_claim_is_not_renewed_after_its_lease() -> None:
    desk = Desk()
    desk.go()
    desk.now_s += 59
    desk.claimant.release(desk.ms, keeps_claim=True)
    beat = desk.one(Write)
    desk.claimant.on_failed(beat.ticket, desk.ms)
    desk.now_s += 1
    assert desk.plan() == [Finish(End.KEPT, 0)]


def test_c3_release_that_cannot_be_written_ends_all_the_same() -> None:
    desk = Desk()
    desk.go()
    desk.claimant.release(desk.ms)
    for _ in range(200):
        for step in desk.plan():
            if isinstance(step, Write):
                desk.claimant.on_failed(step.ticket, desk.ms)
        desk.now_s += 0.5
    assert desk.end() is End.RELEASED


def test_c3_released_before_anything_was_written() -> None:
    desk = Desk()
    desk.claimant.release(desk.ms)
    assert desk.plan() == [Finish(End.RELEASED, -1)]


@pytest.mark.parametrize("wins", [True, False])
def test_c3_released_while_the_claim_is_on_its_way(wins: bool) -> None:
    desk = Desk()
    claim = desk.one(Write)
    desk.claimant.release(desk.ms)
    assert desk.plan() == [], "what is under way is awaited"
    if not wins:
        desk.claims(desk.now_s, "other")
    desk.land(claim)
    assert desk.written(desk.go()) == (["ReleasingPartition 0"] if wins else [])
    assert desk.end() is End.RELEASED
    assert desk.owner(desk.now_s) == ("" if wins else "other.i-other")


def test_c3_released_while_the_claim_has_failed() -> None:
    desk = Desk()
    claim = desk.one(Write)
    desk.claimant.release(desk.ms)
    desk.claimant.on_failed(claim.ticket, desk.ms)
    desk.now_s += 30
    assert desk.plan() == [], "it is not claimed again"
    desk.now_s += 30
    assert desk.plan() == [Finish(End.RELEASED, -1)]


def test_c3_a_release_can_move_the_position() -> None:
    desk = Desk()
    desk.go()
    desk.claimant.release(desk.ms, offset=33)
    (release,) = [step for step in desk.go() if isinstance(step, Write)]
    assert (release.record.offset, release.commit_offset) == (33, 33)
    assert desk.at(desk.now_s).offset == 33


@pytest.mark.parametrize(
    "wrong",
    [{"client": ""}, {"client": "a/b"}, {"instance": ""}, {"group": "x" * 250}, {"topic": "/"},
     {"partition": -1}, {"partition": 2**31}, {"interval_ms": 0}, {"retry_ms": 0},
     {"lease_ms": -1}, {"lease_ms": 120_000}],
)  # fmt: skip
def test_settings_are_checked(wrong: dict[str, object]) -> None:
    settings: dict[str, object] = {
        "client": "c", "instance": "i", "group": "g", "topic": "t", "partition": 0
    }  # fmt: skip
    ClaimantConfig(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        ClaimantConfig(**{**settings, **wrong})  # type: ignore[arg-type]


def test_a_heartbeats_lateness_is_known() -> None:
    desk = Desk()
    desk.go()
    desk.now_s += 31
    desk.plan()
    assert desk.claimant.lateness_ms == 8500


def test_the_peers_rules_work_as_well() -> None:
    desk = Desk(rules="peer")
    desk.offsets = (0, 0, -1)
    assert Fetch(0) in desk.go()
    desk.wait(300)
    assert desk.end() is None
    desk.beat(desk.now_s, "zombie", 5)
    assert desk.go()[0] == Stop(End.TAKEN, is_lost=True)
