"""Due messages that lie far apart in the log come out steadily, whatever a seek costs (R16, R18).

The log, the ledger and the clock are fakes: what counts is when something is written.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Message
from harness.markers import encode_start

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.markers.rules.delivery import Carry, DueCause, Settle
from kafkamq.markers.tracker import reading, settlement
from kafkamq.markers.tracker.settlement import ActionSettler, SettleReport, WindowSize
from kafkamq.markers.wire.marker_writer import encode_end
from kafkamq.transport import follower
from kafkamq.transport import log_reader as reader
from kafkamq.transport.admin import TopicInfo
from kafkamq.transport.errors import TransactionAbortedError
from kafkamq.types import MessageId, Outcome

ID = MessageId(0, 1, b"t" * 16, 1)
START = encode_start(ID, b"q", b"x" * 100, redeliver_after_ms=10_000, consumer_id="c")
NACK = encode_end(ID, Outcome.NACK, reason="later", redeliver_after_ms=1000)
FAR = 1000
COMMIT_S = 0.03
TRANSACTION_S = 10.0  # what does not go through by then is aborted


@dataclass
class World:
    """A log in which each seek takes ``seek_s``, and what the settlements do with it."""

    seek_s: float
    bytes_s: float = float("inf")  # what the link to the brokers carries
    now_s: float = 1000.0
    seeks: int = 0
    position: int = 0
    commits: list[float] = field(default_factory=list)  # when
    bounds: list[float] = field(default_factory=list)  # how long a commit might have taken
    pending: list[Any] = field(default_factory=list)  # records of the open transaction
    sizes: list[tuple[int, bool]] = field(default_factory=list)  # and whether it was committed
    copies: int = 0
    done: int = 0

    # The clock.

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, s: float) -> None:
        self.now_s += s

    # The consumer.

    def assign(self, partitions: list[Any]) -> None:
        self.seeks += 1
        self.now_s += self.seek_s
        self.position = partitions[0].offset

    def consume(self, *_: float) -> list[Message]:
        value = NACK if self.position % 2 else START
        return [Message("m", 0, self.position, value=value, timestamp=(2, 1000))]

    def incremental_unassign(self, _: list[Any]) -> None:
        pass

    def resume(self, _: list[Any]) -> None:
        pass

    # The ledger and its producer.

    key = SimpleNamespace(topic="m", partition=0)
    is_open = True
    is_resting = False
    too_large = 0

    @property
    def producer(self) -> World:
        return self

    def is_past(self, _: int) -> bool:
        return False

    def rows_done(self, _: int) -> int:
        return self.done

    def begin(self) -> None:
        pass

    def abort(self) -> None:
        assert not self.sizes[-1][1], "what is not too slow is not aborted"

    def produce_records(self, records: list[Any], *, timeout_s: float) -> None:
        self.pending = records
        self.bounds.append(timeout_s)

    def commit(self, _position: int, *, rows_done: int, timeout_s: float, **_: object) -> None:
        self.bounds.append(timeout_s)
        size = sum(len(value) for _, _, _, value, _ in self.pending)
        is_carried = size / self.bytes_s <= TRANSACTION_S
        self.sizes.append((size, is_carried))
        if not is_carried:
            self.now_s += TRANSACTION_S
            raise TransactionAbortedError("message(s) timed out", is_retriable=True)
        self.now_s += COMMIT_S + size / self.bytes_s
        self.copies += len(self.pending) // 2
        self.commits.append(self.now_s)
        self.done = rows_done


@pytest.fixture
def settler(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ActionSettler:
    world: World = request.getfixturevalue("world")
    for module in (reader, reading, settlement):
        monkeypatch.setattr(module, "time", world)
    monkeypatch.setattr(follower, "open_consumer", lambda *_: world)
    topic = TopicInfo("t", b"t" * 16, 8, 1, {})
    monkeypatch.setattr(reading.MessageLookup, "topic", lambda *_, **__: topic)
    admin = SimpleNamespace(topic_id=lambda _: ID.topic_id, close=lambda: None)
    monkeypatch.setattr(reading, "Admin", lambda *_, **__: admin)
    return ActionSettler(ServiceConfig(bootstrap_servers="nowhere:1"), TrackerConfig())


@pytest.fixture
def world() -> World:
    return World(0.005)


def sparse(count: int, *, has_reasons: bool = False) -> list[Settle | Carry]:
    cause = DueCause.NACKED if has_reasons else DueCause.LEASE_ENDED
    return [
        Settle(at, ID, False, cause, 0, 20_000, 10_000, at + FAR // 2 + 1 if has_reasons else -1)
        for at in range(0, count * FAR, FAR)
    ]


def settle_all(
    world: World, settler: ActionSettler, rows: list[Settle | Carry], timeout_s: float
) -> list[SettleReport]:
    """Ask for what is left again, in another batch, as a tracker does."""
    reports = []
    while rows:
        world.done = 0
        report = settler.settle(
            world,  # type: ignore[arg-type]
            rows, position=0, batch=len(reports), reopen=False, timeout_s=timeout_s,
        )  # fmt: skip
        rows = list(report.left)
        reports.append(report)
    return reports


def assert_steady(world: World, began_s: float, seeks: int) -> None:
    moments = [began_s, *world.commits]
    gaps = [after - before for before, after in pairwise(moments)]
    assert max(gaps) < 3.0
    assert min(world.bounds) >= 8.0, "a commit has the time that it needs"
    assert world.now_s - began_s <= 1.2 * seeks * world.seek_s


def test_sparse_rows_come_out_at_a_steady_rate(world: World, settler: ActionSettler) -> None:
    began_s = world.now_s
    reports = settle_all(world, settler, sparse(6000), timeout_s=20.0)
    assert world.copies == sum(report.copies for report in reports) == 6000
    assert len(reports) > 1, "the bound of a settlement is kept"
    assert_steady(world, began_s, 6000)


def test_reasons_that_lie_far_apart_do_not_hold_them_up(
    world: World, settler: ActionSettler
) -> None:
    began_s = world.now_s
    settle_all(world, settler, sparse(3000, has_reasons=True), timeout_s=20.0)
    assert world.copies == 3000
    assert_steady(world, began_s, 2 * 3000)


def test_reasons_that_take_longer_than_a_settlement_may_are_read_a_few_at_a_time(
    world: World, settler: ActionSettler
) -> None:
    world.seek_s = 2.0
    settle_all(world, settler, sparse(3, has_reasons=True), timeout_s=20.0)
    reports = settle_all(world, settler, sparse(12, has_reasons=True), timeout_s=20.0)
    assert world.copies == 3 + 12
    assert len(reports) > 1


@pytest.mark.parametrize(("count", "most"), [(1000, 11), (200, 4)])
def test_markers_are_read_once_where_all_reasons_stand_behind_all_starts(
    world: World, settler: ActionSettler, count: int, most: int
) -> None:
    """A second of reading ends among the STARTs, or with the first reason."""
    rows = [
        replace(row, verdict_offset=(count + at) * FAR + 1)
        for at, row in enumerate(sparse(count, has_reasons=True))
        if isinstance(row, Settle)
    ]
    (report,) = settle_all(world, settler, list(rows), timeout_s=60.0)
    assert (report.copies, world.seeks) == (count, 2 * count)
    assert report.transactions <= most


def test_rows_that_cost_nothing_are_few_transactions(settler: ActionSettler, world: World) -> None:
    """The first one is small, as nobody knows yet what goes through."""
    world.seek_s = 0.0
    for most in (2, 1):
        (report,) = settle_all(world, settler, sparse(9000), timeout_s=20.0)
        assert (report.copies, report.transactions) == (9000, most)


def test_one_row_that_costs_all_the_time_is_done(settler: ActionSettler, world: World) -> None:
    world.seek_s = 6.0
    reports = settle_all(world, settler, sparse(3), timeout_s=10.0)
    assert sum(report.copies for report in reports) == 3
    assert min(world.bounds) >= 8.0


def test_a_message_by_reference_does_not_wait_for_the_next_start(
    settler: ActionSettler, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two STARTs and the first one's message would take longer than a settlement may."""
    world.seek_s = 7.0
    refers = encode_start(
        ID, b"q", None, redeliver_after_ms=10_000, consumer_id="c", by_reference=True
    )
    monkeypatch.setattr(f"{__name__}.START", refers)
    rows: list[Settle | Carry] = [
        replace(row, message_id=replace(ID, offset=at * FAR + FAR // 2))
        for at, row in enumerate(sparse(3))
        if isinstance(row, Settle)
    ]
    reports = settle_all(world, settler, rows, timeout_s=20.0)
    assert [report.copies for report in reports] == [1, 1, 1]


def test_a_slow_link_gets_transactions_that_it_can_carry(
    settler: ActionSettler, world: World
) -> None:
    world.seek_s, world.bytes_s = 0.0, 5000.0
    settle_all(world, settler, sparse(5000), timeout_s=120.0)
    assert world.copies == 5000
    failed = [at for at, (_, is_carried) in enumerate(world.sizes) if not is_carried]
    assert 2 <= len(failed) < len(world.sizes) / 3
    for at in failed:
        assert all(size < world.sizes[at][0] for size, _ in world.sizes[at + 1 : at + 11])


def test_a_transaction_takes_what_goes_through_in_a_third_of_the_time() -> None:
    size = WindowSize(50_000, 16_000_000)
    first = 4 * 1024 * 1024
    assert size.bytes == first, "nobody knows yet what goes through"
    size.written(1, first // 2 - 1, 0.001)
    assert size.bytes == first, "what is small says nothing"
    size.written(1, first, 8.0)
    assert size.bytes == pytest.approx(first / 8 * 10 / 3, abs=1)
    size.written(1, size.bytes, 0.05)
    assert size.bytes == pytest.approx(4 * first / 8 * 10 / 3, abs=4), "it grows in steps"
    for _ in range(2):
        size.written(1, size.bytes, 0.5)
    assert size.bytes == 16_000_000, "never more than is configured"
    size.written(1, 16_000_000, 1000.0)
    assert size.bytes == 64 * 1024, "there is always room for some"
    assert WindowSize(50_000, 1000).bytes == 1000


def test_what_failed_is_not_tried_again_before_ten_smaller_ones_went_through() -> None:
    size = WindowSize(50_000, 16_000_000)
    for _ in range(2):
        size.written(1, size.bytes, 0.1)
    assert size.bytes == 16_000_000
    size.failed(8_000_000)
    assert size.bytes == 4_000_000
    for _ in range(10):
        size.written(1, size.bytes, 0.1)
        size.written(1, 1000, 0.1)  # which says nothing
        assert size.bytes == 7_999_999
    size.written(1, size.bytes, 0.1)
    assert size.bytes == 16_000_000
    size.failed(100)
    assert size.bytes == 16_000_000, "what is small did not fail for its size"
    size.failed(70_000)
    assert size.bytes == 64 * 1024


def rows_of(size: WindowSize) -> int:
    """Of the next window, by time alone."""
    size.bytes = 1 << 30
    return size.rows


def test_a_plan_that_ends_does_not_make_the_next_windows_small() -> None:
    size = WindowSize(50_000, 1 << 30)
    size.read(1, 0.5)
    assert rows_of(size) == 50_000
    size.read(50_000, 5.0)
    assert rows_of(size) == 10_000
    size.written(819, 81_900, 0.1)
    size.bytes = 10_000
    assert size.rows == 100
    size.bytes = 1
    assert size.rows == 1


def test_reads_that_cost_the_same_for_many_rows_are_of_many_rows() -> None:
    """Where each takes two seconds, one row at a time would be one in two seconds."""
    size = WindowSize(5000, 1 << 30)
    for _ in range(20):
        size.read(rows_of(size), 2.0)
    assert rows_of(size) == 16
    size.read(1, 2.0)  # the last row of a plan
    for _ in range(3):
        size.read(rows_of(size), 2.0)
    assert rows_of(size) == 16
    size.read(16, 32.0)
    assert rows_of(size) == 2, "as many as can be read in time"


def test_what_was_refused_is_found_by_halves() -> None:
    size = WindowSize(5000, 1 << 30)
    size.refused(4096)
    assert rows_of(size) == 2048
    size.refused(1)
    assert rows_of(size) == 1
    size.read(1, 0.1)
    assert rows_of(size) == 2, "it grows again while nothing is refused"


def test_transactions_that_take_as_long_whatever_they_hold_are_not_made_smaller() -> None:
    """A slow coordinator is not a slow link: less at a time would only be slower."""
    size = WindowSize(50_000, 16_000_000)
    for _ in range(20):
        size.written(1, size.bytes, 5.0)
    assert size.bytes == 4 * 1024 * 1024
