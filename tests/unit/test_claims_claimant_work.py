"""The claimant's steps, C4-C7: restarts, positions, batches, and when it gives up."""

from __future__ import annotations

import pytest
from tests.unit.claim_desk import Desk
from tests.unit.claim_fold import GROUP, TOPIC

from kafkamq.claims.rules.log import ClaimLog
from kafkamq.claims.rules.steps import Delivery, End, Fetch, Finish, HandOut, LookUp, Stop, Write
from kafkamq.errors import StateError
from kafkamq.types import MarshalRecord, MarshalType

AMO = Delivery.AT_MOST_ONCE


# ---- C4


def test_c4_a_restart_takes_over_with_a_heartbeat() -> None:
    desk = Desk()
    desk.claims(960, "me.0")
    desk.beat(961, "me.0", 42)
    steps = desk.go()
    assert desk.written(steps) == ["Heartbeat 42"]
    assert Fetch(42) in steps
    assert desk.claimant.token == 2
    assert desk.owner(1000) == "me.1"
    desk.beat(1001, "me.0", 60)
    assert desk.go() == [], "the former instance changes nothing"


@pytest.mark.parametrize(
    ("at_s", "who", "reclaim", "expected"),
    [
        (940, "me.0", True, "Heartbeat"),  # fresh to the second
        (939, "me.0", True, "held"),  # the Go client would take it over
        (880, "me.0", True, "ClaimingPartition"),
        (960, "me.0", False, "held"),
        (960, "other.0", True, "held"),
    ],
)
def test_c4_only_what_is_fresh_and_of_the_same_client(
    at_s: int, who: str, reclaim: bool, expected: str
) -> None:
    desk = Desk(reclaim=reclaim)
    desk.claims(at_s, who)
    if expected == "held":
        assert desk.plan() == [Finish(End.HELD, -1)]
    else:
        assert desk.written(desk.go())[0].startswith(expected)


def test_c4_it_begins_where_the_former_instance_came_meanwhile() -> None:
    desk = Desk()
    desk.claims(960, "me.0")
    desk.beat(961, "me.0", 42)
    assert desk.plan() == [LookUp()]
    desk.look_up()
    beat = desk.one(Write)
    assert beat.record.offset == 42
    desk.beat(1000, "me.0", 55)
    desk.land(beat)
    assert desk.plan() == [Fetch(55)]
    assert desk.claimant.position == 55


def test_c4_taken_by_another_meanwhile() -> None:
    desk = Desk()
    desk.claims(960, "me.0")
    assert desk.plan() == [LookUp()]
    desk.look_up()
    beat = desk.one(Write)
    desk.release(1000, "me.0", 50)
    desk.claims(1000, "other")
    desk.land(beat)
    assert desk.plan() == [Finish(End.REFUSED, -1)]
    assert desk.at(1000).offset == 50


def test_c4_released_meanwhile() -> None:
    desk = Desk()
    desk.claims(960, "me.0")
    assert desk.plan() == [LookUp()]
    desk.release(1000, "me.0", 50)
    desk.look_up()
    assert desk.plan() == [Finish(End.REFUSED, -1)], "a heartbeat now would be a claim"


def test_c4_from_the_middle_of_the_log() -> None:
    desk = Desk(since_s=800)
    desk.beat(990, "me.0", 42)
    assert Fetch(42) in desk.go()
    desk = Desk(since_s=800)
    desk.beat(980, "other.0", 42)
    desk.beat(990, "me.0", 42)
    assert desk.plan() == [Finish(End.HELD, -1)], "the other may hold it"


# ---- C5


