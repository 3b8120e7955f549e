"""The claimant's steps, C4-C7: restarts, positions, batches, and when it gives up."""

from __future__ import annotations

import pytest
from tests.unit.claim_fold import GROUP, TOPIC
from tests.unit.claimant_world import ClaimantWorld

from kafkamq.claims.rules.log import ClaimLog
from kafkamq.claims.rules.steps import Delivery, End, Fetch, Finish, HandOut, LookUp, Stop, Write
from kafkamq.errors import StateError
from kafkamq.types import MarshalRecord, MarshalType

AMO = Delivery.AT_MOST_ONCE


# ---- C4


def test_c4_a_restart_takes_over_with_a_heartbeat() -> None:
    world = ClaimantWorld()
    world.claims(960, "me.0")
    world.beat(961, "me.0", 42)
    steps = world.go()
    assert world.written(steps) == ["Heartbeat 42"]
    assert Fetch(42) in steps
    assert world.claimant.token == 2
    assert world.owner(1000) == "me.1"
    world.beat(1001, "me.0", 60)
    assert world.go() == [], "the former instance changes nothing"


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
    world = ClaimantWorld(reclaim=reclaim)
    world.claims(at_s, who)
    if expected == "held":
        assert world.plan() == [Finish(End.HELD, -1)]
    else:
        assert world.written(world.go())[0].startswith(expected)


def test_c4_it_begins_where_the_former_instance_came_meanwhile() -> None:
    world = ClaimantWorld()
    world.claims(960, "me.0")
    world.beat(961, "me.0", 42)
    assert world.plan() == [LookUp()]
    world.look_up()
    beat = world.one(Write)
    assert beat.record.offset == 42
    world.beat(1000, "me.0", 55)
    world.land(beat)
    assert world.plan() == [Fetch(55)]
    assert world.claimant.position == 55


def test_c4_taken_by_another_meanwhile() -> None:
    world = ClaimantWorld()
    world.claims(960, "me.0")
    assert world.plan() == [LookUp()]
    world.look_up()
    beat = world.one(Write)
    world.release(1000, "me.0", 50)
    world.claims(1000, "other")
    world.land(beat)
    assert world.plan() == [Finish(End.REFUSED, -1)]
    assert world.at(1000).offset == 50


def test_c4_released_meanwhile() -> None:
    world = ClaimantWorld()
    world.claims(960, "me.0")
    assert world.plan() == [LookUp()]
    world.release(1000, "me.0", 50)
    world.look_up()
    assert world.plan() == [Finish(End.REFUSED, -1)], "a heartbeat now would be a claim"


def test_c4_from_the_middle_of_the_log() -> None:
    world = ClaimantWorld(since_s=800)
    world.beat(990, "me.0", 42)
    assert Fetch(42) in world.go()
    world = ClaimantWorld(since_s=800)
    world.beat(980, "other.0", 42)
    world.beat(990, "me.0", 42)
    assert world.plan() == [Finish(End.HELD, -1)], "the other may hold it"


# ---- C5


def test_c5_the_position_is_the_first_gap() -> None:
    world = ClaimantWorld()
    world.go()
    world.claimant.hand_out([0, 1, 2, 5], world.ms)
    world.claimant.commit(1)
    world.claimant.commit(0)
    world.claimant.commit(5)
    assert world.claimant.outstanding == 1
    assert "Heartbeat 2" in world.written(world.wait(31))
    world.claimant.commit(2)
    assert "Heartbeat 6" in world.written(world.wait(31))
    with pytest.raises(StateError):
        world.claimant.commit(2)
    with pytest.raises(StateError):
        world.claimant.commit(9)
    with pytest.raises(StateError):
        world.claimant.hand_out([5], world.ms)


# ---- C6


def at_most_once() -> ClaimantWorld:
    world = ClaimantWorld(delivery=AMO)
    world.go()
    assert world.claimant.wants_batch
    return world


