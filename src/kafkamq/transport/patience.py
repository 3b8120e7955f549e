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

_FIRST_WAIT_S = 3.0  # for a log that does not answer, while others could be read
_MAX_WAIT_S = 12.0
_REST_WAITS = 2  # it is left alone for so many times the last wait
_MEMORY_S = 120.0  # what nobody has looked for meanwhile is forgotten
_MAX_KNOWN = 1000  # more than a lagging broker explains: somebody writes invented names


@dataclass(slots=True)
class _Search:
    where: Hashable
    offset: int
    began_s: float  # monotonic, both
    last_s: float


class Patience:
    """What was looked for in vain, and since when; readers may share it. Thread-safe."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self.grace_s = grace_s
        self._lock = threading.Lock()
        self._searches: list[_Search] = []

    def is_over(self, where: Hashable, offset: int = 0, end: int = 0) -> bool:
        """Whether it was looked for in vain for long enough; the first call begins the search.

        A log that ended before an offset all the time has nothing behind that offset either.

        Args:
            where: A log; or anything else that a broker does not know.
            offset: What is looked for in it.
            end: Where the log ends now, at or before ``offset``.
        """
        now_s = time.monotonic()
        with self._lock:
            self._searches = [
                each
                for each in self._searches
                if now_s - each.last_s < _MEMORY_S
                and (each.where != where or each.offset >= end)  # else the log has it by now
            ][-_MAX_KNOWN:]
            known = [
                each for each in self._searches if each.where == where and each.offset <= offset
            ]
            if not known:
                known = [_Search(where, offset, now_s, now_s)]
                self._searches += known
            for each in known:
                each.last_s = now_s
            return now_s - min(each.began_s for each in known) > self.grace_s


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
