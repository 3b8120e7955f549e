"""R5, R7-R9: one worker's leases, case by case. Times: monotonic in ms, log time apart from it."""

from __future__ import annotations

from typing import cast

import pytest

from kafkamq.markers.rules.batching import MessageSet
from kafkamq.markers.rules.hold import CHUNK_OFFSETS
from kafkamq.markers.rules.leases import (
    NEW_PARTITION_MS,
    Lease,
    Leases,
    LeaseState,
    Refusal,
    Verdict,
)
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.types import Marker, MarkerType, MessageBatch, MessageId, Outcome

T = 3000
MAX_LEASE = 60_000
LOG = 5_000_000  # log time at monotonic 0


def make(timeout_ms: int = T, max_lease_ms: int = MAX_LEASE) -> Leases:
    return Leases("me", redelivery_timeout_ms=timeout_ms, max_lease_ms=max_lease_ms)


def start(leases: Leases, message_id: MessageId, marker_partition: int) -> Lease:
    place = message_id.partition, [message_id.offset], message_id.log
    return leases.start(*place, marker_partition)


def message_set(*batches: MessageBatch) -> MessageSet:
    messages = MessageSet()
    for batch in batches:
        messages.add(batch)
    return messages


def held(leases: Leases, offset: int = 0, *, at_ms: int = 0, partition: int = 0) -> Lease:
    lease = start(leases, MessageId(partition, offset), 1)
    leases.started(lease, at_ms, LOG + at_ms)
    leases.committed([lease], at_ms)
    assert lease.state is LeaseState.HELD
    return lease


def renew_all(leases: Leases, at_ms: int) -> list[MessageId | None]:
    renewals = leases.plan_renewals(at_ms)
    for renewal in renewals:
        leases.renewed(renewal, at_ms, LOG + at_ms)
    return [renewal.message_id for renewal in renewals]


def test_a_lease_ends_t_after_its_start_was_written() -> None:
    leases = make()
    lease = held(leases, at_ms=100)
    assert lease.deadline_ms == 100 + T
    assert leases.may_hand_out(lease, 100 + T - 1)
    assert not leases.may_hand_out(lease, 100 + T)
    assert lease.state is LeaseState.LOST


def test_a_tracker_ends_no_lease_before_its_worker_does() -> None:
    """However late a report is served: the record was appended after it was written."""
    leases, tracker, id_ = make(), RedeliveryTracker(), MessageId(0, 0)
    tracker.apply(0, LOG, Marker(MarkerType.START, id_, T, consumer_id="me"))
    lease = start(leases, id_, 0)
    leases.started(lease, 0, LOG)
    leases.committed([lease], T - 10)  # the process stood still meanwhile
    (renewal,) = leases.plan_renewals(T - 10)
    tracker.apply(1, LOG + T - 5, Marker(MarkerType.KEEPALIVE, None, T, consumer_id="me"))
    leases.renewed(renewal, T - 1, LOG + T - 5)  # and again
    tracker.apply(2, LOG + 2 * T - 6, Marker(MarkerType.TICK))
    assert not tracker.plan()
    assert leases.may_hand_out(lease, 2 * T - 11)
    assert not leases.may_hand_out(lease, 2 * T - 10)


def test_looking_for_ended_leases_costs_nothing_before_one_can_have_ended() -> None:
    leases = make()
    late, early = held(leases, 0, at_ms=500), held(leases, 1)
    held_leases, leases._open = leases._open, cast("set[Lease]", None)
    assert leases.expire(T - 1) == []  # it looks at none
    leases._open = held_leases
    assert leases.expire(T) == [early]
    assert leases.expire(T + 499) == []
    assert leases.expire(T + 500) == [late]
    held(leases, 2, at_ms=T + 500)
    assert len(leases.expire(2 * T + 500)) == 1


def test_many_leases_are_looked_through_now_and_then() -> None:
    """Each ends at its own time: not one look through all of them for each of these."""
    leases = make()
    for offset in range(5000):
        held(leases, offset, at_ms=offset)
    looks = [at_ms for at_ms in range(T, T + 5000) if leases.expire(at_ms)]
    assert 200 < len(looks) < 2500
    leases.expire(2 * T + 5000)
    assert leases.open_count == 0


