"""Which offsets of one partition are done: what may be committed, and the holes beyond it; pure.

A tracker lives as long as one assignment of the partition. It knows the *open* offsets: polled and
not done. What is neither open nor still to be polled is done, or does not exist (compaction,
transaction markers), which is the same; so memory goes by what is open, however much was done
beyond the first of them.

Rules:

- Only what lies before the first open offset is committed; what is done beyond it goes into the
  map, and the next owner of the partition does not repeat it.
- What was polled once is not accepted a second time.
- A map holds from the committed offset on. A hole of it that a poll passes without a record has
  vanished from the log. A first poll below the committed offset is another log, or another
  position, than the map was made for: all of the map is dropped, and everything is done again.

The caller serialises.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import lt

from kafkamq.errors import StateError


@dataclass(frozen=True, slots=True)
class Progress:
    committable_offset: int
    # The last offset of the map; at least ``committable_offset`` - 1.
    highest_succeeded: int
    incompletes: tuple[int, ...]
    version: int

    @property
    def needs_map(self) -> bool:
        """Return whether something is done beyond ``committable_offset``; if not, the offset says
        all.

        At offset 0 the format has no map that says "nothing is done": it would be -1's.
        """
        return self.highest_succeeded >= self.committable_offset


class OffsetTracker:
    """The open offsets of a partition from the committed one on.

    Args:
        base: The committed offset, or where reading begins without one.
        highest_seen: The end of the map that was committed with it; below ``base``: no map.
        incompletes: The open offsets of that map, in order.
    """

    def __init__(
        self, base: int, *, highest_seen: int = -1, incompletes: Sequence[int] = ()
    ) -> None:
        _require_order(incompletes)
        if incompletes and not base <= incompletes[0] <= incompletes[-1] <= highest_seen:
            raise StateError(f"a map from {base} to {highest_seen} has holes outside")
        self.next_offset = base
        self._has_polled = False
        # Holes of the map that were not polled yet: open already, as they are not done.
        self._restored = deque(incompletes)
        self._map_end = max(highest_seen + 1, base)
        # The highest offset that is done; the one before the base when none is.
        self.highest_succeeded = self._map_end - 1
        # In order: restored holes first, then what was polled behind the map.
        self._open: dict[int, None] = dict.fromkeys(incompletes)
        # It changes with everything that may be committed.
        self.version = 0

    # Views.

    @property
    def open_count(self) -> int:
        """Return offsets polled and not done: what the owner holds in memory."""
        return len(self._open) - len(self._restored)

    def committable_offset(self) -> int:
        return min(next(iter(self._open), self.next_offset), self.next_offset)

    def first_open(self) -> int | None:
        """Return the record that holds the committable offset back; None: there is none."""
        offset = next(iter(self._open), self.next_offset)
        return offset if offset < self.next_offset else None

    def progress(self) -> Progress:
        """Return what to commit now; time by what is open."""
        committable = self.committable_offset()
        highest = max(self.highest_succeeded, committable - 1)
        holes = tuple(self._open)
        return Progress(committable, highest, holes[: bisect_right(holes, highest)], self.version)

    def is_open(self, offset: int) -> bool:
        return offset < self.next_offset and offset in self._open

    # Facts.

    def add(self, offsets: Sequence[int]) -> Sequence[int]:
        """Note what was polled, in order. Returns what of it is to be done.

        That is ``offsets`` itself when all of it is.

        Raises:
            StateError: the offsets are not in order; nothing was noted.
        """
        if not offsets:
            return offsets
        _require_order(offsets)
        self.version += 1
        if offsets[0] < self.next_offset or self.next_offset < self._map_end:
            return self._add_into_map(offsets)
        self._has_polled = True
        self._open.update(dict.fromkeys(offsets))
        self.next_offset = offsets[-1] + 1
        return offsets

    def advance(self, position: int) -> None:
        """The consumer's position is there: what lies before it and was not polled is no record."""
        if position <= self.next_offset:
            return
        self.version += 1
        self._has_polled = True
        self._pass(position, frozenset())

    def complete(self, offsets: Sequence[int]) -> None:
        """These are done; what is not open is ignored."""
        if not offsets:
            return
        highest = max(offsets)
        if highest >= self.next_offset:
            self.complete([offset for offset in offsets if offset < self.next_offset])
            return
        self.version += 1
        forget = self._open.pop
        for offset in offsets:
            forget(offset, None)
        if highest > self.highest_succeeded:
            self.highest_succeeded = highest

    def check(self) -> None:
        keys = list(self._open)
        assert keys == sorted(keys), "open offsets are in order"
        restored = list(self._restored)
        unpolled = [offset for offset in keys if offset >= self.next_offset]
        assert unpolled == restored, "only holes of the map are open before they are polled"
        assert not restored or restored[-1] < self._map_end
        assert self.highest_succeeded < max(self.next_offset, self._map_end)
        assert self.committable_offset() <= self.next_offset

    def _add_into_map(self, offsets: Sequence[int]) -> Sequence[int]:
        if not self._has_polled and offsets[0] < self.next_offset:
            self._drop_map(offsets[0])
        self._has_polled = True
        fresh = [offset for offset in offsets if offset >= self.next_offset]
        if not fresh:
            return fresh
        known, end = self._open, self._map_end
        wanted = [offset for offset in fresh if offset >= end or offset in known]
        self._pass(fresh[-1] + 1, frozenset(fresh))
        self._open.update(dict.fromkeys(wanted))
        return wanted

    def _pass(self, position: int, polled: frozenset[int]) -> None:
        """Move on to ``position``; holes before it that are not in ``polled`` have vanished."""
        restored = self._restored
        while restored and restored[0] < position:
            hole = restored.popleft()
            if hole not in polled:
                del self._open[hole]
        self.next_offset = position

    def _drop_map(self, position: int) -> None:
        self.next_offset = self._map_end = position
        self.highest_succeeded = position - 1
        self._restored.clear()
        self._open.clear()


def _require_order(offsets: Sequence[int]) -> None:
    if not all(map(lt, offsets, islice(offsets, 1, None))):
        raise StateError("offsets of one partition must ascend")
