"""How long readers look for what brokers do not know, and wait for logs that do not answer.

A broker may lag behind the one that served a record. After a change of leaders a log ends earlier
for a while; metadata name fewer partitions, or the topic that had the name before. What was looked
for in vain for long enough is gone. A log that does not answer loses nothing, however long that is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass

GRACE_S = 60.0
"""How long something is looked for; a change of leaders takes less."""

_NEVER = 1 << 63  # an offset that no record has
_FIRST_WAIT_S = 3.0  # for a log that does not answer, while others could be read
_MAX_WAIT_S = 12.0
_REST_WAITS = 2  # it is left alone for so many times the last wait
_MEMORY_S = 60.0  # what nobody has looked for meanwhile is looked for anew
_CLEARING_S = 1.0
_MAX_KNOWN = 1000  # more than a lagging broker explains: somebody writes invented names


@dataclass(slots=True)
class _Search:
    offset: int
    began_s: float  # monotonic, both
    last_s: float
    is_over: bool = False  # and whoever asked has heard of it


class Patience:
    """What is looked for in vain, and since when; readers may share it. Thread-safe.

    A search is never dropped for another one while somebody asks for it: where there is no room, a
    name has no search yet, and waits for those before it.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self.grace_s = grace_s
        self._lock = threading.Lock()
        self._searches: dict[Hashable, list[_Search]] = {}
        self._count = 0
        self._cleared_s = -_CLEARING_S  # monotonic: when searches were looked through

    def is_over(self, where: Hashable, offset: int = 0, end: int = 0) -> bool:
        """Whether it was looked for in vain for long enough; the first call begins the search."""
        return self.over_from(where, offset, end) <= offset

    def over_from(self, where: Hashable, offset: int = 0, end: int = 0) -> int:
        """From which offset on all of a log was looked for in vain for long enough.

        A log that ended before an offset all the time has nothing behind that offset either.

        Args:
            where: A log; or anything else that a broker does not know.
            offset: What is looked for in it; the first call begins the search.
            end: Where the log ends now, at or before ``offset``.
        """
        now_s = time.monotonic()
        with self._lock:
            searches = self._keep(where, now_s, end)
            if not any(each.offset <= offset for each in searches):
                if self._count >= _MAX_KNOWN and now_s - self._cleared_s > _CLEARING_S:
                    self._make_room(now_s)
                    searches = self._searches.get(where, [])
                if self._count < _MAX_KNOWN:
                    self._count += 1
                    self._searches.setdefault(where, searches).append(_Search(offset, now_s, now_s))
            for each in searches:
                each.last_s = now_s
                each.is_over = now_s - each.began_s > self.grace_s
            over = [each.offset for each in searches if each.is_over]
            # Who waits without a grace needs no search for it.
            return offset if self.grace_s < 0 else min(over, default=_NEVER)

    def found(self, where: Hashable, end: int = _NEVER) -> None:
        """It is there, or a log's records before ``end`` are: searches for that have ended."""
        if where in self._searches:
            with self._lock:
                self._keep(where, time.monotonic(), end)

    def _keep(self, where: Hashable, now_s: float, end: int) -> list[_Search]:
        """The searches in a log that are still asked for, and for what it does not have."""
        before = self._searches.get(where, [])
        kept = [each for each in before if now_s - each.last_s < _MEMORY_S and each.offset >= end]
        self._count += len(kept) - len(before)
        if kept:
            self._searches[where] = kept
        else:
            self._searches.pop(where, None)
        return kept

    def _make_room(self, now_s: float) -> None:
        """Searches that are over, or that nobody asks for, go."""
        self._cleared_s = now_s
        for where in list(self._searches):
            if all(each.is_over for each in self._keep(where, now_s, 0)):
                self._count -= len(self._searches.pop(where, []))


class Answers:
    """Which logs a reader does not wait for now, as they did not answer; one owner thread.

    A wait is twice as long as the last one that was in vain, so that a log whose answers take long
    is read at last. It rests in between, so that most of the time is the other logs'.
    """

    def __init__(self) -> None:
        self._waits_s: dict[Hashable, float] = {}
        self._rest_until_s: dict[Hashable, float] = {}  # monotonic

    def is_resting(self, where: Hashable) -> bool:
        """Whether a log is not to be read yet."""
        return time.monotonic() < self._rest_until_s.get(where, 0.0)

    def is_given_up(self, where: Hashable, since_s: float) -> bool:
        """Whether a log that has not answered since then is waited for no more."""
        if time.monotonic() - since_s <= self._waits_s.get(where, _FIRST_WAIT_S):
            return False
        self.give_up(where)
        return True

    def give_up(self, where: Hashable) -> None:
        """A log has not answered, and is not waited for."""
        wait_s = self._waits_s.get(where, _FIRST_WAIT_S)
        self._waits_s[where] = min(2 * wait_s, _MAX_WAIT_S)
        self._rest_until_s[where] = time.monotonic() + _REST_WAITS * wait_s

    def came(self, where: Hashable, after_s: float) -> None:
        """A log has answered; one that took long is waited for as long the next time."""
        if self._waits_s and after_s <= _FIRST_WAIT_S:
            self._waits_s.pop(where, None)
            self._rest_until_s.pop(where, None)
