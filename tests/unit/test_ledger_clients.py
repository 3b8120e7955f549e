"""Ledgers of many partitions: what a start asks, how many producers stay, when one is usable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import cast

import pytest
from confluent_kafka import TopicPartition
from tests.waiting import within

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.errors import BrokerError, FencedError
from kafkamq.markers.tracker import ledger as module
from kafkamq.markers.tracker import takeover as partition_start
from kafkamq.markers.tracker.ledger import Ledger, LedgerKey, OpenLedgers, newest_start
from kafkamq.markers.tracker.takeover import PartitionStarter
from kafkamq.markers.wire.records import Position, encode_position
from kafkamq.transport import commits as committed
from kafkamq.transport.admin import Admin
from kafkamq.transport.errors import ErrorWatch

CONFIG = ServiceConfig(bootstrap_servers="x:1")
PARTITIONS = 1000
KEYS = [LedgerKey.of_markers(CONFIG, number) for number in range(PARTITIONS)]


class FakeAdmin:
    """The groups' coordinators, as far as a start asks them."""

    def __init__(self) -> None:
        self.held: dict[str, Position] = {}
        self.asked: list[str] = []
        self.error: BrokerError | None = None

    def hold(self, number: int, epoch: int, *, engine: str = "local", batch: int = 0) -> None:
        position = Position(position=0, epoch=epoch, engine=engine, batch=batch)
        self.held[KEYS[number].transactional_id] = position

    def committed(
        self, requests: Sequence[tuple[str, tuple[str, int]]], *, stable: bool = True
    ) -> list[TopicPartition]:
        self.asked += [group for group, _ in requests]
        if self.error is not None:
            raise self.error
        return [self._committed(group, place) for group, place in requests]

    def _committed(self, group: str, place: tuple[str, int]) -> TopicPartition:
        found = self.held.get(group)
        if found is None:
            return TopicPartition(*place, -1001)
        text = encode_position(found)
        return TopicPartition(*place, found.position, metadata=text)

    def groups(self) -> frozenset[str]:
        return frozenset(self.held)

    def log_bounds(self, topic: str, partitions: Sequence[int]) -> dict[int, tuple[int, int]]:
        return dict.fromkeys(partitions, (0, 9))


class FakeProducer:
    """A transactional producer that nobody fences."""

    def __init__(self, *_: object, **__: object) -> None:
        self.is_ready = False
        self.inits = 0

    def init(self, *, timeout_s: float) -> None:
        self.inits += 1
        self.is_ready = True

    def close(self) -> None:
        self.is_ready = False


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> FakeAdmin:
    fake = FakeAdmin()
    monkeypatch.setattr(module, "TransactionalProducer", FakeProducer)
    monkeypatch.setattr(Ledger, "_metadata", lambda _: b"group")
    monkeypatch.setattr(partition_start, "Admin", lambda *_, **__: fake)
    return fake


def starter(*, takeover: bool = True) -> PartitionStarter:
    tracker = TrackerConfig(takeover=takeover)
    return PartitionStarter(CONFIG, tracker, partitions=PARTITIONS, ledgers=OpenLedgers())


def opened(admin: FakeAdmin, number: int, *, epoch: int = 1) -> Ledger:
    asked = cast(Admin, admin)
    own = Ledger(CONFIG, KEYS[number], engine="local", epoch=epoch, admin=asked)
    own.open()
    return own


def test_a_start_asks_the_ledger_of_partition_0_and_its_own(admin: FakeAdmin) -> None:
    for number in range(PARTITIONS):
        admin.hold(number, 3)
    started = starter().start(700, None)
    assert started is not None
    assert started.ledger.epoch == 3
    assert admin.asked == [KEYS[0].transactional_id, KEYS[700].transactional_id]


def test_the_owner_of_partition_0_finds_the_epoch_when_its_ledger_is_lost(
    admin: FakeAdmin,
) -> None:
    admin.hold(5, 3, engine="spark-1")
    admin.hold(800, 4, engine="spark-1")
    assert newest_start(cast(Admin, admin), KEYS) == admin.held[KEYS[800].transactional_id]
    assert admin.asked == [KEYS[number].transactional_id for number in (0, 5, 800)]