def test_what_ended_before_the_commit_is_not_handed_out_and_the_id_is_spent() -> None:
    leases = make()
    lease = start(leases, MessageId(0, 0), 1)
    leases.started(lease, 0, LOG)
    leases.committed([lease], T)
    assert lease.state is LeaseState.LOST
    assert leases.id_is_spent  # a KEEPALIVE of "me" would keep it alive (R7)
    leases.change_id("me again")
    assert not leases.id_is_spent
    assert leases.plan_renewals(T) == []


def test_one_keepalive_per_marker_partition_renews_all_leases() -> None:
    leases = make()
    first, second = held(leases, 0), held(leases, 1)
    renewals = leases.plan_renewals(1000)
    assert [(r.marker_partition, r.message_id, r.consumer_id) for r in renewals] == [
        (1, None, "me")
    ]
    assert renewals[0].redeliver_after_ms == T
    leases.renewed(renewals[0], 1200, LOG + 1100)
    assert first.deadline_ms == second.deadline_ms == 1000 + T  # by when it was written
    assert first.log_deadline_ms == LOG + 1100 + T


def test_nothing_held_needs_no_keepalive() -> None:
    leases = make()
    lease = held(leases)
    leases.acknowledge(lease, lease.offsets[0], 1)
    assert leases.plan_renewals(1000) == []


def test_a_keepalive_that_came_too_late_revives_nothing() -> None:
    leases = make()
    lease = held(leases)
    renewal = leases.plan_renewals(1000)[0]
    leases.renewed(renewal, T, LOG + T + 1)  # the worker's clock has passed the deadline
    assert lease.deadline_ms == T
    assert lease.log_deadline_ms == LOG + T
    assert leases.expire(T) == [lease]
    assert leases.expire(T) == []  # told once


def test_the_first_to_notice_that_a_lease_is_over_tells_of_it() -> None:
    """The keeper tells, but a verdict, a hand-out or a commit may be first."""
    leases = make()
    settled, handed_out, extended = (held(leases, offset) for offset in range(3))
    committed = start(leases, MessageId(0, 3), 1)
    leases.started(committed, 0, LOG)
    assert leases.acknowledge(settled, settled.offsets[0], T) is Refusal.LOST
    assert not leases.may_hand_out(handed_out, T)
    assert leases.extend(extended, 1000, T) is None
    leases.committed([committed], T)
    assert leases.expire(T) == [settled, handed_out, extended, committed]
    assert leases.acknowledge(settled, settled.offsets[0], T) is Refusal.LOST
    assert leases.expire(T) == []


def test_a_renewal_counts_for_verdicts_that_came_behind_it() -> None:
    """R9: their ENDs stand behind the KEEPALIVE, whenever that is reported."""
    leases = make()
    lease = leases.start(0, [0, 1, 2], MessageId(0, 0).log, 1)
    leases.started(lease, 0, LOG)
    leases.committed([lease], 0)
    before = leases.acknowledge(lease, 0, 10)
    (renewal,) = leases.plan_renewals(1000)
    behind = leases.acknowledge(lease, 1, 1010)
    leases.renewed(renewal, 1020, LOG + 1000)
    assert isinstance(before, Lease)
    assert isinstance(behind, Lease)
    assert not leases.ended(before, LOG + T + 1)
    assert leases.ended(behind, LOG + 1000 + T)
    assert not leases.ended(behind, LOG + 1000 + T + 1)


def test_after_a_failure_held_messages_are_renewed_by_message_id_once() -> None:
    leases = make()
    lease = held(leases)
    doomed = start(leases, MessageId(0, 1), 1)
    leases.failed([doomed])
    assert leases.id_is_spent
    leases.change_id("fresh")
    assert renew_all(leases, 1000) == [MessageId(0, 0)]
    assert lease.holder_id == "fresh"  # the KEEPALIVE's writer is the holder now
    assert renew_all(leases, 2000) == [None]  # so the one for all is enough again


