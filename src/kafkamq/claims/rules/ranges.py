"""Claims of offset ranges: several members share one partition, and claim what comes next ahead.

One log orders all claims. ``RangeLog`` folds it and says who holds which range; ``RangeMember``
says what a member writes, and what it may work on:

- RC1 Time is log time, as in S1: no sender's clock takes part.
- RC2 A ClaimRange is accepted when it begins at the frontier, the first offset that nobody has
  claimed, which moves to its end; or when it is exactly a range that was freed, or whose owner was
  last heard two intervals ago or more. So ranges never overlap. Its offset is the token. The first
  claim may begin anywhere, so no member writes a second one before it has read a first one.
- RC3 A RangeBeat renews the sender's range and tells its frontier. Everybody who takes part beats,
  with a range or without, so that a reader that starts in the middle of the log knows, two
  intervals later, every living range and the frontier; before that it accepts nothing.
- RC4 A RangeDone of the owner ends its range up to ``next``; RangeFree gives the rest to anybody.
  Members repeat the RangeFree of what is abandoned, of all owners: a reader that starts in the
  middle learns of it only so. Such a range it takes for free until a beat names its owner.
  The sender of a record may have read less of the log than its reader: the record says how far
  (``seen``). What it tells of a range that the reader does not know counts only if the sender had
  read all that stands before the reader's first record, and every RangeDone of that range. If the
  sender had not read a later ClaimRange of it, the claimer may hold the range: then it is not free.
- RC5 The position is the first offset that is not done: what a restart of the whole group needs.
- RC6 It holds one range to work on and ``ahead`` more, claimed before they are needed. Ranges that
  have messages come first; among these, and among those without, abandoned ranges come first, then
  those that begin at a frontier which is not beyond the log's end. Held ranges without messages do
  not count when it claims ranges that have some.
- RC7 It believes nothing before it has read it back. A claim or beat counts for one interval from
  before it was sent, by the process's clock; then the range must not be worked on (as C2).
- RC8 At most once, a member hands out the beginning of its range when it has read back its own
  RangeDone of that, and this one ended it. One that came too late, behind another member's, ended
  nothing: then nothing is handed out. So what was handed out is never free again.

Their records are text fields joined by ``/``, in the manner of Marshal's, but never on its topic:
an unknown type there misleads Go clients.

    TYPE/2/seen/instance/client/group/topic/partition/first/next/frontier

The sender has read the log before offset ``seen``. ``first`` and ``next`` are the half-open range;
``frontier`` is the first offset that nobody has claimed yet, as the sender knows it. A RangeBeat of
a member that holds nothing has the range 0-0.

Source: Marshal PROTOCOL.md, "TODO" (an idea there, without rules).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kafkamq.errors import WireError
from kafkamq.queue.rules.log_clock import LogClock
from kafkamq.types import RangeRecord, RangeType

MAX_RANGES = 10_000
MAX_RANGE = 10_000_000
OffsetRange = tuple[int, int, int]
"""Partition, first and next offset of a range."""
_Owner = tuple[str, str]
RANGE_TOPIC = "kafkamq.ranges"
_MAX_BYTES = 10_000
_FIELDS = 11
# Before this version a record did not say what its sender had read.
_VERSION = 2
_NUMBER = re.compile(rb"[0-9]{1,18}")
_TYPES = {type.value.encode(): type for type in RangeType}


def encode_range(record: RangeRecord) -> bytes:
    ids = (record.instance, record.client, record.group, record.topic)
    numbers = (record.seen, record.partition, record.first, record.next, record.frontier)
    if any("/" in text for text in ids):
        raise WireError("an id holds a '/', which separates the fields")
    if any(not 0 <= number < 10**18 for number in numbers):
        raise WireError("a number of a range record is negative or too large")
    fields = (
        *(record.type.value, _VERSION, record.seen, *ids),
        *(record.partition, record.first, record.next, record.frontier),
    )
    return "/".join(map(str, fields)).encode()


def decode_range(value: bytes | None) -> RangeRecord:
    if value is None or len(value) > _MAX_BYTES:
        raise WireError("a range record is null or too long")
    fields = value.split(b"/", _FIELDS)
    type = _TYPES.get(fields[0])
    if type is None or len(fields) != _FIELDS:
        raise WireError("the type or the number of fields of a range record is unknown")
    if not all(_NUMBER.fullmatch(fields[at]) for at in (1, 2, 7, 8, 9, 10)):
        raise WireError("a range record holds a number that is none")
    if int(fields[1]) < _VERSION:
        raise WireError("a range record is of a version that is not read any more")
    try:
        instance, client, group, topic = (fields[at].decode() for at in (3, 4, 5, 6))
    except UnicodeDecodeError:
        raise WireError("a range record is not UTF-8") from None
    return RangeRecord(
        type,
        instance=instance,
        client=client,
        group=group,
        topic=topic,
        partition=int(fields[7]),
        first=int(fields[8]),
        next=int(fields[9]),
        frontier=int(fields[10]),
        seen=int(fields[2]),
    )


@dataclass(slots=True)
class HeldRange:
    first: int
    next: int
    owner: _Owner
    token: int
    beat_ms: int
    is_free: bool = False
    told_ms: int = 0
    # Its owner is not known: this reader has not read, or not judged, the claim. A record of a
    # member that has read further than ``unsure_at`` names the owner.
    is_hearsay: bool = False
    unsure_at: int = -1


class _Notes:
    """It holds by range the offset of its last record of one type, such as RangeDone.

    A sender that had not read this record tells of the range as it was before. Records
    older than two intervals are forgotten; a sender that had not read so far is not believed.
    """

    def __init__(self) -> None:
        # By the range's first offset: the record's offset, and when it came; oldest first.
        self._noted: dict[int, tuple[int, int]] = {}
        self._horizon = 0

    def add(self, first: int, at: int, now_ms: int, keep_ms: int) -> None:
        noted = self._noted
        noted.pop(first, None)
        noted[first] = (at, now_ms)
        while len(noted) > 1:
            oldest = next(iter(noted))
            noted_at, noted_ms = noted[oldest]
            if now_ms - noted_ms <= keep_ms and len(noted) <= MAX_RANGES:
                break
            self._horizon = max(self._horizon, noted_at + 1)
            del noted[oldest]

    def are_known_to(self, record: RangeRecord) -> bool:
        """Return whether the sender had read what is noted of the range."""
        noted_at, _ = self._noted.get(record.first, (-1, 0))
        return record.seen >= self._horizon and record.seen > noted_at


@dataclass(slots=True)
class _PartitionClaims:
    """The claims on one partition; ``frontier`` is -1 while no record has told it."""

    frontier: int = -1
    ranges: dict[int, HeldRange] = field(default_factory=dict)
    ended: _Notes = field(default_factory=_Notes)
    claimed: _Notes = field(default_factory=_Notes)
    # Claims from before a member told the frontier: offset, first, next; None afterwards.
    claims: list[tuple[int, int, int]] | None = field(default_factory=list)


class RangeLog:
    """A group's claims on one topic after the records that were applied, in log order."""

    def __init__(
        self, group: str, topic: str, interval_s: float, *, since_s: float | None = None
    ) -> None:
        """``since_s``: the broker's time since when all is read; None: from the beginning."""
        self.group = group
        self.topic = topic
        self._stale_ms = round(2000 * interval_s)
        self._since_ms = None if since_s is None else round(since_s * 1000)
        self._clock = LogClock()
        self._places: dict[int, _PartitionClaims] = {}
        self._begin = -1
        self.next_offset = 0

    def apply(self, record: RangeRecord | None, *, offset: int, broker_time_s: float) -> bool:
        """Fold a record; whether it was a RangeDone that ended something (RC8)."""
        self._clock.advance(max(0, round(broker_time_s * 1000)))  # RC1
        self.next_offset = offset + 1
        self._begin = offset if self._begin < 0 else self._begin
        if record is None or (record.group, record.topic) != (self.group, self.topic):
            return False
        place = self._places.setdefault(record.partition, _PartitionClaims())
        owner = (record.client, record.instance)
        if self._since_ms is not None:
            self._hear_frontier(place, record)
        if record.type is RangeType.CLAIM:
            self._claim(place, record, owner, offset)
        elif record.type is RangeType.BEAT:
            self._beat(place, record, owner, offset)
        elif record.type is RangeType.FREE:
            self._free(place, record, owner, offset)
        else:
            return self._done(place, record, owner, offset)
        return False

    # ---- views

    @property
    def is_warm(self) -> bool:
        """Return whether every living range is known (RC3)."""
        if self._since_ms is None:
            return True
        return self._clock.now_ms - self._since_ms >= self._stale_ms

    def frontier(self, partition: int) -> int:
        """Return the first offset that nobody has claimed; -1: nobody has claimed anything."""
        place = self._places.get(partition)
        return -1 if place is None else place.frontier

    def position(self, partition: int) -> int:
        """Return the first offset that is not done (RC5); -1: nothing is known."""
        place = self._places.get(partition)
        if place is None:
            return -1
        return min((each.first for each in place.ranges.values()), default=place.frontier)

    @property
    def partitions(self) -> list[int]:
        return sorted(self._places)

    def open_ranges(self, partition: int) -> list[HeldRange]:
        place = self._places.get(partition)
        return [] if place is None else sorted(place.ranges.values(), key=lambda each: each.first)

    def age_s(self, each: HeldRange, *, now_s: float) -> float:
        """Return how long a range's owner is silent at the broker's ``now_s``."""
        return max(0, self._clock.at(now_s) - each.beat_ms) / 1000

    def is_open(self, partition: int, first: int, end: int) -> bool:
        ranges = self.open_ranges(partition)
        return any(each.first < end and first < each.next for each in ranges)

    def held(self, partition: int, instance: str) -> list[HeldRange]:
        found = self.open_ranges(partition)
        return [each for each in found if each.owner[1] == instance and not each.is_free]

    def abandoned(self, partition: int, *, now_s: float) -> list[HeldRange]:
        """Return what was freed, or whose owner is silent at the broker's ``now_s``."""
        now_ms = self._clock.at(now_s)
        return [
            each
            for each in self.open_ranges(partition)
            if each.is_free or now_ms - each.beat_ms >= self._stale_ms
        ]

    def untold(self, partition: int, *, now_s: float) -> list[HeldRange]:
        """Return what is abandoned, and no record has told so for an interval (RC4)."""
        now_ms = self._clock.at(now_s)
        return [
            each
            for each in self.abandoned(partition, now_s=now_s)
            if now_ms - max(each.beat_ms, each.told_ms) >= self._stale_ms // 2
        ]

    def check(self) -> None:
        """Assert the invariants: ranges do not overlap, and lie before the frontier."""
        for place in self._places.values():
            end = 0
            for first in sorted(place.ranges):
                each = place.ranges[first]
                assert first == each.first < each.next, "a range has a length"
                assert each.first >= end, "ranges do not overlap"
                end = each.next
            assert not place.ranges or end <= place.frontier, "what is claimed is no frontier"

    # ---- rules

    def _claim(self, place: _PartitionClaims, record: RangeRecord, owner: _Owner, at: int) -> None:
        """Fold a claim (RC2)."""
        known = place.ranges.get(record.first)
        if not self.is_warm or not 0 < record.next - record.first <= MAX_RANGE:
            if known is not None and known.is_free and known.next == record.next:
                # It may be theirs: a beat or its end names its owner.
                known.is_hearsay = True
                known.unsure_at = at
            elif known is None:
                self._claimed_unjudged(place, record, at)
            return
        if known is not None:
            if known.next != record.next or self._is_held(known):
                return
        elif place.frontier not in (-1, record.first) or len(place.ranges) >= MAX_RANGES:
            self._note(place.claimed, record.first, at)
            return
        place.ranges[record.first] = HeldRange(
            record.first, record.next, owner, at, self._clock.now_ms
        )
        place.frontier = max(place.frontier, record.next)

    def _claimed_unjudged(self, place: _PartitionClaims, record: RangeRecord, at: int) -> None:
        """Fold a claim while not all is known (RC3): others tell whether it was accepted."""
        if not 0 < record.next - record.first <= MAX_RANGE:
            return
        self._note(place.claimed, record.first, at)
        if place.claims is None:
            place.frontier = record.next if place.frontier == record.first else place.frontier
        elif len(place.claims) < MAX_RANGES:
            place.claims.append((at, record.first, record.next))

    def _beat(self, place: _PartitionClaims, record: RangeRecord, owner: _Owner, at: int) -> None:
        """Fold a heartbeat (RC3)."""
        known = place.ranges.get(record.first)
        if known is not None and self._is_of(known, record, owner):
            self._belongs(known, record, owner)
        elif record.next > record.first:
            if not self._was_claimed_before(place, record):
                return
            is_known = place.claimed.are_known_to(record)
            place.ranges[record.first] = HeldRange(
                record.first, record.next, owner, at, self._clock.now_ms,
                is_hearsay=not is_known, unsure_at=at,
            )  # fmt: skip
        place.frontier = max(place.frontier, record.frontier or -1, record.next or -1)

    def _free(self, place: _PartitionClaims, record: RangeRecord, owner: _Owner, at: int) -> None:
        """Fold what is told of a range that nobody holds (RC4)."""
        now_ms, known = self._clock.now_ms, place.ranges.get(record.first)
        if known is not None and self._is_of(known, record, owner):
            known.is_free = True
            known.told_ms = now_ms
        elif known is not None and known.next == record.next and not self._is_held(known):
            known.told_ms = now_ms
        elif known is None and self._was_claimed_before(place, record):
            # Else the client that claimed it may hold it.
            is_known = place.claimed.are_known_to(record)
            place.ranges[record.first] = HeldRange(
                record.first, record.next, owner, at, now_ms, is_free=is_known, told_ms=now_ms,
                is_hearsay=True, unsure_at=record.seen if is_known else at,
            )  # fmt: skip
            place.frontier = max(place.frontier, record.next)

    def _done(self, place: _PartitionClaims, record: RangeRecord, owner: _Owner, at: int) -> bool:
        """Fold the end of a range, or of its beginning; False: it ends nothing (RC4)."""
        known = place.ranges.get(record.first)
        if known is None:
            self._note(place.ended, record.first, at)
        is_of = known is not None and (known.owner == owner or known.is_hearsay)
        if known is None or not is_of or not known.first < record.next <= known.next:
            return False
        del place.ranges[record.first]
        self._note(place.ended, record.first, at)
        if record.next < known.next and self._is_sure(known, record):
            known.first = record.next
            self._belongs(known, record, owner)
            place.ranges[known.first] = known
        return True

    def _is_of(self, known: HeldRange, record: RangeRecord, owner: _Owner) -> bool:
        is_theirs = known.owner == owner or known.is_hearsay
        return is_theirs and known.next == record.next

    def _is_sure(self, known: HeldRange, record: RangeRecord) -> bool:
        """Return whether its sender had read the claim that made this its owner."""
        return not known.is_hearsay or record.seen > known.unsure_at

    def _belongs(self, known: HeldRange, record: RangeRecord, owner: _Owner) -> None:
        """Its owner lives, so it is not free, whatever was told of it."""
        if known.is_hearsay:
            known.is_hearsay = not self._is_sure(known, record)
            known.owner = owner
            known.is_free = False
        known.beat_ms = self._clock.now_ms

    def _note(self, notes: _Notes, first: int, at: int) -> None:
        if self._since_ms is not None:
            notes.add(first, at, self._clock.now_ms, self._stale_ms)

    def _was_claimed_before(self, place: _PartitionClaims, record: RangeRecord) -> bool:
        """Return whether a range that is unknown here was claimed before this reader began."""
        return (
            self._since_ms is not None
            and 0 < record.next - record.first <= MAX_RANGE
            and not any(
                each.first < record.next and record.first < each.next
                for each in place.ranges.values()
            )
            and len(place.ranges) < MAX_RANGES
            and record.seen >= self._begin  # RC4
            and place.ended.are_known_to(record)
        )

    def _hear_frontier(self, place: _PartitionClaims, record: RangeRecord) -> None:
        """The frontier only rises (RC3). 0: its sender knows of no claim either.

        The first sender that had read all before this reader's first record says where the frontier
        was at ``seen``. Of the claims behind that, those that begin at the frontier were accepted.
        """
        frontier = record.frontier or -1
        if place.claims is not None and record.seen >= max(0, self._begin):
            for at, first, next_ in place.claims:
                if at >= record.seen and first == frontier:
                    frontier = next_
            place.claims = None
        place.frontier = max(place.frontier, frontier)

    def _is_held(self, known: HeldRange) -> bool:
        return not known.is_free and self._clock.now_ms - known.beat_ms < self._stale_ms


