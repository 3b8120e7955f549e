"""What the Spark tracker's driver does with the rows of its batches, on Kafka in memory."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError
from harness.markers import read_positions
from tests.unit.test_settling_batches import CONFIG, TO_FIRST, Logs, fail_copies, logs, place
from tests.waiting import wait_until, within

from kafkamq.config import TrackerConfig
from kafkamq.errors import BrokerError, ConfigError, FencedError
from kafkamq.markers.tracker import partition, settlement
from kafkamq.markers.tracker.ledger import Claim, LedgerKey, OpenLedgers, claim, newest_start
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.markers.wire.records import TrackerStatus, encode_status
from kafkamq.spark.blocks import encode_actions
from kafkamq.spark.tracker import settling as of_rows
from kafkamq.spark.tracker.settling import RowSettling, TickKeeper, take_turn
from kafkamq.spark.tracker.tracker import Run, Stages
from kafkamq.transport.admin import Admin
from kafkamq.transport.memory.state import UNKNOWN, Fault
from kafkamq.types import MessageId

__all__ = ["logs"]

ENGINE = "spark-1"
PARTITIONS = 12  # more than there are workers, for a test of many
KEYS = [LedgerKey.of_markers(CONFIG, number) for number in range(2)]


@dataclass
class Batch:
    """What a query has folded, as ``foreachBatch`` gives it: one row."""

    logs: Logs
    epoch: int = 1
    is_due: bool = True
    position: int | None = None
    partition: int = 0

    def collect(self) -> list[dict[str, object]]:
        tracker = self.logs.fold()
        status = TrackerStatus(
            topic=CONFIG.marker_topic,
            partition=self.partition,
            engine=ENGINE,
            epoch=self.epoch,
            clock_ms=tracker.clock_ms,
            position=tracker.next_offset,
            due=tracker.due_count(),
            committable_offset=tracker.committable_offset()
            if self.position is None
            else self.position,
        )
        return [
            {
                "status": encode_status(status),
                "actions": encode_actions(tracker.plan() if self.is_due else ()),
            }
        ]


@pytest.fixture
def settling(logs: Logs) -> Iterator[RowSettling]:
    often = TrackerConfig(position_interval_ms=100)
    with closing(RowSettling(CONFIG, often, engine=ENGINE, trigger_ms=0)) as made:
        made.own(claim(CONFIG, engine=ENGINE, partitions=1, kept=made.kept))
        yield made


def run(settling: RowSettling, batch: int, **of: object) -> list[TrackerStatus]:
    """A batch in Spark's thread, and turns of the owner; returns what that one was told."""
    frame: Any = Batch(**of)  # type: ignore[arg-type]
    spark = threading.Thread(target=settling.run, args=(frame, batch), daemon=True)
    spark.start()
    found: list[TrackerStatus] = []

    def is_told() -> bool:
        found.extend(row.status for row in settling.step(0.02))
        return not spark.is_alive()

    wait_until(is_told)
    return [*found, *(row.status for row in settling.step(0.02))]


def due(logs: Logs, count: int, **of: bytes) -> list[MessageId]:
    ids = logs.send(count, **of)
    logs.start(ids)
    logs.pass_time()
    return ids


def test_what_is_due_is_settled_once_with_the_batchs_number(
    logs: Logs, settling: RowSettling
) -> None:
    ids = due(logs, 5)
    (status,) = run(settling, 7, logs=logs)
    assert (status.batch, status.due, status.awaited) == (7, 5, 0)
    wait_until(lambda: not settling.step(0.02) and len(logs.copies()) == 5)
    assert logs.copies() == Counter(map(place, ids))
    assert read_positions(CONFIG, KEYS[:1])[KEYS[0]].batch == 7


