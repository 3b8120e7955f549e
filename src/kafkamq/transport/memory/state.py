"""What everybody in a cluster shares: the condition, time, topics and faults."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

from kafkamq.transport.memory.faults import Faults
from kafkamq.transport.memory.log import Partition, Place, Topic

_LONGEST_WAIT_S = 1.0
_LOOK_S = 0.02  # between two looks at faults; those who wait would wake each other without an end


class _Pumped(Protocol):
    """A producer, as far as it is known here."""

    def pump(self, now_s: float) -> None:
        """Send what waits, and fail what is overdue."""


class State:
    """The lower half of ``MemoryKafka``."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self.now_ms = now_ms
        self.changed = threading.Condition()
        self.topics: dict[str, Topic] = {}
        self.faults = Faults()
        self._due_s = math.inf
        self._looks_s = 0.0
        self._backlog: dict[_Pumped, None] = {}

    def partition(self, place: Place) -> Partition | None:
        topic = self.topics.get(place[0])
        if topic is None or not 0 <= place[1] < len(topic.partitions):
            return None
        return topic.partitions[place[1]]

    def due(self, at_s: float) -> None:
        """Something is to be done then (monotonic)."""
        self._due_s = min(self._due_s, at_s)

    def tick(self) -> float:
        """Do what is due; the monotonic time."""
        now_s = time.monotonic()
        is_disturbed = bool(self.faults.cut) or self.faults.is_down  # which begins without a word
        if now_s >= self._due_s or (is_disturbed and now_s >= self._looks_s):
            self._due_s, self._looks_s = math.inf, now_s + _LOOK_S
            self._work(now_s)
            self.changed.notify_all()
        return now_s

    def _work(self, now_s: float) -> None:
        for producer in list(self._backlog):
            producer.pump(now_s)

    def wait(self, until_s: float) -> None:
        """Wait for a change, but not beyond this time or what is due; hold ``changed``."""
        now_s = time.monotonic()
        until_s = min(until_s, self._due_s, now_s + _LONGEST_WAIT_S)
        self.changed.wait(max(0.0, until_s - now_s))

    def keep(self, producer: _Pumped, *, has_backlog: bool) -> None:
        """Whether a producer has records that wait for something."""
        if has_backlog:
            self._backlog[producer] = None
        else:
            self._backlog.pop(producer, None)