def test_for_60_s_after_getting_a_partition_its_messages_are_renewed_by_id() -> None:
    leases = make()
    leases.gained_partition(7, 0)
    held(leases, 0, partition=7)
    held(leases, 1, partition=8)
    for at_ms in range(1000, NEW_PARTITION_MS, 1000):
        assert sorted(renew_all(leases, at_ms), key=str) == [MessageId(7, 0), None]
    assert renew_all(leases, NEW_PARTITION_MS) == [None]


def test_what_is_started_is_renewed_by_id_while_its_commit_is_under_way() -> None:
    """A commit stands behind a rebalance: in a new partition, and under a former id."""
    leases = make()
    leases.gained_partition(7, 0)
    started = start(leases, MessageId(7, 0), 1)
    leases.started(started, 0, LOG)
    for at_ms in range(1000, 10_000, 1000):
        assert renew_all(leases, at_ms) == [MessageId(7, 0)]
    other = start(leases, MessageId(8, 0), 1)
    leases.started(other, 9000, LOG + 9000)
    leases.change_id("me again")
    assert set(renew_all(leases, 10_000)) == {MessageId(7, 0), MessageId(8, 0)}
    leases.committed([started, other], 12_000)
    assert leases.may_hand_out(started, 12_000)
    assert leases.may_hand_out(other, 12_000)


def test_max_lease_ends_it_whatever_renews_it() -> None:
    leases = make(max_lease_ms=10_000)
    lease = held(leases)
    for at_ms in range(1000, 10_000, 1000):
        renew_all(leases, at_ms)
    assert lease.deadline_ms == 10_000
    assert lease.log_deadline_ms == LOG + 10_000
    assert leases.expire(9999) == []
    assert leases.expire(10_000) == [lease]


def test_an_extension_outlives_the_next_renewals() -> None:
    leases = make()
    leases.gained_partition(0, 0)  # renewals by id would cut it, if they carried T only
    lease = held(leases)
    renewal = leases.extend(lease, 20_000, 500)
    assert renewal is not None
    assert [renewal.message_id] == lease.message_ids()
    leases.renewed(renewal, 500, LOG + 500)
    assert lease.deadline_ms == 20_500
    (again,) = leases.plan_renewals(1500)
    assert again.redeliver_after_ms == 19_000
    leases.renewed(again, 1500, LOG + 1500)
    assert lease.deadline_ms == 20_500


def test_a_shorter_extension_does_not_cut_a_longer_one() -> None:
    leases = make()
    lease = held(leases)
    first, second = leases.extend(lease, 30_000, 0), leases.extend(lease, 1000, 10)
    assert first is not None
    assert second is not None
    assert second.redeliver_after_ms == 29_990  # though the first is not delivered yet
    leases.renewed(first, 20, LOG + 20)
    third = leases.extend(lease, 1000, 1020)
    assert third is not None
    assert third.redeliver_after_ms == 29_000
    assert lease.deadline_ms == 30_000  # and the tracker's ends no earlier than this


def test_an_extension_is_never_shorter_than_t_nor_longer_than_max_lease() -> None:
    leases = make(max_lease_ms=10_000)
    lease = held(leases)
    assert leases.extend(lease, 1, 0).redeliver_after_ms == T  # type: ignore[union-attr]
    assert leases.extend(lease, 90_000, 1000).redeliver_after_ms == 9000  # type: ignore[union-attr]
    assert leases.extend(lease, 90_000, T) is None  # it has ended


def test_one_verdict_in_all() -> None:
    leases = make()
    lease = held(leases)
    assert leases.acknowledge(lease, lease.offsets[0], 1) is lease
    assert leases.acknowledge(lease, lease.offsets[0], 2) is Refusal.ACKNOWLEDGED_BEFORE
    assert leases.open_count == 0


def test_no_verdict_after_the_end_of_the_lease() -> None:
    leases = make()
    lease = held(leases)
    assert leases.acknowledge(lease, lease.offsets[0], T) is Refusal.LOST
    assert leases.acknowledge(lease, lease.offsets[0], T) is Refusal.LOST


def test_the_broker_s_timestamp_says_whether_an_end_came_in_time() -> None:
    leases = make()
    in_time, late = held(leases, 0), held(leases, 1)
    leases.acknowledge(in_time, in_time.offsets[0], 1)
    leases.acknowledge(late, late.offsets[0], 1)
    assert leases.ended(in_time, LOG + T)  # R2: due only when the clock is past the deadline
    assert not leases.ended(late, LOG + T + 1)
    assert late.state is LeaseState.LOST