def test_what_is_awaited_is_kept_and_settled_with_a_later_batch(
    logs: Logs, settling: RowSettling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R18: it holds up nothing, and is planned no second time by the fold."""
    monkeypatch.setattr(partition, "LOOK_S", 0.0)
    ids = due(logs, 8, key=TO_FIRST)
    there, hidden = ([one for one in ids if one.partition == number] for number in (0, 1))
    logs.cluster.faults.offline.add((CONFIG.message_topic, 1))
    run(settling, 0, logs=logs)
    wait_until(lambda: not settling.step(0.02) and len(logs.copies()) == len(there))
    wait_until(lambda: run(settling, 1, logs=logs, is_due=False)[0].awaited == len(hidden))
    logs.cluster.faults.offline.clear()
    batches = iter(range(2, 1000))
    wait_until(
        lambda: run(settling, next(batches), logs=logs, is_due=False) and len(logs.copies()) == 8
    )
    assert logs.copies() == Counter(map(place, ids))


def test_what_is_known_to_be_aborted_goes_with_the_next_batch(
    logs: Logs, settling: RowSettling, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: None)
    monkeypatch.setattr(settlement, "time", clock)
    ids = due(logs, 3)
    fail_copies(logs, last=Fault(error=UNKNOWN))
    run(settling, 0, logs=logs)
    for _ in range(3):
        settling.step(0.1)
    assert not logs.copies()
    logs.cluster.faults.plan = lambda *_: None
    batches = iter(range(1, 1000))
    wait_until(
        lambda: run(settling, next(batches), logs=logs, is_due=False) and len(logs.copies()) == 3
    )
    assert logs.copies() == Counter(map(place, ids))


def test_a_batch_waits_until_its_partition_has_begun_with_the_one_before(
    logs: Logs, settling: RowSettling
) -> None:
    """What is in the driver's memory is bounded: one settlement and one plan a partition."""
    settling.run(Batch(logs), 0)  # type: ignore[arg-type]  # not Spark's frame
    second = threading.Thread(target=settling.run, args=(Batch(logs), 1), daemon=True)
    second.start()
    wait_until(lambda: not settling.is_reading)
    second.join(0.1)
    assert second.is_alive()
    settling.step(0.1)
    second.join(within(10))
    assert not second.is_alive()


@pytest.mark.parametrize("fails", [False, True])
def test_a_batch_that_leaves_too_much_is_repeated_before_the_next(
    logs: Logs, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """What is in the driver's memory is bounded, however slow the brokers are."""
    monkeypatch.setattr(of_rows, "SETTLE_S", 1.0)  # for one transaction
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: None)
    monkeypatch.setattr(settlement, "time", clock)
    few = TrackerConfig(max_offsets_per_commit=2)
    ids = due(logs, 9)
    with closing(RowSettling(CONFIG, few, engine=ENGINE, trigger_ms=0)) as settling:
        settling.own(claim(CONFIG, engine=ENGINE, partitions=1, kept=settling.kept))
        if fails:
            fail_copies(logs, last=Fault(error=UNKNOWN))
        run(settling, 0, logs=logs)
        second: Any = Batch(logs, is_due=False)
        settling.run(second, 1)
        third = threading.Thread(target=settling.run, args=(second, 2), daemon=True)
        third.start()
        for _ in range(3):
            settling.step(0.1)
        if fails:
            assert not logs.copies()
            assert third.is_alive(), "nothing more is planned"
            logs.cluster.faults.plan = lambda *_: None
        wait_until(lambda: not settling.step(0.02) and len(logs.copies()) == 9)
        wait_until(lambda: not third.is_alive())
    assert logs.copies() == Counter(map(place, ids))


def test_what_is_awaited_is_settled_once_behind_a_batch_that_was_repeated(
    logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "LOOK_S", 0.0)
    monkeypatch.setattr(of_rows, "SETTLE_S", 1.0)
    ids = due(logs, 12, key=TO_FIRST)
    few = TrackerConfig(max_offsets_per_commit=2)
    with closing(RowSettling(CONFIG, few, engine=ENGINE, trigger_ms=0)) as settling:
        settling.own(claim(CONFIG, engine=ENGINE, partitions=1, kept=settling.kept))
        logs.cluster.faults.offline.add((CONFIG.message_topic, 1))
        run(settling, 0, logs=logs)
        wait_until(lambda: not settling.step(0.02) and len(logs.copies()) == 6)
        logs.cluster.faults.offline.clear()
        batches = iter(range(1, 1000))
        wait_until(
            lambda: (
                run(settling, next(batches), logs=logs, is_due=False) and len(logs.copies()) == 12
            )
        )
        run(settling, next(batches), logs=logs, is_due=False)
    assert logs.copies() == Counter(map(place, ids))


def test_the_next_batch_is_wanted_when_something_is_due(logs: Logs) -> None:
    """Else after the interval alone: Spark looks at once when a batch is over."""
    settling = RowSettling(CONFIG, TrackerConfig(), engine=ENGINE, trigger_ms=3_600_000)
    claimed = claim(CONFIG, engine=ENGINE, partitions=1, kept=settling.kept)
    settling.own(claimed)
    keeper = TickKeeper(CONFIG, TrackerConfig(), token="t")
    keeper.begin([0], epoch=claimed.epoch)
    batch = threading.Thread(target=settling.run, args=(Batch(logs), 0), daemon=True)
    batch.start()
    for _ in range(3):
        take_turn(settling, keeper, 0.1)
    assert batch.is_alive(), "nothing is due"
    settling.close()
    batch.join(within(10))
    assert not batch.is_alive(), "a start that is over waits for nothing"

    settling = RowSettling(CONFIG, TrackerConfig(), engine=ENGINE, trigger_ms=3_600_000)
    settling.own(claim(CONFIG, engine=ENGINE, partitions=1, kept=settling.kept))
    due(logs, 1)
    unplanned = Batch(logs, is_due=False)  # it was planned before, and has no END yet
    batch = threading.Thread(target=settling.run, args=(unplanned, 0), daemon=True)
    batch.start()
    wait_until(lambda: take_turn(settling, keeper, 0.02) or not batch.is_alive())
    settling.close()
    keeper.close()


def test_behind_a_plan_the_next_batch_waits_for_nobody(logs: Logs) -> None:
    """Its ENDs are read by then, or soon: the owner may have its turn late."""
    due(logs, 1)
    with closing(
        RowSettling(CONFIG, TrackerConfig(), engine=ENGINE, trigger_ms=3_600_000)
    ) as settling:
        settling.own(claim(CONFIG, engine=ENGINE, partitions=1, kept=settling.kept))
        batch = threading.Thread(target=settling.run, args=(Batch(logs), 0), daemon=True)
        batch.start()
        batch.join(within(10))
        assert not batch.is_alive()


class Query:
    """Spark's: a batch is under way, and none has ended."""

    lastProgress = None  # noqa: N815
    looked = 0

    @property
    def status(self) -> dict[str, bool]:
        self.looked += 1
        return {"isTriggerActive": True, "isDataAvailable": True}


def test_a_batch_that_waits_for_the_interval_does_not_hang(logs: Logs) -> None:
    """However long that is, the tracker is ready meanwhile."""
    settling = RowSettling(CONFIG, TrackerConfig(), engine=ENGINE, trigger_ms=3_600_000)
    keeper = TickKeeper(CONFIG, TrackerConfig(), token="t")
    plan: Any = SimpleNamespace(config=CONFIG)
    query: Any = Query()
    run = Run(plan, keeper, settling, query, Stages())
    frame: Any = Batch(logs, is_due=False)
    batch = threading.Thread(target=settling.run, args=(frame, 0), daemon=True)
    batch.start()
    wait_until(lambda: settling.is_waiting)
    wait_until(lambda: run.note_progress() or query.looked)
    assert run.is_turning
    settling.close()
    batch.join(within(10))
    wait_until(lambda: run.note_progress() or query.looked > 1)
    assert not run.is_turning, "a batch that reads is judged by its time"
    keeper.close()
    run.reader.close()


def test_who_stands_by_touches_no_ledger(logs: Logs) -> None:
    """R36; its rows say so, whatever is due."""
    due(logs, 2)
    with closing(RowSettling(CONFIG, TrackerConfig(), engine=ENGINE, trigger_ms=0)) as settling:
        assert not run(settling, 0, logs=logs, epoch=0)
        settling.step(0.1)
    assert not read_positions(CONFIG, KEYS)
    assert not logs.copies()


def test_a_position_is_written_where_nothing_is_due(logs: Logs, settling: RowSettling) -> None:
    batches = iter(range(1000))

    def position() -> int:
        run(settling, next(batches), logs=logs, is_due=False, position=11)
        return read_positions(CONFIG, KEYS[:1])[KEYS[0]].position

    wait_until(lambda: position() == 11)


def test_a_later_start_ends_this_one(logs: Logs, settling: RowSettling) -> None:
    claim(CONFIG, engine="other", partitions=1)
    due(logs, 1)
    run(settling, 0, logs=logs)
    with pytest.raises(FencedError, match="started later"):
        wait_until(lambda: settling.step(0.02))
    assert not logs.copies()


def test_an_added_partition_is_adopted_behind_what_it_holds(
    logs: Logs, settling: RowSettling
) -> None:
    logs.cluster.add_partitions(CONFIG.marker_topic, 2)
    with closing(RowSettling(CONFIG, TrackerConfig(), engine="old", trigger_ms=0)) as older:
        older.adopt(1)  # of epoch 0
    settling.adopt(1)
    settling.adopt(1)
    found = read_positions(CONFIG, KEYS[1:])[KEYS[1]]
    assert (found.engine, found.epoch, found.position) == (ENGINE, 1, 0)


def test_an_added_partition_has_one_client_of_its_ledger(logs: Logs, settling: RowSettling) -> None:
    """Two in a process would fence each other, as a later start does (R22)."""
    logs.cluster.add_partitions(CONFIG.marker_topic, 2)
    batches = iter(range(1000))

    def position() -> int | None:
        run(settling, next(batches), logs=logs, is_due=False, position=5, partition=1)
        found = read_positions(CONFIG, KEYS[1:]).get(KEYS[1])
        return None if found is None else found.position

    asked = Counter[str]()

    def plan(kind: str, *_: object) -> None:
        asked[kind] += 1

    logs.cluster.faults.plan = plan
    assert position() is None
    settling.adopt(1)
    wait_until(lambda: position() == 5)
    assert asked["init_transactions"] == 1


def test_a_claim_leaves_its_ledgers_open(logs: Logs, settling: RowSettling) -> None:
    """The first settlement is not late by the start of a producer."""
    due(logs, 1)
    asked = Counter[str]()

    def plan(kind: str, *_: object) -> None:
        asked[kind] += 1

    logs.cluster.faults.plan = plan
    run(settling, 0, logs=logs)
    wait_until(lambda: not settling.step(0.02) and len(logs.copies()) == 1)
    assert not asked["init_transactions"]
    assert decode_marker(logs.records(CONFIG.marker_topic)[-1][2].value).outcome


def calling() -> set[threading.Thread]:
    """One for each client of a ledger."""
    return {one for one in threading.enumerate() if one.name == "kafkamq-calls"}


def test_a_claim_that_failed_leaves_no_client_behind(logs: Logs) -> None:
    logs.cluster.add_partitions(CONFIG.marker_topic, 2)
    before, begun = calling(), Claim()
    refused = KafkaError(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)

    def plan(kind: str, *_: object) -> Fault | None:
        return Fault(error=refused) if kind == "init_transactions" and begun.done else None

    logs.cluster.faults.plan = plan
    settling = RowSettling(CONFIG, TrackerConfig(), engine=ENGINE, trigger_ms=0)
    with pytest.raises(BrokerError):
        claim(CONFIG, engine=ENGINE, partitions=2, begun=begun, kept=settling.kept)
    assert begun.ledgers[0].is_open
    settling.close()
    wait_until(lambda: calling() <= before)


class OvertakenAdmin(Admin):
    """Behind its first look at ledgers another engine starts, on purpose."""

    others = 0

    def committed(self, *args: Any, **named: Any) -> Any:
        found = super().committed(*args, **named)
        if not self.others:
            self.others = claim(CONFIG, engine="other", partitions=1).epoch
        return found


def test_a_restart_does_not_take_over_what_another_engine_claims_at_that_moment(
    logs: Logs,
) -> None:
    """The look at who started last was before the other one's start, the fence behind it (R22)."""
    assert claim(CONFIG, engine=ENGINE, partitions=1).epoch == 1
    admin, kept = OvertakenAdmin(CONFIG), OpenLedgers()
    try:
        with pytest.raises(ConfigError, match=r"'other' \(epoch 2\) started last"):
            claim(CONFIG, engine=ENGINE, partitions=1, takeover=False, kept=(kept, admin))
        newest = newest_start(admin, [LedgerKey.of_markers(CONFIG, 0)])
        assert newest is not None
        assert (newest.engine, newest.epoch) == ("other", 2)
    finally:
        kept.close_all([])
        admin.close()


def test_a_start_whose_partitions_all_fail_leaves_no_client_behind(logs: Logs) -> None:
    logs.cluster.add_partitions(CONFIG.marker_topic, PARTITIONS)
    before = calling()
    often = TrackerConfig(position_interval_ms=1)
    settling = RowSettling(CONFIG, often, engine=ENGINE, trigger_ms=0)
    settling.own(claim(CONFIG, engine=ENGINE, partitions=PARTITIONS, kept=settling.kept))
    refused = Fault(error=KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED))
    asked = Counter[str]()

    def plan(kind: str, *_: object) -> Fault | None:
        asked[kind] += 1
        return refused if kind == "send_offsets" else None

    logs.cluster.faults.plan = plan
    due_s = time.monotonic() + 0.002
    wait_until(lambda: time.monotonic() > due_s, "the interval of positions")
    for number in range(PARTITIONS):
        frame: Any = Batch(logs, is_due=False, partition=number)
        settling.run(frame, number)
    settling.step(0.0)
    wait_until(lambda: asked["send_offsets"] == PARTITIONS)
    settling.close()
    wait_until(lambda: calling() <= before)