def test_c5_the_position_is_the_first_gap() -> None:
    desk = Desk()
    desk.go()
    desk.claimant.hand_out([0, 1, 2, 5], desk.ms)
    desk.claimant.commit(1)
    desk.claimant.commit(0)
    desk.claimant.commit(5)
    assert desk.claimant.outstanding == 1
    assert "Heartbeat 2" in desk.written(desk.wait(31))
    desk.claimant.commit(2)
    assert "Heartbeat 6" in desk.written(desk.wait(31))
    with pytest.raises(StateError):
        desk.claimant.commit(2)
    with pytest.raises(StateError):
        desk.claimant.commit(9)
    with pytest.raises(StateError):
        desk.claimant.hand_out([5], desk.ms)


# ---- C6


def at_most_once() -> Desk:
    desk = Desk(delivery=AMO)
    desk.go()
    assert desk.claimant.wants_batch
    return desk


def test_c6_a_batch_is_announced_committed_and_then_handed_out() -> None:
    desk = at_most_once()
    desk.claimant.offer(0, 500, desk.ms)
    assert not desk.claimant.wants_batch
    intent = desk.one(Write)
    assert (intent.record.type, intent.record.offset) == (MarshalType.CLAIMING_MESSAGES, 500)
    assert intent.commit_offset == -1
    assert desk.plan() == []
    desk.land(intent)
    beat = desk.one(Write)
    assert (beat.record.type, beat.record.offset) == (MarshalType.HEARTBEAT, 500)
    assert (beat.commit_offset, beat.must_commit) == (500, True)
    assert desk.claimant.position == 0
    desk.land(beat)
    assert desk.plan() == [HandOut(0, 500)]
    assert desk.claimant.position == 500
    assert desk.claimant.wants_batch


def test_c6_batches_follow_each_other_and_may_leave_gaps() -> None:
    desk = at_most_once()
    for first, following in ((0, 10), (10, 20), (25, 30)):
        desk.claimant.offer(first, following, desk.ms)
        assert HandOut(first, following) in desk.go()
    for first, following in ((29, 31), (31, 31), (40, 35)):
        with pytest.raises(StateError):
            desk.claimant.offer(first, following, desk.ms)
    desk.claimant.offer(30, 31, desk.ms)
    with pytest.raises(StateError, match="none is wanted"):
        desk.claimant.offer(31, 32, desk.ms)


def test_c6_nothing_is_handed_out_twice_when_a_write_is_repeated() -> None:
    desk = at_most_once()
    desk.claimant.offer(0, 10, desk.ms)
    for type in (MarshalType.CLAIMING_MESSAGES, MarshalType.HEARTBEAT):
        write = desk.one(Write)
        assert write.record.type is type
        desk.append(write.record, desk.now_s)  # it arrives, but nobody says so
        desk.claimant.on_failed(write.ticket, desk.ms)
        desk.now_s += 1
        again = desk.one(Write)
        assert again.record.type is type
        desk.land(again)
    assert desk.go() == [HandOut(0, 10)]
    assert desk.go() == []


def test_c6_lost_between_announcement_and_heartbeat() -> None:
    desk = at_most_once()
    desk.claimant.offer(0, 10, desk.ms)
    desk.land(desk.one(Write))
    beat = desk.one(Write)
    desk.now_s += 130
    desk.claims(desk.now_s, "other")
    desk.land(beat)
    steps = desk.go()
    assert steps == [Stop(End.TAKEN, is_lost=True), Finish(End.TAKEN, 0)]
    assert desk.at(desk.now_s).offset == 0, "the successor begins with this batch"


def test_c6_the_heartbeat_is_read_back_after_the_lease() -> None:
    """Nobody took over; but somebody may, at any moment: the batch is lost, not doubled."""
    desk = at_most_once()
    desk.claimant.offer(0, 10, desk.ms)
    desk.land(desk.one(Write))
    beat = desk.one(Write)
    desk.land(beat)
    desk.now_s += 60
    assert not any(isinstance(step, HandOut) for step in desk.go())
    assert desk.end() is End.EXPIRED
    assert desk.at(desk.now_s).offset == 0, "it was handed out to nobody: it is free"


