"""A plan as rows, one for each message, without a value for each of them (R16, R32)."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from operator import attrgetter

from kafkamq.markers.rules.delivery import Carry, Settle, each_message, row_order
from kafkamq.markers.rules.hold import PAGE_BITS, lowest

_start_offset = attrgetter("start_offset")


class Rows:
    """All messages of a plan in their order: START offset, log, partition, offset.

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
        """The actions of these rows (half-open); the first and the last one may be cut."""
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
    """How many messages it is about."""
    return action.bits.bit_count()


def cut(action: Settle | Carry, begin: int, end: int = PAGE_BITS) -> Settle | Carry:
    """The same of these messages of it only (half-open, one at least)."""
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
