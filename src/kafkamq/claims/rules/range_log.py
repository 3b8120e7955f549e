"""Claims of offset ranges: several members share one partition, and claim what comes next ahead.

One log orders all claims; its fold says who holds which range:

- RC1 Time is log time, as in S1: no sender's clock takes part.
- RC2 A ClaimRange is accepted when it begins at the frontier, the first offset that nobody has
  claimed, which moves to its end; or when it is exactly a range that was freed, or whose owner was
  last heard two intervals ago or more. So ranges never overlap. Its offset is the token. The first
  claim may begin anywhere, so no member writes a second one before it has read a first one.
- RC3 A RangeBeat renews the sender's range and tells its frontier. Everybody who takes part beats,
  with a range or without, so that a reader that starts in the middle of the log knows, two
  intervals later, every living range and the frontier; before that it accepts nothing.
- RC4 A RangeDone of the owner ends its range up to ``next``; RangeFree gives the rest to anybody.
  Members repeat the RangeFree of what is abandoned, whoever owned it: a reader that starts in the
  middle learns of it only so. Such a range it takes for free until a beat names its owner.
  The sender of a record may have read less of the log than its reader: the record says how far
  (``seen``). What it tells of a range that the reader does not know counts only if the sender had
  read all that stands before the reader's first record, and every RangeDone of that range. If the
  sender had not read a later ClaimRange of it, the claimer may hold the range: then it is not free.
- RC5 The position is the first offset that is not done: what a restart of the whole group needs.

Source: Marshal PROTOCOL.md, "TODO" (an idea there, without rules).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kafkamq.queue.rules.log_clock import LogClock
from kafkamq.types import RangeRecord, RangeType

MAX_RANGES = 10_000  # of one partition that are not done; more are refused
MAX_RANGE = 10_000_000  # offsets

_Owner = tuple[str, str]


@dataclass(slots=True)
class HeldRange:
    """A range that was claimed and is not done."""

    first: int
    next: int
    owner: _Owner  # client, instance
    token: int  # where its claim stands in the log
    beat_ms: int
    is_free: bool = False
    told_ms: int = 0  # when it was last told that it is free
    # Its owner is not known: this reader has not read, or not judged, the claim. A record of a
    # member that has read further than ``unsure_at`` names the owner.
    is_hearsay: bool = False
    unsure_at: int = -1


class _Notes:
    """By range, the offset of its last record of one type, such as RangeDone.

    A sender that had not read this record tells of the range as it was before. Records
    older than two intervals are forgotten; a sender that had not read so far is not believed.
    """

    def __init__(self) -> None:
        # By the range's first offset: the record's offset, and when it came; oldest first.
        self._noted: dict[int, tuple[int, int]] = {}
        self._horizon = 0  # records before this offset may be forgotten

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
        """Whether the sender had read what is noted of the range, or does not say how far."""
        noted_at, _ = self._noted.get(record.first, (-1, 0))
        return record.seen < 0 or (record.seen >= self._horizon and record.seen > noted_at)


@dataclass(slots=True)
class _Place:
    """One partition; ``frontier`` is -1 while no record has told it."""

    frontier: int = -1
    ranges: dict[int, HeldRange] = field(default_factory=dict)  # by their first offset
    ended: _Notes = field(default_factory=_Notes)  # RangeDone
    claimed: _Notes = field(default_factory=_Notes)  # ClaimRange of unknown ranges
    # Claims from before a member told the frontier: offset, first, next; None afterwards.
    claims: list[tuple[int, int, int]] | None = field(default_factory=list)


class RangeLog:
    """State of all range claims after the records that were applied, in log order."""

    def __init__(self, interval_s: float, *, since_s: float | None = None) -> None:
        self._stale_ms = round(2000 * interval_s)
        self._since_ms = None if since_s is None else round(since_s * 1000)
        self._clock = LogClock()
        self._places: dict[tuple[str, str, int], _Place] = {}
        self._begin = -1  # the first offset that was read
        self.next_offset = 0
        self.refused = 0
        self.ignored = 0

    def apply(self, record: RangeRecord | None, *, offset: int, broker_time_s: float) -> None:
        self._clock.advance(max(0, round(broker_time_s * 1000)))  # RC1
        self.next_offset = offset + 1
        self._begin = offset if self._begin < 0 else self._begin
        if record is None:
            return
        place = self._places.setdefault((record.group, record.topic, record.partition), _Place())
        owner = (record.client, record.instance)
        if self._since_ms is not None:
            self._hear_frontier(place, record)
        if record.type is RangeType.CLAIM:
            self.refused += not self._claim(place, record, owner, offset)
        elif record.type is RangeType.BEAT:
            self._beat(place, record, owner, offset)
        elif record.type is RangeType.FREE:
            self._free(place, record, owner, offset)
        else:
            self._done(place, record, owner, offset)

    # ---- views

    @property
    def is_warm(self) -> bool:
        """RC3: every living range is known."""
        if self._since_ms is None:
            return True
        return self._clock.now_ms - self._since_ms >= self._stale_ms

    def frontier(self, group: str, topic: str, partition: int) -> int:
        """The first offset that nobody has claimed; -1: nobody has claimed anything."""
        place = self._places.get((group, topic, partition))
        return -1 if place is None else place.frontier

    def position(self, group: str, topic: str, partition: int) -> int:
        """RC5: the first offset that is not done; -1: nothing is known."""
        place = self._places.get((group, topic, partition))
        if place is None:
            return -1
        return min((each.first for each in place.ranges.values()), default=place.frontier)

    def is_open(self, group: str, topic: str, partition: int, first: int, end: int) -> bool:
        """Whether a range that is not done has one of these offsets."""
        place = self._places.get((group, topic, partition))
        ranges = () if place is None else place.ranges.values()
        return any(each.first < end and first < each.next for each in ranges)

    def held(self, group: str, topic: str, partition: int, instance: str) -> list[HeldRange]:
        place = self._places.get((group, topic, partition))
        found = [] if place is None else list(place.ranges.values())
        mine = (each for each in found if each.owner[1] == instance and not each.is_free)
        return sorted(mine, key=lambda each: each.first)

    def abandoned(self, group: str, topic: str, partition: int, *, now_s: float) -> list[HeldRange]:
        """What was freed, or whose owner is silent at the broker's ``now_s``."""
        place = self._places.get((group, topic, partition))
        found = [] if place is None else list(place.ranges.values())
        now_ms = self._now_ms(now_s)
        return sorted(
            (each for each in found if each.is_free or now_ms - each.beat_ms >= self._stale_ms),
            key=lambda each: each.first,
        )

    def untold(self, group: str, topic: str, partition: int, *, now_s: float) -> list[HeldRange]:
        """RC4: what is abandoned, and nobody said so for an interval."""
        now_ms = self._now_ms(now_s)
        return [
            each
            for each in self.abandoned(group, topic, partition, now_s=now_s)
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

    def _claim(self, place: _Place, record: RangeRecord, owner: _Owner, at: int) -> bool:
        """RC2."""
        known = place.ranges.get(record.first)
        if not self.is_warm or not 0 < record.next - record.first <= MAX_RANGE:
            if known is not None and known.is_free and known.next == record.next:
                known.is_hearsay = True  # it may be theirs: a beat or its end names its owner
                known.unsure_at = at
            elif known is None:
                self._claimed_unjudged(place, record, at)
            return False
        if known is not None:
            if known.next != record.next or self._is_held(known):
                return False
        elif place.frontier not in (-1, record.first) or len(place.ranges) >= MAX_RANGES:
            self._note(place.claimed, record.first, at)
            return False
        place.ranges[record.first] = HeldRange(
            record.first, record.next, owner, at, self._clock.now_ms
        )
        place.frontier = max(place.frontier, record.next)
        return True

    def _claimed_unjudged(self, place: _Place, record: RangeRecord, at: int) -> None:
        """While not all is known (RC3): whether it was accepted is seen by what others tell."""
        if not 0 < record.next - record.first <= MAX_RANGE:
            return
        self._note(place.claimed, record.first, at)
        if place.claims is None:
            place.frontier = record.next if place.frontier == record.first else place.frontier
        elif len(place.claims) < MAX_RANGES:
            place.claims.append((at, record.first, record.next))

    def _beat(self, place: _Place, record: RangeRecord, owner: _Owner, at: int) -> None:
        """RC3."""
        known = place.ranges.get(record.first)
        if known is not None and self._is_of(known, record, owner):
            self._belongs(known, record, owner)
        elif record.next > record.first:
            if not self._was_claimed_before(place, record):
                self.ignored += 1
                return
            is_known = place.claimed.are_known_to(record)
            place.ranges[record.first] = HeldRange(
                record.first, record.next, owner, at, self._clock.now_ms,
                is_hearsay=not is_known, unsure_at=at,
            )  # fmt: skip
        place.frontier = max(place.frontier, record.frontier or -1, record.next or -1)

    def _free(self, place: _Place, record: RangeRecord, owner: _Owner, at: int) -> None:
        """RC4."""
        now_ms, known = self._clock.now_ms, place.ranges.get(record.first)
        if known is not None and self._is_of(known, record, owner):
            known.is_free = True
            known.told_ms = now_ms
        elif known is not None and known.next == record.next and not self._is_held(known):
            known.told_ms = now_ms
        elif known is None and self._was_claimed_before(place, record):
            is_known = place.claimed.are_known_to(record)  # else who claimed it may hold it
            place.ranges[record.first] = HeldRange(
                record.first, record.next, owner, at, now_ms, is_free=is_known, told_ms=now_ms,
                is_hearsay=True, unsure_at=record.seen if is_known else at,
            )  # fmt: skip
            place.frontier = max(place.frontier, record.next)
        else:
            self.ignored += 1

    def _done(self, place: _Place, record: RangeRecord, owner: _Owner, at: int) -> None:
        """RC4."""
        known = place.ranges.get(record.first)
        if known is None:
            self._note(place.ended, record.first, at)
        is_of = known is not None and (known.owner == owner or known.is_hearsay)
        if known is None or not is_of or not known.first < record.next <= known.next:
            self.ignored += 1
            return
        del place.ranges[record.first]
        self._note(place.ended, record.first, at)
        if record.next < known.next and self._is_sure(known, record):
            known.first = record.next
            self._belongs(known, record, owner)
            place.ranges[known.first] = known

    def _is_of(self, known: HeldRange, record: RangeRecord, owner: _Owner) -> bool:
        is_theirs = known.owner == owner or known.is_hearsay
        return is_theirs and known.next == record.next

    def _is_sure(self, known: HeldRange, record: RangeRecord) -> bool:
        """Whether its sender had read the claim that made this its owner."""
        return not known.is_hearsay or record.seen < 0 or record.seen > known.unsure_at

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

    def _was_claimed_before(self, place: _Place, record: RangeRecord) -> bool:
        """Whether a range that this reader does not know was claimed before it began to read."""
        return (
            self._since_ms is not None
            and 0 < record.next - record.first <= MAX_RANGE
            and not self._overlaps(place, record)
            and len(place.ranges) < MAX_RANGES
            and (record.seen < 0 or record.seen >= self._begin)  # RC4
            and place.ended.are_known_to(record)
        )

    def _hear_frontier(self, place: _Place, record: RangeRecord) -> None:
        """RC3: it only rises. 0: its sender knows of no claim either.

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

    def _overlaps(self, place: _Place, record: RangeRecord) -> bool:
        return any(
            each.first < record.next and record.first < each.next for each in place.ranges.values()
        )

    def _is_held(self, known: HeldRange) -> bool:
        return not known.is_free and self._clock.now_ms - known.beat_ms < self._stale_ms

    def _now_ms(self, now_s: float) -> int:
        if self._clock.last_ms < 0:
            return round(now_s * 1000)
        return self._clock.now_ms + max(0, round(now_s * 1000) - self._clock.last_ms)