def test_the_consumer_of_partition_0_is_kept_whatever_is_asked_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Starts run in some threads at once: one reads its own ledger while another asks for id 0."""
    made: list[str] = []
    often, seldom = KEYS[0], KEYS[5]

    class FakeConsumer:
        def __init__(self, settings: dict[str, object], _watch: object) -> None:
            made.append(str(settings["group.id"]))

        def committed(
            self, partitions: list[TopicPartition], *, timeout: float
        ) -> list[TopicPartition]:
            if partitions[0].partition == often.partition:
                ask(seldom)
            return partitions

        def close(self) -> None:
            pass

    monkeypatch.setattr(committed, "open_consumer", FakeConsumer)
    kept = {often.transactional_id}
    offsets = committed.CommittedOffsets(CONFIG, ErrorWatch("x:1"), kept=kept)

    def ask(key: LedgerKey) -> None:
        place = (key.topic, key.partition)
        offsets.read([(key.transactional_id, place)], stable=False, timeout_s=1.0)

    for _ in range(3):
        ask(often)
    assert made.count(often.transactional_id) == 1


def test_others_wait_for_the_owner_of_partition_0(admin: FakeAdmin) -> None:
    admin.hold(800, 4)
    assert starter().start(800, None) is None
    assert admin.asked == [KEYS[0].transactional_id]


def test_a_ledger_that_was_fenced_but_not_read_is_not_open(admin: FakeAdmin) -> None:
    """Its rows done would be those of before: a batch would be written once more."""
    own = opened(admin, 7)
    admin.error = BrokerError("the coordinator is loading", code="X", is_retriable=True)
    own.producer.close()
    with pytest.raises(BrokerError):
        own.open()
    assert own.producer.is_ready
    assert not own.is_open
    admin.error = None
    own.open()
    assert own.is_open


def test_a_ledger_that_rested_goes_on_where_nobody_has_written(admin: FakeAdmin) -> None:
    admin.hold(7, 1, batch=4)
    own = opened(admin, 7)
    own.rest()
    assert (own.is_open, own.is_resting, own.producer.is_ready) == (False, True, False)
    own.resume()
    assert (own.is_open, own.is_resting) == (True, False)


def test_a_ledger_that_rested_is_no_more_where_another_replica_has_written(
    admin: FakeAdmin,
) -> None:
    admin.hold(7, 1, batch=4)
    own = opened(admin, 7)
    own.rest()
    admin.hold(7, 1, batch=5)
    with pytest.raises(FencedError) as caught:
        own.resume()
    assert caught.value.code == "OTHER_OWNER"
    assert (own.is_open, own.is_resting, own.producer.is_ready) == (False, False, False)


def test_a_ledger_that_could_not_be_read_is_compared_when_it_can(admin: FakeAdmin) -> None:
    admin.hold(7, 1, batch=4)
    own = opened(admin, 7)
    own.rest()
    admin.hold(7, 1, batch=5)
    admin.error = BrokerError("the coordinator is loading", code="X", is_retriable=True)
    with pytest.raises(BrokerError):
        own.resume()
    assert (own.is_open, own.is_resting, own.producer.is_ready) == (False, True, False)
    admin.error = None
    with pytest.raises(FencedError):
        own.resume()


def test_the_ledgers_that_were_not_used_for_longest_rest(admin: FakeAdmin) -> None:
    kept = OpenLedgers(2)
    ledgers = [opened(admin, number) for number in range(4)]
    for own in ledgers[:2]:
        kept.keep(own)
    with kept.using(ledgers[0]), kept.using(ledgers[2]):  # used ones are not put to rest
        kept.keep(ledgers[3])
        assert [own.is_open for own in ledgers] == [True] * 4
    assert [own.is_resting for own in ledgers] == [False, True, False, True]
    kept.close(ledgers[0])
    assert not ledgers[0].is_open
    assert not ledgers[0].is_resting


def test_no_client_of_a_ledger_outlives_the_close(admin: FakeAdmin) -> None:
    """Those in use end when they are not any more, and so does what a claim brings late."""
    kept = OpenLedgers(2)
    idle, used, late, given = (opened(admin, number) for number in range(4))
    kept.keep(idle)
    with kept.using(used):
        kept.close_all([used, given])
        assert [own.is_open for own in (idle, used, given)] == [False, True, False]
    kept.keep(late)
    assert not used.is_open
    assert not late.is_open


@pytest.mark.parametrize("does", ["use", "close"])
def test_a_ledger_that_is_put_to_rest_is_not_used_meanwhile(admin: FakeAdmin, does: str) -> None:
    """Its client ends in the thread of another partition, and something falls due in its own."""
    kept = OpenLedgers(1)
    first, second = opened(admin, 0), opened(admin, 1)
    kept.keep(first)
    ending, may_end = threading.Event(), threading.Event()
    done: list[tuple[str, bool]] = []
    end = first.producer.close

    def end_slowly() -> None:
        ending.set()
        assert may_end.wait(within(10))
        end()
        done.append(("rests", first.is_resting))

    def use() -> None:
        with kept.using(first):
            first.resume()
            done.append(("used", first.is_open))

    def close() -> None:
        kept.close(first)
        done.append(("closed", first.is_resting))

    def begun(act: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        return thread

    first.producer.close = end_slowly  # type: ignore[method-assign]
    rests = begun(lambda: kept.keep(second))
    assert ending.wait(within(10))
    first.producer.close = end  # type: ignore[method-assign]
    acts = begun(use if does == "use" else close)
    acts.join(0.1)  # it would be done by then
    may_end.set()
    rests.join(within(10))
    acts.join(within(10))
    assert done == [("rests", True), ("used", True) if does == "use" else ("closed", False)]
