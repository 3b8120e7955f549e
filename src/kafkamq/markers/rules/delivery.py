"""What is to be done for due messages (R14), and a plan of it as rows, one a message (R16, R32)."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate, groupby
from operator import attrgetter
from typing import ClassVar

from kafkamq.markers.rules.hold import CAUSE_SHIFT, DUE, PAGE_BITS, Hold, Leaf, lowest
from kafkamq.types import DeadLetterReason, Marker, MessageId


class DueCause(IntEnum):
    # There was no sign of life for the redelivery timeout.
    LEASE_ENDED = 0
    # It was held longer than ``max_lease``, whatever renewed it.
    MAX_LEASE = 1
    NACKED = 2
    RELEASED = 3
    REJECTED = 4
    SCHEDULED = 5
    # Its START came behind its END: it gets another END, and no copy (R12).
    ALREADY_ENDED = 6


@dataclass(slots=True)
class Settle:
    """Ask the shell to settle due messages of one START: copies or dead letters, and ENDs (R15).

    Bit i of ``bits`` is the message at ``message_id.offset + i``; bit 0 is set, and all lie in one
    page of 64 offsets (R32). ``verdict_offset`` is the marker offset of the END that carries a
    reason, -1 when there is none. Times are of the partition's log clock.
    """

    start_offset: int
    message_id: MessageId
    of_schedule: bool
    cause: DueCause
    begin_ms: int
    clock_ms: int
    deadline_ms: int
    verdict_offset: int
    bits: int = 1


@dataclass(slots=True)
class Carry:
    """Ask the shell to append a SCHEDULE again with what remains of its delay (R19)."""

    start_offset: int
    message_id: MessageId
    remaining_ms: int
    # It is of one message, as a Settle may be.
    bits: ClassVar[int] = 1
    of_schedule: ClassVar[bool] = True
    verdict_offset: ClassVar[int] = -1


def action_of(leaf: Leaf, page: int, hold: Hold, now_ms: int) -> Settle | Carry:
    """Get a copy of what is to be done for a hold of this page, at this moment of its log clock."""
    of_schedule, topic_id, leader_epoch, partition = leaf.log.key
    at = (hold.bits & -hold.bits).bit_length() - 1
    message_id = MessageId(partition, page * PAGE_BITS + at, topic_id, leader_epoch)
    if not hold.flags & DUE:
        return Carry(hold.start_offset, message_id, max(0, hold.deadline_ms - now_ms))
    return Settle(
        hold.start_offset,
        message_id,
        of_schedule,
        DueCause(hold.flags >> CAUSE_SHIFT),
        hold.begin_ms,
        now_ms,
        hold.deadline_ms,
        hold.verdict_offset,
        hold.bits >> at,
    )


def each_message(actions: Iterable[Settle | Carry]) -> list[Settle | Carry]:
    found: list[Settle | Carry] = []
    for action in actions:
        if isinstance(action, Carry) or action.bits == 1:
            found.append(action)
            continue
        first, bits = action.message_id, action.bits
        while bits:
            at = (bits & -bits).bit_length() - 1
            bits &= bits - 1
            message_id = replace(first, offset=first.offset + at)
            found.append(replace(action, message_id=message_id, bits=1))
    return found


def settled_of(
    actions: Sequence[Settle | Carry], left: Iterable[Settle | Carry]
) -> Iterator[tuple[Settle, int]]:
    """Settles of a plan, each with how many of its messages are not among the actions ``left``."""
    remaining: Counter[int] = Counter()
    for row in left:
        remaining[row.start_offset] += row.bits.bit_count()
    # The action was cut at its end.
    for action in reversed(actions):
        if isinstance(action, Settle):
            count = action.bits.bit_count()
            cut = min(count, remaining[action.start_offset])
            remaining[action.start_offset] -= cut
            if count > cut:
                yield action, count - cut


def row_order(action: Settle | Carry) -> tuple[int, bytes, int, int, int]:
    """Return its place among the rows of a settlement (R32): START offset, log and chunk, bits."""
    of = action.message_id
    return action.start_offset, of.topic_id, of.leader_epoch, of.partition, of.offset


_start_offset = attrgetter("start_offset")


class Rows:
    """All messages of a plan in their order, without a value for each of them.

    A transaction may end behind any of them, so an action may have to be cut.
    """

    def __init__(self, actions: Iterable[Settle | Carry]) -> None:
        ordered = sorted(actions, key=row_order)
        self._actions: list[Settle | Carry] = []
        for _, group in groupby(ordered, key=_start_offset):
            self._actions += _untangled(list(group))
        self._ends = list(accumulate(map(size_of, self._actions)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def part(self, begin: int, end: int | None = None) -> Sequence[Settle | Carry]:
        """Return the actions of these rows (half-open); the first and the last one may be cut."""
        end = len(self) if end is None else min(end, len(self))
        if begin >= end:
            return ()
        first, last = bisect_right(self._ends, begin), bisect_right(self._ends, end - 1)
        found = self._actions[first : last + 1]
        found[-1] = cut(found[-1], 0, size_of(found[-1]) - self._ends[last] + end)
        begin_of_first = self._ends[first] - size_of(self._actions[first])
        found[0] = cut(found[0], begin - begin_of_first)
        return found


def size_of(action: Settle | Carry) -> int:
    return action.bits.bit_count()


def cut(action: Settle | Carry, begin: int, end: int = PAGE_BITS) -> Settle | Carry:
    """Return this action for these of its messages only (half-open, one at least)."""
    if isinstance(action, Carry) or (begin == 0 and end >= action.bits.bit_count()):
        return action
    kept = lowest(action.bits, end)
    bits = kept ^ lowest(kept, begin)
    at = (bits & -bits).bit_length() - 1
    first = replace(action.message_id, offset=action.message_id.offset + at)
    return replace(action, message_id=first, bits=bits >> at)


def _untangled(actions: list[Settle | Carry]) -> list[Settle | Carry]:
    """Actions of one START. Messages of two of one page may alternate: an action for each then."""
    if len(actions) == 1:
        return actions
    shared = Counter(map(_page, actions))
    if len(shared) == len(actions):
        return actions
    tangled = [each for each in actions if shared[_page(each)] > 1]
    others = [each for each in actions if shared[_page(each)] == 1]
    return sorted([*each_message(tangled), *others], key=row_order)


def _page(action: Settle | Carry) -> tuple[int, int, tuple[bytes, int]]:
    of = action.message_id
    return of.partition, of.offset // PAGE_BITS, of.log


@dataclass(slots=True)
class Copy:
    delivery_count: int


@dataclass(slots=True)
class DeadLetter:
    reason: DeadLetterReason
    error: str = ""


def decide(
    settle: Settle, start: Marker, *, start_timestamp_ms: int, max_deliveries: int, error: str = ""
) -> Copy | DeadLetter:
    """Return what to do with a due message, judged on its START or SCHEDULE (R14, R18).

    Args:
        settle: The action of the tracker.
        start: The marker at ``settle.start_offset``.
        start_timestamp_ms: That marker's broker timestamp.
        max_deliveries: For STARTs that name no limit of their own.
        error: Reason text of the END at ``settle.verdict_offset``; empty when there is none.
    """
    expires_at_ms = start.expires_at_ms
    if expires_at_ms:
        # Negative: it had expired when it was STARTed (R10).
        left_ms = expires_at_ms - start_timestamp_ms
        if left_ms < 0 or (
            settle.cause is not DueCause.REJECTED and settle.clock_ms > settle.begin_ms + left_ms
        ):
            return DeadLetter(DeadLetterReason.EXPIRED, error)
    if settle.cause is DueCause.REJECTED:
        return DeadLetter(DeadLetterReason.REJECTED, error)
    if settle.of_schedule:
        return Copy(1)
    delivery_count = max(1, start.delivery_count)
    if settle.cause is DueCause.RELEASED:
        return Copy(delivery_count)
    if delivery_count >= (start.max_deliveries or max_deliveries):
        if settle.cause is DueCause.MAX_LEASE:
            return DeadLetter(DeadLetterReason.MAX_LEASE, error)
        return DeadLetter(DeadLetterReason.MAX_DELIVERIES, error)
    return Copy(delivery_count + 1)