def test_a_renewal_reported_after_the_verdict_still_counts_for_it() -> None:
    leases = make()
    lease = held(leases)
    (renewal,) = leases.plan_renewals(2000)
    leases.acknowledge(
        lease, lease.offsets[0], 2500
    )  # its END stands behind the KEEPALIVE in the log
    leases.renewed(renewal, 2600, LOG + 2000)
    assert leases.ended(lease, LOG + 2000 + T)


def test_unknown_log_time_is_no_proof_of_lateness() -> None:
    leases = make()
    lease = start(leases, MessageId(0, 0), 1)
    leases.started(lease, 0, -1)
    leases.committed([lease], 0)
    leases.acknowledge(lease, lease.offsets[0], 1)
    assert leases.ended(lease, LOG)


def test_a_failed_end_is_written_again_only_while_the_lease_stands() -> None:
    leases = make()
    lease = held(leases)
    leases.acknowledge(lease, lease.offsets[0], 1)
    assert leases.end_failed(lease, T - 1)
    assert leases.id_is_spent  # or the settled message would be kept alive (R7)
    assert not leases.end_failed(lease, T)
    assert lease.state is LeaseState.LOST


class TestFirstStart:
    """R5: after a failed batch a lease counts from the *first* START of its message."""

    def failed_batch(self) -> tuple[Leases, MessageId]:
        leases = make()
        lease = start(leases, MessageId(0, 0), 1)
        leases.started(lease, 0, LOG)
        leases.failed([lease])
        leases.change_id("fresh")
        return leases, MessageId(0, 0)

    def test_a_second_start_does_not_move_the_deadline(self) -> None:
        leases, message_id = self.failed_batch()
        assert not leases.is_lapsed(message_id, T - 1)
        lease = start(leases, message_id, 1)
        leases.started(lease, 1000, LOG + 1000)
        assert lease.deadline_ms == T
        assert lease.log_deadline_ms == LOG + 1000 + T  # the tracker moved it
        leases.committed([lease], 1000)
        assert leases.may_hand_out(lease, T - 1)
        assert not leases.may_hand_out(lease, T)

    def test_what_another_worker_started_needs_no_second_start(self) -> None:
        leases = make()
        leases.answered(message_set(MessageBatch(0, b"", 0, 7, 1)))
        assert leases.may_be_lapsed
        assert leases.is_lapsed(MessageId(0, 7), 0)
        assert not leases.is_lapsed(MessageId(0, 8), 10 * T)

    def test_however_many_another_worker_started_all_are_remembered(self) -> None:
        leases = make()
        chunks = range(0, 50 * CHUNK_OFFSETS, CHUNK_OFFSETS)
        every = (1 << CHUNK_OFFSETS) - 1
        leases.answered(message_set(*(MessageBatch(0, b"", 0, first, every) for first in chunks)))
        assert leases.is_lapsed(MessageId(0, 0), 0)
        assert leases.is_lapsed(MessageId(0, 50 * CHUNK_OFFSETS - 1), 0)
        assert not leases.is_lapsed(MessageId(0, 50 * CHUNK_OFFSETS), 0)

    def test_what_lies_before_a_commit_is_asked_for_no_more(self) -> None:
        leases = make()
        leases.answered(message_set(MessageBatch(0, b"", 0, 7, 1), MessageBatch(1, b"", 0, 7, 1)))
        for offset, of_both in ((8, True), (CHUNK_OFFSETS, False)):
            lease = start(leases, MessageId(0, offset), 1)
            leases.started(lease, 0, LOG)
            leases.committed([lease], 0)
            assert leases.is_lapsed(MessageId(0, 7), 0) is of_both
            assert leases.is_lapsed(MessageId(1, 7), 0)
        lease = start(leases, MessageId(1, CHUNK_OFFSETS), 1)
        leases.started(lease, 0, LOG)
        leases.committed([lease], 0)
        assert not leases.may_be_lapsed  # and no message is looked up any more

    def test_a_lapsed_one_needs_no_second_start(self) -> None:
        leases, message_id = self.failed_batch()
        assert leases.is_lapsed(message_id, T)

    def test_a_second_start_behind_the_end_of_the_first_moves_no_log_time(self) -> None:
        leases, message_id = self.failed_batch()
        lease = start(leases, message_id, 1)
        leases.started(lease, 1000, LOG + T + 1)
        assert lease.log_deadline_ms == LOG + T

    def test_a_report_that_comes_after_the_failure_is_remembered_too(self) -> None:
        leases = make()
        lease = start(leases, MessageId(0, 0), 1)
        leases.failed([lease])
        leases.started(lease, 500, LOG + 500)
        assert lease.state is LeaseState.LOST
        assert leases.open_count == 0
        assert not leases.is_lapsed(MessageId(0, 0), 500 + T - 1)
        assert leases.is_lapsed(MessageId(0, 0), 500 + T)

    def test_an_unconfirmed_start_is_not_one(self) -> None:
        leases = make()
        lease = start(leases, MessageId(0, 0), 1)
        leases.failed([lease])
        assert not leases.is_lapsed(MessageId(0, 0), 10 * T)

    def test_a_handed_out_message_is_not_remembered(self) -> None:
        leases, message_id = self.failed_batch()
        lease = start(leases, message_id, 1)
        leases.started(lease, 1, LOG + 1)
        leases.committed([lease], 1)
        assert not leases.is_lapsed(message_id, 10 * T)

    def test_a_lapsed_one_is_forgotten_with_what_lies_before_a_commit(self) -> None:
        leases, message_id = self.failed_batch()
        assert leases.is_lapsed(message_id, T)
        held(leases, 1, at_ms=T)
        assert leases.is_lapsed(message_id, T)  # the same chunk
        held(leases, CHUNK_OFFSETS, at_ms=T)
        assert not leases.may_be_lapsed

    def test_what_went_to_another_worker_is_forgotten_in_time(self) -> None:
        leases, message_id = self.failed_batch()
        other = start(leases, MessageId(1, 0), 1)
        leases.started(other, 0, LOG)
        leases.failed([other])
        leases.answered(message_set(MessageBatch(0, b"", 0, 7, 1), MessageBatch(1, b"", 0, 7, 1)))
        leases.lost_partition(0, 0)
        leases.plan_renewals(NEW_PARTITION_MS - 1)
        assert leases.is_lapsed(MessageId(0, 7), T)  # its reports may be late
        leases.plan_renewals(NEW_PARTITION_MS)
        assert not any(leases.is_lapsed(each, T) for each in (message_id, MessageId(0, 7)))
        assert all(leases.is_lapsed(MessageId(1, offset), T) for offset in (0, 7))

    def test_what_is_known_of_a_partition_that_comes_back_is_kept(self) -> None:
        """An eager group takes all partitions away, and gives most of them back."""
        leases, message_id = self.failed_batch()
        leases.lost_partition(0, 0)
        leases.gained_partition(0, 3000)
        leases.plan_renewals(2 * NEW_PARTITION_MS)
        assert leases.is_lapsed(message_id, T)

    def test_what_is_remembered_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kafkamq.markers.rules.leases.MAX_REMEMBERED_STARTS", 2)
        leases = make()
        batch = [start(leases, MessageId(0, offset), 1) for offset in range(3)]
        for lease in batch:
            leases.started(lease, 0, LOG)
        leases.failed(batch)
        assert [leases.is_lapsed(MessageId(0, o), 10 * T) for o in range(3)] == [
            False,
            True,
            True,
        ]