def test_c6_a_batch_is_announced_committed_and_then_handed_out() -> None:
    world = at_most_once()
    world.claimant.offer(0, 500, world.ms)
    assert not world.claimant.wants_batch
    intent = world.one(Write)
    assert (intent.record.type, intent.record.offset) == (MarshalType.CLAIMING_MESSAGES, 500)
    assert intent.commit_offset == -1
    assert world.plan() == []
    world.land(intent)
    beat = world.one(Write)
    assert (beat.record.type, beat.record.offset) == (MarshalType.HEARTBEAT, 500)
    assert (beat.commit_offset, beat.must_commit) == (500, True)
    assert world.claimant.position == 0
    world.land(beat)
    assert world.plan() == [HandOut(0, 500)]
    assert world.claimant.position == 500
    assert world.claimant.wants_batch


@pytest.mark.parametrize("is_taken", [False, True])
def test_c6_a_release_gives_back_what_nobody_took(is_taken: bool) -> None:
    """Whatever it is released for: no crash, no loss."""
    world = at_most_once()
    world.claimant.offer(0, 10, world.ms)
    assert HandOut(0, 10) in world.go()
    if is_taken:
        assert world.claimant.take_batch(world.ms)
    world.claimant.release(world.ms, reason=End.BEHIND)
    assert not world.claimant.take_batch(world.ms)
    (release,) = [step for step in world.go() if isinstance(step, Write)]
    offset = 10 if is_taken else 0
    assert (release.record.offset, release.commit_offset) == (offset, offset)
    assert release.must_commit is not is_taken, "the group's position goes back, too"


def test_c6_batches_follow_each_other_and_may_leave_gaps() -> None:
    world = at_most_once()
    for first, following in ((0, 10), (10, 20), (25, 30)):
        world.claimant.offer(first, following, world.ms)
        assert HandOut(first, following) in world.go()
    for first, following in ((29, 31), (31, 31), (40, 35)):
        with pytest.raises(StateError):
            world.claimant.offer(first, following, world.ms)
    world.claimant.offer(30, 31, world.ms)
    with pytest.raises(StateError, match="none is wanted"):
        world.claimant.offer(31, 32, world.ms)


def test_c6_nothing_is_handed_out_twice_when_a_write_is_repeated() -> None:
    world = at_most_once()
    world.claimant.offer(0, 10, world.ms)
    for type in (MarshalType.CLAIMING_MESSAGES, MarshalType.HEARTBEAT):
        write = world.one(Write)
        assert write.record.type is type
        world.append(write.record, world.now_s)  # it arrives, but nobody says so
        world.claimant.on_failed(write.ticket, world.ms)
        world.now_s += 1
        again = world.one(Write)
        assert again.record.type is type
        world.land(again)
    assert world.go() == [HandOut(0, 10)]
    assert world.go() == []


def test_c6_lost_between_announcement_and_heartbeat() -> None:
    world = at_most_once()
    world.claimant.offer(0, 10, world.ms)
    world.land(world.one(Write))
    beat = world.one(Write)
    world.now_s += 130
    world.claims(world.now_s, "other")
    world.land(beat)
    steps = world.go()
    assert steps == [Stop(End.TAKEN, is_lost=True), Finish(End.TAKEN, 0)]
    assert world.at(world.now_s).offset == 0, "the successor begins with this batch"


def test_c6_the_heartbeat_is_read_back_after_the_lease() -> None:
    """Nobody took over; but somebody may, at any moment: the batch is lost, not doubled."""
    world = at_most_once()
    world.claimant.offer(0, 10, world.ms)
    world.land(world.one(Write))
    beat = world.one(Write)
    world.land(beat)
    world.now_s += 60
    assert not any(isinstance(step, HandOut) for step in world.go())
    assert world.end() is End.EXPIRED
    assert world.at(world.now_s).offset == 0, "it was handed out to nobody: it is free"


def test_c6_an_announcement_under_a_claim_that_did_not_hold_is_worth_nothing() -> None:
    world = ClaimantWorld(delivery=AMO, interval_ms=60_000)
    world.go()
    world.claimant.offer(0, 10, world.ms)
    intent = world.one(Write)
    at = world.append(intent.record, world.now_s + 125)  # the broker's clock went ahead
    world.beat(world.now_s + 125, "me.1", 0)
    world.claimant.on_written(intent.ticket, at)
    assert world.plan()[0] == Stop(End.EXPIRED, is_lost=True)