def test_c6_an_announcement_under_a_claim_that_did_not_hold_is_worth_nothing() -> None:
    desk = Desk(delivery=AMO, interval_ms=60_000)
    desk.go()
    desk.claimant.offer(0, 10, desk.ms)
    intent = desk.one(Write)
    at = desk.append(intent.record, desk.now_s + 125)  # the broker's clock went ahead
    desk.beat(desk.now_s + 125, "me.1", 0)
    desk.claimant.on_written(intent.ticket, at)
    assert desk.plan()[0] == Stop(End.EXPIRED, is_lost=True)


def test_c6_a_release_waits_for_the_batch_under_way() -> None:
    desk = at_most_once()
    desk.claimant.offer(0, 10, desk.ms)
    desk.land(desk.one(Write))
    desk.claimant.release(desk.ms, drain_ms=5000)
    steps = desk.go()
    assert HandOut(0, 10) in steps
    assert desk.written(steps) == ["Heartbeat 10", "ReleasingPartition 10"]
    desk = at_most_once()
    desk.claimant.offer(0, 10, desk.ms)
    desk.plan()
    desk.claimant.release(desk.ms)
    assert desk.written(desk.go()) == ["ReleasingPartition 0"], "not for ever"


def test_c6_starts_behind_everything_that_may_have_been_handed_out() -> None:
    desk = Desk(delivery=AMO)
    desk.claims(800, "other")
    desk.beat(801, "other", 42)
    desk.offsets = (0, 1000, 60)
    assert Fetch(60) in desk.go()
    desk = Desk(delivery=AMO, since_s=700)
    desk.beat(800, "one", 42)
    desk.beat(801, "two", 80)
    assert Fetch(80) in desk.go()
    desk = Desk(since_s=700)  # and at least once before everything that may not be done
    desk.beat(800, "one", 42)
    desk.beat(801, "two", 80)
    assert Fetch(42) in desk.go()


# ---- C7


def test_c7_a_pause_releases_and_lets_verdicts_come() -> None:
    desk = Desk()
    desk.go()
    desk.claimant.hand_out([0], desk.ms)
    desk.pause(desk.now_s, 5000)
    assert desk.plan() == [Stop(End.PAUSED, is_lost=False)]
    desk.claimant.commit(0)
    assert desk.written(desk.go()) == ["ReleasingPartition 1"]
    assert desk.end() is End.PAUSED


def test_c7_the_admin_of_a_pause_stays() -> None:
    desk = Desk(ignores_pause=True)
    desk.pause(desk.now_s, 5000)
    desk.go()
    assert desk.claimant.is_live(desk.ms)


def test_c7_falling_behind_three_times_releases() -> None:
    desk = Desk()
    desk.go()
    position = 0
    for cycle in range(1, 12):
        desk.offsets = (0, 1000 + 500 * cycle, -1)
        desk.claimant.hand_out([position], desk.ms)
        desk.claimant.commit(position)
        position += 1
        desk.wait(23)
        if desk.end() is not None:
            break
    assert desk.end() is End.BEHIND
    assert desk.at(desk.now_s).offset == position
    assert cycle == 3


def test_c7_positions_that_are_written_at_once_are_no_checks() -> None:
    """Who flushes often is not slower for it."""
    desk = Desk()
    desk.offsets = (0, 1000, -1)
    desk.go()
    for _ in range(20):
        desk.claimant.beat_soon(desk.ms)
        assert desk.written(desk.go()) == ["Heartbeat 0"]
    assert desk.end() is None


@pytest.mark.parametrize("option", ["release_if_behind", "is_whole_topic"])
def test_c7_unless_that_is_not_wanted(option: str) -> None:
    desk = Desk(**{option: option == "is_whole_topic"})
    desk.go()
    for cycle in range(1, 12):
        desk.offsets = (0, 1000 + 500 * cycle, -1)
        if not desk.claimant.outstanding:
            desk.claimant.hand_out([cycle], desk.ms)
        desk.claimant.commit(cycle)
        desk.wait(23)
    assert desk.end() is None


