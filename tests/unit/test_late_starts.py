"""A marker partition does not answer: what waits for it is set aside, the rest goes on (R5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from tests.unit.worker_parts import FACTS, FixedNamespace, Parts, deliver, record

from kafkamq.markers import starts as module
from kafkamq.markers.handover import PlainHandover
from kafkamq.markers.starts import Batch, Piece
from kafkamq.queue.wire.partitions import CHUNK_OFFSETS, marker_partition
from kafkamq.transport.offset_commits import Commit

PATIENCE_MS = module.PATIENCE_MS
T_MS = 30_000


def route_of(partition: int, offset: int = 0) -> int:
    return marker_partition(partition, offset, FACTS.marker_partitions)


# Partitions of the queue: two that go to marker partitions of their own, and one that shares.
ONE = 0
OTHER = next(p for p in range(1, 99) if route_of(p) != route_of(ONE))
LIKE_OTHER = next(p for p in range(OTHER + 1, 99) if route_of(p) == route_of(OTHER))


class _Reader:
    """What a group has committed, and from where is read."""

    def __init__(self, parts: Parts) -> None:
        self._buffer = parts.buffer
        self.committed: dict[int, int] = {}
        self.sought: dict[int, int] = {}

    def poll_ahead(self, _: int) -> None:
        pass

    def commit(self, _: float) -> Commit:
        offsets = self._buffer.committable()
        self._buffer.committed(offsets)
        self.committed.update(offsets)
        return Commit.DONE

    def hold(self, late: Mapping[int, int]) -> None:
        self._buffer.hold(late)

    def give_up_commit(self) -> None:
        pass

    def go_on(self, partitions: Iterable[int]) -> None:
        self.sought.update(self._buffer.go_on(partitions))

    def seek_back(self, partitions: Iterable[int] | None = None) -> None:
        self.sought.update(self._buffer.rewind(partitions))


class World:
    def __init__(self, **queue: Any) -> None:
        self.parts = Parts(FixedNamespace(), **queue)
        self.reader = _Reader(self.parts)
        reader: Any = self.reader
        self.handover = PlainHandover(self.parts.starter, reader)

    def begin(self, *places: tuple[int, int]) -> Batch:
        self.parts.poll(*(record(offset, partition=number) for number, offset in places))
        batch = self.parts.starter.plan(100)
        assert batch is not None
        self.handover.begin(batch, batch.count)
        return batch

    def finish(self, batch: Batch) -> list[tuple[int, int]]:
        batch.is_committed = True
        return places(self.parts.starter.finish(batch))


def places(held: list[Piece]) -> list[tuple[int, int]]:
    return [(lease.partition, message.offset) for lease, messages in held for message in messages]


@pytest.fixture(autouse=True)
def _without_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_MS", 0)


def test_what_is_reported_goes_on_and_the_rest_follows() -> None:
    world = World(redelivery_timeout_ms=T_MS)
    batch = world.begin((ONE, 10), (OTHER, 20), (ONE, 11), (OTHER, 21))
    deliver(batch.routes[route_of(ONE)])
    late_route = batch.routes[route_of(OTHER)]
    assert world.handover.advance(batch, 0.0) is Commit.DONE
    assert world.reader.committed == {ONE: 12}
    assert world.finish(batch) == [(ONE, 10), (ONE, 11)]
    assert world.handover.late_count == 2
    assert world.handover.next_late(is_settled=True) is None

    world.parts.poll(record(22, partition=OTHER))  # polled before it was held back
    world.parts.buffer.hold({OTHER: 20})
    assert world.parts.starter.plan(1) is None
    deliver(late_route)
    late = world.handover.next_late(is_settled=True)
    assert late is not None
    assert world.handover.advance(late, 0.0) is Commit.DONE
    assert world.finish(late) == [(OTHER, 20), (OTHER, 21)]
    assert world.reader.committed == {ONE: 12, OTHER: 22}
    assert world.reader.sought == {OTHER: 22}
    assert not world.handover.late_count


def test_nothing_goes_on_behind_a_late_start_of_its_partition() -> None:
    first, last = CHUNK_OFFSETS - 1, CHUNK_OFFSETS
    number = next(p for p in range(99) if route_of(p, first) != route_of(p, last))
    world = World(redelivery_timeout_ms=T_MS)
    batch = world.begin((number, first), (number, last))
    route = batch.routes[route_of(number, first)]
    deliver(batch.routes[route_of(number, last)])
    assert world.handover.advance(batch, 0.0) is Commit.DONE
    assert world.finish(batch) == []
    assert world.reader.committed == {}
    deliver(route)
    late = world.handover.next_late(is_settled=True)
    assert late is not None
    assert world.handover.advance(late, 0.0) is Commit.DONE
    assert world.finish(late) == [(number, first), (number, last)]
    assert world.reader.committed == {number: last + 1}


def test_what_is_before_a_late_start_goes_on_and_is_committed_up_to_it() -> None:
    first, last = CHUNK_OFFSETS - 1, CHUNK_OFFSETS
    number = next(p for p in range(99) if route_of(p, first) != route_of(p, last))
    world = World(redelivery_timeout_ms=T_MS)
    batch = world.begin((number, first), (number, last))
    deliver(batch.routes[route_of(number, first)])
    assert world.handover.advance(batch, 0.0) is Commit.DONE
    assert world.finish(batch) == [(number, first)]
    assert world.reader.committed == {number: last}


def test_a_marker_partition_that_is_known_to_be_late_is_not_waited_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(redelivery_timeout_ms=T_MS)
    first = world.begin((ONE, 10), (OTHER, 20))
    deliver(first.routes[route_of(ONE)])
    assert world.handover.advance(first, 0.0) is Commit.DONE
    world.finish(first)
    monkeypatch.setattr(module, "PATIENCE_MS", 1 << 40)
    second = world.begin((ONE, 11), (LIKE_OTHER, 30))
    deliver(second.routes[route_of(ONE)])
    assert world.handover.advance(second, 0.0) is Commit.DONE
    assert world.finish(second) == [(ONE, 11)]
    assert world.handover.late_count == 2


def test_what_went_to_another_member_while_it_was_held_back_is_not_handed_out() -> None:
    world = World(redelivery_timeout_ms=T_MS)
    batch = world.begin((ONE, 10), (OTHER, 20))
    deliver(batch.routes[route_of(ONE)])
    late_route = batch.routes[route_of(OTHER)]
    assert world.handover.advance(batch, 0.0) is Commit.DONE
    world.finish(batch)
    world.parts.buffer.revoked([OTHER])
    world.handover.lost(None, [OTHER])
    assert world.handover.next_late(is_settled=False) is None
    assert places_of_leases(world) == [(ONE, 10)]
    deliver(late_route)  # polled again, its first START counts
    assert world.parts.state.leases.may_be_lapsed
    assert OTHER not in world.parts.buffer.committable()


def test_a_part_that_is_given_up_takes_along_what_is_behind_it() -> None:
    first, last = CHUNK_OFFSETS - 1, CHUNK_OFFSETS
    number = next(p for p in range(99) if route_of(p, first) != route_of(p, last))
    world = World(redelivery_timeout_ms=T_MS)
    batch = world.begin((number, first), (number, last))
    deliver(batch.routes[route_of(number, first)])
    world.reader.commit = lambda _: Commit.FAILED  # type: ignore[method-assign]
    assert world.handover.advance(batch, 0.0) is Commit.FAILED
    world.handover.give_up(batch)
    assert not world.handover.late_count
    assert world.reader.sought == {number: first}
    assert places_of_leases(world) == []


def test_all_may_be_late_and_is_given_up_in_the_end() -> None:
    world = World(redelivery_timeout_ms=T_MS)
    batch = world.begin((ONE, 10), (OTHER, 20))
    assert world.handover.advance(batch, 0.0) is Commit.DONE
    assert world.finish(batch) == []
    assert world.handover.late_count == 2
    world.handover.give_up_late()
    assert world.reader.sought == {ONE: 10, OTHER: 20}
    assert places_of_leases(world) == []
    assert not world.parts.buffer.held


def test_a_start_that_is_confirmed_behind_its_lease_is_not_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(redelivery_timeout_ms=T_MS)
    batch = world.begin((ONE, 10), (OTHER, 20))
    deliver(batch.routes[route_of(ONE)])
    late_route = batch.routes[route_of(OTHER)]
    assert world.handover.advance(batch, 0.0) is Commit.DONE
    world.finish(batch)
    deliver(late_route)
    written_ms = late_route.written_ms
    late = world.handover.next_late(is_settled=True)
    assert late is not None
    assert world.handover.advance(late, 0.0) is Commit.DONE
    monkeypatch.setattr(module, "monotonic_ms", lambda: written_ms + T_MS)
    assert world.finish(late) == []
    assert world.reader.committed == {ONE: 11, OTHER: 21}


def test_a_last_delivery_is_never_set_aside() -> None:
    world = World(redelivery_timeout_ms=T_MS)
    batch = world.begin((ONE, 10))
    batch.is_last = True
    assert world.handover.advance(batch, 0.0) is Commit.PENDING
    assert not world.handover.late_count


def places_of_leases(world: World) -> list[tuple[int, int]]:
    leases = world.parts.state.leases.open()
    return sorted((lease.partition, offset) for lease in leases for offset in lease.held)