def test_c6_a_release_waits_for_the_batch_under_way() -> None:
    world = at_most_once()
    world.claimant.offer(0, 10, world.ms)
    world.land(world.one(Write))
    world.claimant.release(world.ms, drain_ms=5000)
    steps = world.go()
    assert HandOut(0, 10) in steps
    written = ["Heartbeat 10", "ReleasingPartition 0"]
    assert world.written(steps) == written, "nobody takes it any more: it is given back"
    world = at_most_once()
    world.claimant.offer(0, 10, world.ms)
    world.plan()
    world.claimant.release(world.ms)
    assert world.written(world.go()) == ["ReleasingPartition 0"], "not forever"


def test_c6_starts_behind_everything_that_may_have_been_handed_out() -> None:
    world = ClaimantWorld(delivery=AMO)
    world.claims(800, "other")
    world.beat(801, "other", 42)
    world.offsets = (0, 1000, 60)
    assert Fetch(60) in world.go()
    world = ClaimantWorld(delivery=AMO, since_s=700)
    world.beat(800, "one", 42)
    world.beat(801, "two", 80)
    assert Fetch(80) in world.go()
    world = ClaimantWorld(since_s=700)  # and at least once before everything that may not be done
    world.beat(800, "one", 42)
    world.beat(801, "two", 80)
    assert Fetch(42) in world.go()


# ---- C7


def test_c7_a_pause_releases_and_lets_verdicts_come() -> None:
    world = ClaimantWorld()
    world.go()
    world.claimant.hand_out([0], world.ms)
    world.pause(world.now_s, 5000)
    assert world.plan() == [Stop(End.PAUSED, is_lost=False)]
    world.claimant.commit(0)
    assert world.written(world.go()) == ["ReleasingPartition 1"]
    assert world.end() is End.PAUSED


def test_c7_the_admin_of_a_pause_stays() -> None:
    world = ClaimantWorld(ignores_pause=True)
    world.pause(world.now_s, 5000)
    world.go()
    assert world.claimant.is_live(world.ms)


def test_c7_falling_behind_three_times_releases() -> None:
    world = ClaimantWorld()
    world.go()
    position = 0
    for cycle in range(1, 12):
        world.offsets = (0, 1000 + 500 * cycle, -1)
        world.claimant.hand_out([position], world.ms)
        world.claimant.commit(position)
        position += 1
        world.wait(23)
        if world.end() is not None:
            break
    assert world.end() is End.BEHIND
    assert world.at(world.now_s).offset == position
    assert cycle == 3


def test_c7_positions_that_are_written_at_once_are_no_checks() -> None:
    """Who flushes often is not slower for it."""
    world = ClaimantWorld()
    world.offsets = (0, 1000, -1)
    world.go()
    for _ in range(20):
        world.claimant.beat_soon(world.ms)
        assert world.written(world.go()) == ["Heartbeat 0"]
    assert world.end() is None


@pytest.mark.parametrize("option", ["release_if_behind", "is_whole_topic"])
def test_c7_unless_that_is_not_wanted(option: str) -> None:
    world = ClaimantWorld(**{option: option == "is_whole_topic"})
    world.go()
    for cycle in range(1, 12):
        world.offsets = (0, 1000 + 500 * cycle, -1)
        if not world.claimant.outstanding:
            world.claimant.hand_out([cycle], world.ms)
        world.claimant.commit(cycle)
        world.wait(23)
    assert world.end() is None


def test_c7_stuck_releases_and_idle_does_not() -> None:
    world = ClaimantWorld()
    world.offsets = (0, 0, -1)
    world.go()
    world.wait(300)
    assert world.end() is None
    world.offsets = (0, 20, -1)
    world.wait(30)
    assert world.end() is End.STUCK


def test_c7_a_whole_topic_cannot_be_stuck_before_all_of_it_is_held() -> None:
    world = ClaimantWorld(is_whole_topic=True)
    world.offsets = (0, 20, -1)
    world.go()
    world.wait(300)
    assert world.end() is None
    world.claimant.read(world.ms)
    world.wait(300)
    assert world.end() is End.STUCK