def test_c7_stuck_releases_and_idle_does_not() -> None:
    desk = Desk()
    desk.offsets = (0, 0, -1)
    desk.go()
    desk.wait(300)
    assert desk.end() is None
    desk.offsets = (0, 20, -1)
    desk.wait(30)
    assert desk.end() is End.STUCK


def test_c7_gives_way_to_a_rival_beside_clients_of_other_rules() -> None:
    for yields, expected in ((True, End.RIVAL), (False, None)):
        desk = Desk(yields_to_rivals=yields)
        desk.go()
        desk.beat(1001, "go", 7)
        desk.go()
        assert desk.end() is expected
    desk = Desk(yields_to_rivals=True)
    desk.go()
    desk.beat(1001, "go", 7)
    desk.go()
    desk.beat(1002, "go", 8)
    assert desk.owner(1002) == "go.i-go", "and the log says so"


def test_c7_nothing_is_claimed_that_the_other_rules_hold() -> None:
    peers = ClaimLog("peer")
    record = MarshalRecord(MarshalType.HEARTBEAT, 1100, "i", "go", GROUP, TOPIC)
    peers.apply(record, offset=0, observed_at_s=1000)
    desk = Desk(peers=peers)
    assert desk.plan(wall_s=1150) == [Finish(End.HELD, -1)]
    desk.attempt()
    assert desk.plan(wall_s=1220)[0] != Finish(End.HELD, -1)


def test_uncertain_is_lost() -> None:
    desk = Desk(since_s=800)
    desk.go()
    desk.beat(1001, "me.0", 9)  # from before what was read, or a second process of this client
    steps = desk.go()
    assert steps[0] == Stop(End.UNCERTAIN, is_lost=True)
    assert desk.end() is End.UNCERTAIN


def test_a_batch_that_nobody_waits_for_is_announced_and_not_committed() -> None:
    """C6: so what was read ahead is not lost with the process."""
    desk = Desk(delivery=AMO)
    desk.go()
    desk.claimant.offer(0, 10, desk.ms, is_wanted=False)
    steps = desk.go()
    assert [step.record.type for step in steps if isinstance(step, Write)] == [
        MarshalType.CLAIMING_MESSAGES
    ]
    desk.now_s += 40
    steps = desk.go()
    beats = [step.record for step in steps if isinstance(step, Write)]
    assert [(beat.type, beat.offset) for beat in beats] == [(MarshalType.HEARTBEAT, 0)]
    assert not [step for step in steps if isinstance(step, HandOut)]
    assert desk.claimant.want_batch()
    steps = desk.go()
    assert [step for step in steps if isinstance(step, HandOut)] == [HandOut(0, 10)]
    assert desk.claimant.confirmed_position == 10
    assert not desk.claimant.want_batch()


def test_what_was_only_announced_is_given_back_with_the_claim() -> None:
    desk = Desk(delivery=AMO)
    desk.go()
    desk.claimant.offer(0, 10, desk.ms, is_wanted=False)
    desk.go()
    wake_ms = desk.claimant.wake_ms()
    assert wake_ms is not None
    assert wake_ms > desk.ms, "nothing is to do before the next heartbeat"
    desk.claimant.release(desk.ms, drain_ms=30_000)  # nobody will ask for it
    steps = desk.go()
    (release,) = [step.record for step in steps if isinstance(step, Write)]
    assert (release.type, release.offset) == (MarshalType.RELEASING_PARTITION, 0)


def test_a_position_can_be_written_at_once() -> None:
    desk = Desk()
    desk.go()
    assert desk.claimant.hand_out((0, 1), desk.ms)
    desk.claimant.commit(0)
    assert desk.go() == []
    desk.claimant.beat_soon(desk.ms)
    desk.go()
    assert desk.claimant.confirmed_position == 1
