"""Replicas, and engines that follow each other (R17, R22): who may write, and what comes of it."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions
from harness.markers import read_positions
from tests.integration.tracker_logs import Logs
from tests.waiting import wait_until, within

from kafkamq.config import TrackerConfig
from kafkamq.errors import ConfigError, FencedError
from kafkamq.markers.rules.delivery import DueCause, Settle
from kafkamq.markers.tracker import local as tracker_module
from kafkamq.markers.tracker import settlement
from kafkamq.markers.tracker.ledger import Ledger, LedgerKey, OpenLedgers, claim
from kafkamq.markers.tracker.local import LocalTracker, tracker_group
from kafkamq.markers.tracker.settlement import ActionSettler, SettlementError
from kafkamq.markers.wire.records import Position
from kafkamq.metrics.health import health
from kafkamq.types import MessageId, Outcome

FAST = TrackerConfig(position_interval_ms=200)
PARTITIONS = 3
CHUNK = 4096


@pytest.fixture
def logs(bootstrap: str, namespace: str) -> Logs:
    return Logs(bootstrap, namespace, marker_partitions=PARTITIONS)


def other_engine(logs: Logs, *, takeover: bool = True) -> int:
    return claim(logs.config, engine="other", partitions=PARTITIONS, takeover=takeover).epoch


def ledgers(logs: Logs) -> list[Position]:
    keys = [LedgerKey.of_markers(logs.config, number) for number in range(PARTITIONS)]
    found = read_positions(logs.config, keys)
    return [found[key] for key in keys if key in found]


def due(id_: MessageId, start_offset: int) -> Settle:
    return Settle(start_offset, id_, False, DueCause.LEASE_ENDED, 0, 0, 0, -1)


def spread(logs: Logs) -> list[MessageId]:
    """Identities whose markers lie in every marker partition; the messages need not exist."""
    ids: dict[int, MessageId] = {}
    offset = 0
    while len(ids) < PARTITIONS:
        id_ = MessageId(0, offset)
        ids.setdefault(logs.place(id_), id_)
        offset += CHUNK
    return [ids[number] for number in range(PARTITIONS)]


def test_replicas_share_the_partitions_and_take_over_from_each_other(logs: Logs) -> None:
    ids = spread(logs)
    with LocalTracker(logs.config, FAST).in_thread() as first:
        wait_until(lambda: first.is_live and len(first.partitions) == PARTITIONS)
        with LocalTracker(logs.config, FAST).in_thread() as second:
            wait_until(
                lambda: (
                    second.is_live
                    and first.is_live
                    and first.partitions | second.partitions == set(range(PARTITIONS))
                )
            )
            assert not first.partitions & second.partitions
            assert {position.epoch for position in ledgers(logs)} == {1}
            logs.start(*ids, timeout_ms=500)
            wait_until(lambda: set(logs.ends(Outcome.REDELIVERED)) == set(ids))
            # These fall due after the second has gone.
            more = [MessageId(0, id_.offset + 1) for id_ in ids]
            logs.start(*more, timeout_ms=3000)
        wait_until(lambda: first.is_live and len(first.partitions) == PARTITIONS)
        wait_until(lambda: len(logs.ends(Outcome.REDELIVERED)) == 2 * PARTITIONS)
    assert Counter(logs.copied()) == Counter((id_.partition, id_.offset) for id_ in ids + more)
    # R22: each transaction named the membership, which fences those that the group went on without.
    group = tracker_group(logs.config)
    asked = Consumer({"bootstrap.servers": logs.bootstrap, "group.id": group})
    places = [TopicPartition(logs.config.marker_topic, number) for number in range(PARTITIONS)]
    assert all(place.offset > 0 for place in asked.committed(places, timeout=within(30)))
    asked.close()


def test_a_later_engine_stops_the_local_one(logs: Logs) -> None:
    (id_,) = logs.send()
    tracker = LocalTracker(logs.config, FAST)
    with pytest.raises(FencedError, match="took over"), tracker.in_thread():  # noqa: PT012
        wait_until(lambda: tracker.is_live and len(tracker.partitions) == PARTITIONS)
        assert other_engine(logs) == 2
        logs.start(id_, timeout_ms=500)
        wait_until(lambda: tracker.is_over)
        wait_until(lambda: not health.is_live())  # of the process that it was a part of
    assert health.is_live()
    assert {(position.engine, position.epoch) for position in ledgers(logs)} == {("other", 2)}
    assert not logs.copies(), "a fenced tracker wrote"


def test_the_local_engine_takes_over_and_the_other_one_stops(logs: Logs) -> None:
    (id_,) = logs.send()
    epoch = other_engine(logs)
    place = logs.place(id_)
    key = LedgerKey.of_markers(logs.config, place)
    old = Ledger(logs.config, key, engine="other", epoch=epoch)
    old.open()
    settler = ActionSettler(logs.config, FAST)
    (start,) = logs.start(id_, timeout_ms=500)
    with LocalTracker(logs.config, FAST).in_thread() as tracker:
        wait_until(lambda: tracker.is_live and len(tracker.partitions) == PARTITIONS)
        wait_until(lambda: logs.ends(Outcome.REDELIVERED) == [id_])
        # The predecessor had planned the same action, and only now comes to write it.
        with pytest.raises(FencedError):
            settler.settle(old, [due(id_, start)], position=start, batch=1)
        # And it fenced our tracker on the way, which starts that partition again.
        (second,) = logs.send()
        logs.start(second, timeout_ms=500)
        wait_until(lambda: set(logs.ends(Outcome.REDELIVERED)) == {id_, second})
    settler.close()
    old.close()
    assert {position.engine for position in ledgers(logs)} == {"local"}
    assert {position.epoch for position in ledgers(logs)} == {epoch + 1}
    assert len(logs.copies()) == 2


def test_takeover_can_be_refused(logs: Logs) -> None:
    other_engine(logs)
    tracker = LocalTracker(logs.config, TrackerConfig(takeover=False))
    with pytest.raises(ConfigError, match="takeover"), tracker.in_thread():
        wait_until(lambda: tracker.is_over)
    with LocalTracker(logs.config, FAST).in_thread() as willing:
        wait_until(lambda: willing.is_live)
    with pytest.raises(ConfigError, match="takeover"):
        other_engine(logs, takeover=False)
    # Its own engine's epoch is no obstacle.
    with LocalTracker(logs.config, TrackerConfig(takeover=False)).in_thread() as again:
        wait_until(lambda: again.is_live)


def test_a_repeated_batch_goes_on_behind_what_is_done(logs: Logs) -> None:
    ids = logs.send(5)
    starts = logs.start(*ids, timeout_ms=60_000)
    epoch = other_engine(logs)
    key = LedgerKey.of_markers(logs.config, logs.place(ids[0]))
    actions = [due(id_, start) for id_, start in zip(ids, starts, strict=True)]
    settler = ActionSettler(logs.config, TrackerConfig(max_offsets_per_commit=2))
    first = Ledger(logs.config, key, engine="other", epoch=epoch)
    report = settler.settle(first, actions[:2], position=0, batch=7)
    assert (report.copies, report.transactions) == (2, 1)
    # The same batch in another process: its first two rows are in the ledger (R16).
    second = Ledger(logs.config, key, engine="other", epoch=epoch)
    report = settler.settle(second, actions, position=0, batch=7)
    assert (report.skipped, report.copies, report.transactions) == (2, 3, 2)
    # The first one was fenced meanwhile; it opens the ledger again and finds everything done.
    report = settler.settle(first, actions, position=0, batch=7)
    assert (report.skipped, report.copies) == (5, 0)
    # A late repetition of an older batch does nothing.
    report = settler.settle(first, actions, position=0, batch=6)
    assert (report.skipped, report.copies) == (5, 0)
    assert Counter(logs.copied()) == Counter((0, id_.offset) for id_ in ids)
    for opened in (first, second):
        opened.close()
    settler.close()


def test_partitions_that_are_added_are_tracked(bootstrap: str, namespace: str) -> None:
    soon = {"topic.metadata.refresh.interval.ms": "500"}
    logs = Logs(bootstrap, namespace, marker_partitions=PARTITIONS, kafka=soon)
    with LocalTracker(logs.config, FAST).in_thread() as tracker:
        wait_until(lambda: tracker.is_live)
        admin = AdminClient({"bootstrap.servers": bootstrap})
        topic = logs.config.marker_topic
        admin.create_partitions([NewPartitions(topic, PARTITIONS + 2)])[topic].result(within(30))
        logs.marker_partitions = PARTITIONS + 2
        wait_until(lambda: PARTITIONS + 1 in tracker.partitions and tracker.is_live)
        ids = [MessageId(0, number * CHUNK) for number in range(20)]
        assert {logs.place(id_) for id_ in ids} > {PARTITIONS, PARTITIONS + 1}
        logs.start(*ids, timeout_ms=500)
        wait_until(lambda: set(logs.ends(Outcome.REDELIVERED)) == set(ids))
    assert len(logs.copies()) == len(ids)


def test_a_former_member_of_the_group_cannot_settle(logs: Logs, bootstrap: str) -> None:
    (id_,) = logs.send()
    (start,) = logs.start(id_, timeout_ms=60_000)
    epoch = other_engine(logs)
    member = Consumer({"bootstrap.servers": bootstrap, "group.id": f"{logs.namespace}.group"})
    member.subscribe([logs.config.marker_topic])
    wait_until(lambda: member.poll(0.05) is None and bool(member.assignment()))
    metadata = member.consumer_group_metadata()
    key = LedgerKey.of_markers(logs.config, logs.place(id_))
    ledger = Ledger(logs.config, key, engine="other", epoch=epoch)
    settler = ActionSettler(logs.config, FAST)
    settler.settle(ledger, [], position=0, batch=1, members=[metadata])
    member.close()
    action = due(id_, start)
    with pytest.raises(SettlementError) as caught:
        settler.settle(ledger, [action], position=0, batch=2, members=[metadata])
    assert caught.value.actions == (action,)
    assert not logs.copies()
    settler.close()
    ledger.close()


def test_more_partitions_than_open_ledgers_are_tracked(
    bootstrap: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    many, most = 12, 2
    monkeypatch.setattr(settlement, "OpenLedgers", partial(OpenLedgers, most))
    monkeypatch.setattr(tracker_module, "MAX_OPEN", most)
    logs = Logs(bootstrap, namespace, marker_partitions=many)
    ids = [MessageId(0, number * CHUNK) for number in range(4 * many)]
    parts = set(range(many))
    assert {logs.place(id_) for id_ in ids} == parts
    with LocalTracker(logs.config, FAST).in_thread() as tracker:
        wait_until(lambda: tracker.is_live and tracker.partitions == parts)
        held = [part.ledger for part in tracker._partitions.values()]
        logs.start(*ids, timeout_ms=500)
        wait_until(lambda: len(logs.ends(Outcome.REDELIVERED)) == len(ids))
        logs.start(*[MessageId(0, id_.offset + 1) for id_ in ids], timeout_ms=500)
        wait_until(lambda: len(logs.ends(Outcome.REDELIVERED)) == 2 * len(ids))
        wait_until(lambda: sum(own.is_open for own in held if own is not None) <= most)
        wait_until(lambda: all(each.committable_offset > 0 for each in tracker.statuses()))
        # No partition was started again for it: each ledger is the one of its only start.
        assert [part.ledger for part in tracker._partitions.values()] == held
    assert len(logs.copied()) == len(set(logs.ends(Outcome.REDELIVERED))) == 2 * len(ids)


def test_a_ledger_that_rested_is_not_used_behind_another_replicas_writes(logs: Logs) -> None:
    epoch = other_engine(logs)
    key = LedgerKey.of_markers(logs.config, 1)
    first, second = (Ledger(logs.config, key, engine="other", epoch=epoch) for _ in range(2))
    first.open()
    first.rest()
    second.open()  # had the partition meanwhile, and wrote nothing
    first.resume()
    first.begin()
    first.commit(3, batch=1, rows_done=0)
    first.rest()
    second.open()
    second.begin()
    second.commit(3, batch=2, rows_done=1)
    with pytest.raises(FencedError) as caught:
        first.resume()
    assert caught.value.code == "OTHER_OWNER"
    for each in (first, second):
        each.close()


def test_a_claim_that_failed_goes_on_behind_what_it_has(logs: Logs) -> None:
    begun = claim(logs.config, engine="other", partitions=PARTITIONS - 1)
    assert begun.done == {0, 1}
    before = dict(zip(range(PARTITIONS), ledgers(logs), strict=False))
    whole = claim(logs.config, engine="other", partitions=PARTITIONS, begun=begun)
    assert (whole.epoch, whole.done) == (1, {0, 1, 2})
    assert [position.epoch for position in ledgers(logs)] == [1, 1, 1]
    # Another one that started between has the partitions: all are claimed again, by a later start.
    begun = claim(logs.config, engine="other", partitions=PARTITIONS - 1)
    claim(logs.config, engine="third", partitions=PARTITIONS)
    whole = claim(logs.config, engine="other", partitions=PARTITIONS, begun=begun)
    assert (whole.epoch, whole.done) == (4, {0, 1, 2})
    assert {(each.engine, each.epoch) for each in ledgers(logs)} == {("other", 4)}
    assert {number: each.position for number, each in before.items()} == {0: 0, 1: 0}


def test_an_epoch_is_found_when_the_ledger_of_partition_0_is_gone(logs: Logs) -> None:
    assert [other_engine(logs) for _ in range(3)] == [1, 2, 3]
    admin = AdminClient({"bootstrap.servers": logs.bootstrap})
    (deleted,) = admin.delete_consumer_groups(
        [LedgerKey.of_markers(logs.config, 0).transactional_id]
    ).values()
    deleted.result(within(30))
    assert len(ledgers(logs)) == PARTITIONS - 1
    assert other_engine(logs) == 4