def test_c7_gives_way_to_a_rival_beside_clients_of_other_rules() -> None:
    for yields, expected in ((True, End.RIVAL), (False, None)):
        world = ClaimantWorld(yields_to_rivals=yields)
        world.go()
        world.beat(1001, "go", 7)
        world.go()
        assert world.end() is expected
    world = ClaimantWorld(yields_to_rivals=True)
    world.go()
    world.beat(1001, "go", 7)
    world.go()
    world.beat(1002, "go", 8)
    assert world.owner(1002) == "go.i-go", "and the log says so"


def test_c7_nothing_is_claimed_that_the_other_rules_hold() -> None:
    peers = ClaimLog("peer")
    record = MarshalRecord(MarshalType.HEARTBEAT, 1100, "i", "go", GROUP, TOPIC)
    peers.apply(record, offset=0, observed_at_s=1000)
    world = ClaimantWorld(peers=peers)
    assert world.plan(wall_s=1150) == [Finish(End.HELD, -1)]
    world.attempt()
    assert world.plan(wall_s=1220)[0] != Finish(End.HELD, -1)


def test_uncertain_is_lost() -> None:
    world = ClaimantWorld(since_s=800)
    world.go()
    world.beat(1001, "me.0", 9)  # from before what was read, or a second process of this client
    steps = world.go()
    assert steps[0] == Stop(End.UNCERTAIN, is_lost=True)
    assert world.end() is End.UNCERTAIN


def test_a_batch_that_nobody_waits_for_is_announced_and_not_committed() -> None:
    """C6: so what was read ahead is not lost with the process."""
    world = ClaimantWorld(delivery=AMO)
    world.go()
    world.claimant.offer(0, 10, world.ms, is_wanted=False)
    steps = world.go()
    assert [step.record.type for step in steps if isinstance(step, Write)] == [
        MarshalType.CLAIMING_MESSAGES
    ]
    world.now_s += 40
    steps = world.go()
    beats = [step.record for step in steps if isinstance(step, Write)]
    assert [(beat.type, beat.offset) for beat in beats] == [(MarshalType.HEARTBEAT, 0)]
    assert not [step for step in steps if isinstance(step, HandOut)]
    assert world.claimant.want_batch()
    steps = world.go()
    assert [step for step in steps if isinstance(step, HandOut)] == [HandOut(0, 10)]
    assert world.claimant.confirmed_position == 10
    assert not world.claimant.want_batch()


def test_what_was_only_announced_is_given_back_with_the_claim() -> None:
    world = ClaimantWorld(delivery=AMO)
    world.go()
    world.claimant.offer(0, 10, world.ms, is_wanted=False)
    world.go()
    wake_ms = world.claimant.wake_ms()
    assert wake_ms is not None
    assert wake_ms > world.ms, "nothing is to do before the next heartbeat"
    world.claimant.release(world.ms, drain_ms=30_000)  # nobody will ask for it
    steps = world.go()
    (release,) = [step.record for step in steps if isinstance(step, Write)]
    assert (release.type, release.offset) == (MarshalType.RELEASING_PARTITION, 0)


def test_a_position_can_be_written_at_once() -> None:
    world = ClaimantWorld()
    world.go()
    assert world.claimant.hand_out((0, 1), world.ms)
    world.claimant.commit(0)
    assert world.go() == []
    world.claimant.beat_soon(world.ms)
    world.go()
    assert world.claimant.confirmed_position == 1


def test_a_position_that_is_to_be_written_is_known_while_another_one_is_under_way() -> None:
    """Who waits until it is confirmed would otherwise wait for that one."""
    world = ClaimantWorld()
    world.go()
    assert world.claimant.hand_out((0, 1), world.ms)
    world.claimant.commit(0)
    world.claimant.beat_soon(world.ms)
    under_way = world.one(Write)
    world.claimant.commit(1)
    world.claimant.beat_soon(world.ms)
    assert world.claimant.position == 2
    world.land(under_way)
    world.go()
    assert world.claimant.confirmed_position == 2
