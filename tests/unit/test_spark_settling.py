"""What a worker process of Spark keeps between the batches of a tracker, or of several."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import pytest

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.markers.tracker.ledger import MAX_OPEN
from kafkamq.markers.tracker.settlement import SettleReport
from kafkamq.markers.wire.status import TrackerStatus, encode_status
from kafkamq.spark.blocks import encode_actions
from kafkamq.spark.tracker import partition_ledgers, settling, slot_settler
from kafkamq.spark.tracker.slot_settler import SettleSettings, SlotSettler


class Clients:
    """Counts what is made: each is a connection or more."""

    made = 0

    def __init__(self, *_: object, **__: object) -> None:
        Clients.made += 1


@pytest.fixture(autouse=True)
def clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(settling, "Ticker", Clients)
    monkeypatch.setattr(slot_settler, "Settler", Clients)
    monkeypatch.setattr(settling, "_workers", {})
    Clients.made = 0
    yield
    for worker in settling._workers.values():
        worker.close()


def settings(namespace: str, *, servers: str = "x:1", epoch: int = 1) -> SettleSettings:
    return SettleSettings(
        config=ServiceConfig(bootstrap_servers=servers, namespace=namespace),
        tracker=TrackerConfig(),
        engine=f"spark-{namespace}-{servers}",
        epoch=epoch,
        slots=2,
    )


def batch(of: SettleSettings) -> settling._Worker:
    worker = settling._worker(of)
    assert worker._settlers[0] and worker._settlers[1], "one for each slot"
    return worker


def test_trackers_of_one_session_keep_their_clients() -> None:
    several = [settings("a"), settings("b"), settings("a", servers="y:1")]
    for each in several:
        batch(each)
    made = Clients.made
    workers = [batch(each) for _ in range(10) for each in several]
    assert Clients.made == made
    assert len(set(map(id, workers))) == 3


def test_a_later_start_drops_the_earlier_ones_clients() -> None:
    first, other = batch(settings("a")), batch(settings("b"))
    second = batch(settings("a", epoch=2))
    assert second is not first
    assert list(settling._workers.values()) == [other, second]


def test_a_tracker_that_has_ended_is_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    batch(settings("ended"))
    now_s = time.monotonic() + 2 * settling.UNUSED_S
    monkeypatch.setattr(settling.time, "monotonic", lambda: now_s)
    left = batch(settings("b"))
    assert list(settling._workers.values()) == [left]


class Committed:
    """In place of a Settler, a Ticker and ledgers: what was committed."""

    def __init__(self, *_: object, **__: object) -> None:
        self.last = self.key = None
        self.positions: list[tuple[int, int]] = []

    def settle(
        self,
        _: object,
        actions: object,
        *,
        position: int,
        batch: int,
        source_hash: str,
        timeout_s: float,
    ) -> SettleReport:
        assert not actions
        assert source_hash
        self.positions.append((batch, position))
        return SettleReport()

    def prepare(self) -> None:
        pass

    def publish(self, _: object) -> None:
        pass

    poll = prepare

    @contextmanager
    def using(self, _: int) -> Iterator[Committed]:
        yield self

    def turns(self) -> int:
        return 1


def test_a_new_process_writes_the_position_of_its_first_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where batches are rare, each one has new processes: Spark ends those that rest."""
    log = Committed()
    monkeypatch.setattr(slot_settler, "Settler", lambda *_, **__: log)

    def settle(settler: SlotSettler, batch: int) -> None:
        position = 10 * batch
        status = TrackerStatus(topic="t", partition=3, engine="e", epoch=1)
        row = {
            "partition": 3,
            "position": position,
            "range_end": position,
            "status": encode_status(status),
            "actions": encode_actions([]),
        }
        assert settler.settle(row, batch) == 0

    settler = SlotSettler(settings("a"), log, log)  # type: ignore[arg-type]  # in place of both
    settle(settler, 7)
    assert not log.positions, "nobody waits for it"
    settle(settler, 8)
    settler.prepare(3)
    settler.prepare(3)
    assert log.positions == [(7, 70)]
    now_s = time.monotonic() + 100
    monkeypatch.setattr(settling.time, "monotonic", lambda: now_s)
    settle(settler, 9)
    settle(settler, 10)
    assert log.positions == [(7, 70), (9, 90)]


class OneLedger:
    """In place of a Ledger: whether its client is there."""

    open_ones: ClassVar[set[int]] = set()
    most = 0

    def __init__(self, _: object, key: object, *, admin: object, **__: object) -> None:
        assert admin is not None, "one for all"
        self.number = id(self)

    @property
    def is_open(self) -> bool:
        return self.number in self.open_ones

    def open(self) -> None:
        self.open_ones.add(self.number)
        OneLedger.most = max(OneLedger.most, len(self.open_ones))

    def rest(self) -> None:
        self.open_ones.discard(self.number)

    close = rest


def test_a_process_keeps_few_of_its_ledgers_open(monkeypatch: pytest.MonkeyPatch) -> None:
    admins: list[SimpleNamespace] = []

    def admin(_: object, **__: object) -> SimpleNamespace:
        admins.append(SimpleNamespace(close=lambda: None))
        return admins[-1]

    monkeypatch.setattr(partition_ledgers, "Ledger", OneLedger)
    monkeypatch.setattr(partition_ledgers, "Admin", admin)
    config = ServiceConfig(bootstrap_servers="x:1", namespace="many")
    ledgers = partition_ledgers.PartitionLedgers(config, engine="e", epoch=1)
    for _ in range(2):
        for partition in range(1000):
            with ledgers.using(partition) as own:
                assert own.is_open
    assert len(OneLedger.open_ones) == MAX_OPEN
    assert OneLedger.most == MAX_OPEN + 1  # the one in use
    assert len(admins) == 1
    assert ledgers.turns() * MAX_OPEN >= 1000
    ledgers.close()
    assert not OneLedger.open_ones


def test_a_partition_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Committed()
    monkeypatch.setattr(slot_settler, "Settler", lambda *_, **__: log)
    settler = SlotSettler(settings("a"), log, log)  # type: ignore[arg-type]  # in place of both
    assert [settler.wants_preparing(number) for number in (1, 2, 1, 2)] == [
        True,
        True,
        False,
        False,
    ]
