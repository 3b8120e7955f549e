"""A member that works on offset ranges: what it writes, and what it may work on.

- RC6 It holds one range to work on and ``ahead`` more, claimed before they are needed. Ranges that
  have messages come first; among these, and among those without, abandoned ranges come first, then
  those that begin at a frontier which is not beyond the log's end. Held ranges without messages do
  not count when it claims ranges that have some.
- RC7 It believes nothing before it has read it back. A claim or beat counts for one interval from
  before it was sent, by the process's clock; then the range must not be worked on (as C2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kafkamq.claims.rules.range_log import HeldRange, RangeLog
from kafkamq.types import RangeRecord, RangeType

RangePlace = tuple[int, int, int]
"""Partition, first and next offset of a range."""


@dataclass(slots=True)
class RangeWrite:
    """Append ``record``; answer ``on_written``."""

    record: RangeRecord
    sent_ms: int
    offset: int = -1  # where it stands in the log


class RangeMember:
    """One client of one group on one topic; its owner applies every record to ``log``."""

    def __init__(
        self,
        log: RangeLog,
        *,
        client: str,
        instance: str,
        group: str,
        topic: str,
        size: int,
        ahead: int,
        interval_ms: int,
    ) -> None:
        self._log = log
        self._ids = (client, instance, group, topic)
        self._size = size
        self._ahead = ahead
        self._interval_ms = interval_ms
        self._next_beat_ms = -(2**62)
        self._pending: list[RangeWrite] = []
        self._confirmed_ms: dict[RangePlace, int] = {}
        self._is_leaving = False

    def held(self, partitions: Sequence[int]) -> list[tuple[int, HeldRange]]:
        _, instance, group, topic = self._ids
        return [
            (partition, each)
            for partition in partitions
            for each in self._log.held(group, topic, partition, instance)
        ]

    def is_live(self, partition: int, each: HeldRange, monotonic_ms: int) -> bool:
        """RC7: it may be worked on at this moment."""
        since_ms = self._confirmed_ms.get((partition, each.first, each.next))
        return since_ms is not None and monotonic_ms < since_ms + self._interval_ms

    def leave(self) -> None:
        self._is_leaving = True

    def on_written(self, write: RangeWrite, offset: int) -> None:
        """It stands there; -1: nobody knows."""
        write.offset = offset
        if offset < 0 and write in self._pending:
            self._pending.remove(write)

    def observe(self, partitions: Sequence[int]) -> None:
        read = [each for each in self._pending if 0 <= each.offset < self._log.next_offset]
        if not read:
            return
        self._pending = [each for each in self._pending if each not in read]
        ours = {(partition, each.first, each.next) for partition, each in self.held(partitions)}
        for write in read:
            place = (write.record.partition, write.record.first, write.record.next)
            if place in ours:
                self._confirmed_ms[place] = write.sent_ms
        old_ms = read[-1].sent_ms - 2 * self._interval_ms
        self._confirmed_ms = {
            place: at_ms
            for place, at_ms in self._confirmed_ms.items()
            if place in ours or at_ms > old_ms
        }

    def shorten(self, partition: int, before: tuple[int, int], first: int) -> None:
        """A range is done up to ``first``: its rest is as live as it was."""
        at_ms = self._confirmed_ms.get((partition, *before))
        if at_ms is not None:
            self._confirmed_ms[partition, first, before[1]] = at_ms

    def plan(
        self, monotonic_ms: int, now_s: float, *, ends: Mapping[int, int], bases: Mapping[int, int]
    ) -> list[RangeWrite]:
        """What to write now."""
        writes: list[RangeWrite] = []
        held = self.held(list(ends))
        if monotonic_ms >= self._next_beat_ms:
            self._next_beat_ms = monotonic_ms + self._interval_ms // 3
            writes += self._beats(held, list(ends), monotonic_ms, now_s)
        claims = sum(each.record.type is RangeType.CLAIM for each in self._pending)
        if not claims and not self._is_leaving and self._log.is_warm:
            for place in self._wanted(held, now_s, ends, bases):
                writes.append(self._write(RangeType.CLAIM, *place, monotonic_ms, now_s))
        self._pending += writes
        return writes

    def _wanted(
        self,
        held: Sequence[tuple[int, HeldRange]],
        now_s: float,
        ends: Mapping[int, int],
        bases: Mapping[int, int],
    ) -> list[RangePlace]:
        """RC6: what to claim."""
        most = self._ahead + 1
        busy = sum(each.first < ends[partition] for partition, each in held)
        if busy >= most:
            return []
        free = self._free(now_s, ends, bases)
        full = sum(first < ends[partition] for partition, first, _ in free)  # they come first
        return free[: max(min(full, most - busy), most - len(held))]

    def _beats(
        self,
        held: Sequence[tuple[int, HeldRange]],
        partitions: Sequence[int],
        monotonic_ms: int,
        now_s: float,
    ) -> Iterator[RangeWrite]:
        """RC3; a frontier is told after everything before it that nobody holds (RC4)."""
        yield from self.tell(partitions, monotonic_ms, now_s)
        # A beat behind the end of its range would recreate the range for who reads only that.
        ending = {
            (each.record.partition, each.record.first)
            for each in self._pending
            if each.record.type in (RangeType.DONE, RangeType.FREE)
        }
        for partition in partitions:
            mine = [
                (each.first, each.next)
                for number, each in held
                if number == partition and (number, each.first) not in ending
            ]
            for first, next_ in mine or [(0, 0)]:
                yield self._write(RangeType.BEAT, partition, first, next_, monotonic_ms, now_s)

    def tell(
        self, partitions: Sequence[int], monotonic_ms: int, now_s: float
    ) -> Iterator[RangeWrite]:
        """RC4: what is abandoned, unless somebody said so lately."""
        _, _, group, topic = self._ids
        if not self._log.is_warm:  # it may be held by somebody who was not heard yet
            return
        for partition in partitions:
            for each in self._log.untold(group, topic, partition, now_s=now_s):
                place = (partition, each.first, each.next)
                yield self._write(RangeType.FREE, *place, monotonic_ms, now_s)

    def end(
        self, type: RangeType, place: RangePlace, monotonic_ms: int, now_s: float
    ) -> RangeWrite:
        """Say that a range is done, or free."""
        write = self._write(type, *place, monotonic_ms, now_s)
        self._pending.append(write)
        return write

    def _free(
        self, now_s: float, ends: Mapping[int, int], bases: Mapping[int, int]
    ) -> list[RangePlace]:
        """RC6."""
        _, _, group, topic = self._ids
        abandoned: list[RangePlace] = []
        fresh: list[RangePlace] = []
        for partition, end in ends.items():
            left = self._log.abandoned(group, topic, partition, now_s=now_s)
            abandoned += [(partition, each.first, each.next) for each in left]
            frontier = self._log.frontier(group, topic, partition)
            first = bases.get(partition, 0) if frontier < 0 else frontier
            while first <= end and len(fresh) <= self._ahead:
                fresh.append((partition, first, first + self._size))
                first += self._size
                if frontier < 0:  # RC2 takes any first claim: no second one before it is read back
                    break
        return sorted(abandoned + fresh, key=lambda place: place[1] >= ends[place[0]])

    def _write(
        self, type: RangeType, partition: int, first: int, next: int, sent_ms: int, now_s: float
    ) -> RangeWrite:
        client, instance, group, topic = self._ids
        record = RangeRecord(
            type,
            time_s=int(now_s),
            instance=instance,
            client=client,
            group=group,
            topic=topic,
            partition=partition,
            first=first,
            next=next,
            frontier=max(0, self._log.frontier(group, topic, partition)),
            seen=self._log.next_offset,
        )
        return RangeWrite(record, sent_ms)