def overtaken(leases: Leases, *offsets: int, began_ms: int, now_ms: int = 0) -> None:
    starts = {MessageId(0, offset): (LOG + began_ms, 70 + offset, 1) for offset in offsets}
    leases.overtaken(starts, now_ms, LOG + now_ms)


def test_a_former_owners_start_answers_for_a_message_as_soon_as_its_lease_is_over() -> None:
    """That is asked when ours is planned, however long ago the markers were read."""
    leases = make()
    overtaken(leases, 0, began_ms=-1000)
    assert not leases.is_lapsed(MessageId(0, 0), T - 1000 - T // 16 - 1)
    assert leases.is_lapsed(MessageId(0, 0), T - 1000 - T // 16)


def test_within_a_former_owners_lease_a_message_is_started_again_and_renewed_by_id() -> None:
    leases = make()
    leases.gained_partition(0, 0)
    overtaken(leases, 0, 1, began_ms=-1000)
    in_time, late = start(leases, MessageId(0, 0), 1), start(leases, MessageId(0, 1), 1)
    for lease in (in_time, late):
        leases.started(lease, 10, LOG + 10)
    assert (in_time.start_offset, in_time.log_begin_ms) == (70, LOG - 1000)
    leases.committed([in_time], 20)
    leases.committed([late], T - 1000)
    assert in_time.state is LeaseState.HELD
    assert late.state is LeaseState.LOST  # a tracker may be copying it
    renewals = leases.plan_renewals(1000)
    assert [renewal.message_id for renewal in renewals] == [MessageId(0, 0)]
    leases.renewed(renewals[0], 1100, LOG + 1100)
    assert leases.may_hand_out(in_time, 1000 + T - 1)
    assert not leases.may_be_lapsed  # both were forgotten with the commit


def test_what_is_known_of_a_start_of_our_own_is_not_replaced_by_what_the_markers_say() -> None:
    leases = make()
    own = start(leases, MessageId(0, 0), 1)
    leases.started(own, 0, LOG + 5, 99)
    leases.failed([own])
    overtaken(leases, 0, began_ms=-10 * T)
    assert not leases.is_lapsed(MessageId(0, 0), T - 1)
    again = start(leases, MessageId(0, 0), 1)
    leases.started(again, 100, LOG + 100, 120)
    assert (again.start_offset, again.deadline_ms) == (99, T)


@pytest.mark.parametrize("report", ["before", "never", "failed"])
def test_a_release_beside_a_keepalive_names_who_holds_it_then(report: str) -> None:  # R8
    """Trackers read it behind that one: else they would ignore it, and count a delivery."""
    leases = Leases("me", redelivery_timeout_ms=T, max_lease_ms=MAX_LEASE, batch_markers=True)
    tracker = RedeliveryTracker()
    lease = leases.start(0, list(range(10)), (b"t" * 16, 1), 0)
    named = lease.batch()
    start_marker = Marker(MarkerType.START, None, T, consumer_id="me", batches=(named,))
    tracker.apply(0, LOG, start_marker)
    leases.started(lease, 0, LOG)
    leases.committed([lease], 1)
    leases.change_id("me again")  # others have failed (R7)
    (renewal,) = leases.plan_renewals(1000)
    if report == "failed":
        leases.renewal_failed(renewal)
    else:
        keepalive = Marker(
            MarkerType.KEEPALIVE, None, T, consumer_id="me again", batches=renewal.batches
        )
        tracker.apply(1, LOG + 1000, keepalive)
    if report == "before":
        leases.renewed(renewal, 1001, LOG + 1000)
    part = leases.take_back(lease, range(10), 1002, Verdict(Outcome.RELEASE))
    assert part is not None
    release = Marker(
        MarkerType.END,
        None,
        consumer_id=part.holder_id,
        outcome=Outcome.RELEASE,
        batches=(named,),
    )
    tracker.apply(2, LOG + 1002, release)
    tracker.apply(3, LOG + 1100, Marker(MarkerType.TICK))
    assert [action.cause.name for action in tracker.plan()] == ["RELEASED"]


def test_a_verdict_costs_the_same_among_many_of_its_start() -> None:
    """Parts whose ENDs are known are looked for now and then, not with each verdict."""
    leases = Leases("me", redelivery_timeout_ms=T, max_lease_ms=MAX_LEASE, batch_markers=True)
    lease = leases.start(0, list(range(4096)), (b"t" * 16, 1), 0)
    leases.started(lease, 0, LOG)
    leases.committed([lease], 1)
    looked = 0
    for offset in range(4095):
        before = lease.parts
        leases.acknowledge(lease, offset, 2, Verdict(Outcome.NACK, f"reason {offset}", None, 1))
        looked += lease.parts is not before and len(lease.parts)
    assert looked < 3 * 4096
    for part in lease.parts:
        part.is_end_known = True
    leases.acknowledge(lease, 4095, 2)