@dataclass(slots=True)
class RangeWrite:
    record: RangeRecord
    sent_ms: int
    offset: int = -1
    # Whether it is a RangeDone that was read back and ended its range (RC8).
    has_ended: bool = False


class RangeMember:
    """One client of one group on one topic; its owner applies every record to ``log``."""

    def __init__(
        self, log: RangeLog, *, client: str, instance: str, size: int, ahead: int, interval_ms: int
    ) -> None:
        self._log = log
        self._ids = (client, instance)
        self._size = size
        self._ahead = ahead
        self._interval_ms = interval_ms
        self._next_beat_ms = -(2**62)
        self._pending: list[RangeWrite] = []
        self._confirmed_ms: dict[OffsetRange, int] = {}
        self._is_leaving = False

    def held(self, partitions: Sequence[int]) -> list[tuple[int, HeldRange]]:
        instance = self._ids[1]
        return [
            (partition, each)
            for partition in partitions
            for each in self._log.held(partition, instance)
        ]

    def is_live(self, partition: int, each: HeldRange, monotonic_ms: int) -> bool:
        """Return whether it may be worked on at this moment (RC7)."""
        since_ms = self._confirmed_ms.get((partition, each.first, each.next))
        return since_ms is not None and monotonic_ms < since_ms + self._interval_ms

    def leave(self) -> None:
        self._is_leaving = True

    def on_written(self, write: RangeWrite, offset: int) -> None:
        write.offset = offset
        if offset < 0 and write in self._pending:
            self._pending.remove(write)

    def on_ended(self, record: RangeRecord) -> None:
        """The log has this RangeDone, which ended something: maybe one of this member (RC8)."""
        for write in self._pending:
            ours = write.record
            if (ours.instance, ours.type) == (record.instance, record.type) and (
                (ours.partition, ours.first, ours.next)
                == (record.partition, record.first, record.next)
            ):
                write.has_ended = True

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
        writes: list[RangeWrite] = []
        held = self.held(list(ends))
        if monotonic_ms >= self._next_beat_ms:
            self._next_beat_ms = monotonic_ms + self._interval_ms // 3
            writes += self._beats(held, list(ends), monotonic_ms, now_s)
        claims = sum(each.record.type is RangeType.CLAIM for each in self._pending)
        if not claims and not self._is_leaving and self._log.is_warm:
            for place in self._wanted(held, now_s, ends, bases):
                writes.append(self._write(RangeType.CLAIM, *place, monotonic_ms))
        self._pending += writes
        return writes

    def _wanted(
        self,
        held: Sequence[tuple[int, HeldRange]],
        now_s: float,
        ends: Mapping[int, int],
        bases: Mapping[int, int],
    ) -> list[OffsetRange]:
        """Choose what to claim (RC6)."""
        most = self._ahead + 1
        busy = sum(each.first < ends[partition] for partition, each in held)
        if busy >= most:
            return []
        free = self._free(now_s, ends, bases)
        # Full ranges come first.
        full = sum(first < ends[partition] for partition, first, _ in free)
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
                yield self._write(RangeType.BEAT, partition, first, next_, monotonic_ms)

    def tell(
        self, partitions: Sequence[int], monotonic_ms: int, now_s: float
    ) -> Iterator[RangeWrite]:
        """Tell what is abandoned, unless a record told so lately (RC4)."""
        if not self._log.is_warm:
            # It may be held by a member that was not heard yet.
            return
        for partition in partitions:
            for each in self._log.untold(partition, now_s=now_s):
                place = (partition, each.first, each.next)
                yield self._write(RangeType.FREE, *place, monotonic_ms)

    def end(self, type: RangeType, place: OffsetRange, monotonic_ms: int) -> RangeWrite:
        write = self._write(type, *place, monotonic_ms)
        self._pending.append(write)
        return write

    def _free(
        self, now_s: float, ends: Mapping[int, int], bases: Mapping[int, int]
    ) -> list[OffsetRange]:
        """List the ranges that may be claimed, in the order of RC6."""
        abandoned: list[OffsetRange] = []
        fresh: list[OffsetRange] = []
        for partition, end in ends.items():
            left = self._log.abandoned(partition, now_s=now_s)
            abandoned += [(partition, each.first, each.next) for each in left]
            frontier = self._log.frontier(partition)
            first = bases.get(partition, 0) if frontier < 0 else frontier
            while first <= end and len(fresh) <= self._ahead:
                fresh.append((partition, first, first + self._size))
                first += self._size
                if frontier < 0:
                    # RC2 takes any first claim: no second one goes before it is read back.
                    break
        return sorted(abandoned + fresh, key=lambda place: place[1] >= ends[place[0]])

    def _write(
        self, type: RangeType, partition: int, first: int, next: int, sent_ms: int
    ) -> RangeWrite:
        client, instance = self._ids
        record = RangeRecord(
            type,
            instance=instance,
            client=client,
            group=self._log.group,
            topic=self._log.topic,
            partition=partition,
            first=first,
            next=next,
            frontier=max(0, self._log.frontier(partition)),
            seen=self._log.next_offset,
        )
        return RangeWrite(record, sent_ms)
