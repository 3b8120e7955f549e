"""Reads the partitions that are held: one Kafka consumer, assigned as claims come and go.

Kafka's client queues what it fetched in one line: thousands of small messages of one partition may
stand before the first one of another, whose claim would look stuck meanwhile. So each partition has
a lane here, filled as long as a lane is empty, and lanes take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from kafkamq.claims.message import ClaimedMessage, CommitToken
from kafkamq.claims.session import Tenure
from kafkamq.config import ServiceConfig
from kafkamq.transport.errors import is_retriable
from kafkamq.transport.follower import Follower

__all__ = ["MAX_BEHIND", "Intake"]

MAX_BEHIND = 100_000  # offsets of a partition behind its first message without a verdict

_READ = 1000
_MIN_LANE = 10_000  # a lane that is this long is paused; what one fetch may bring, about


class Intake:
    """``gain`` and ``drop`` may be called by any thread; the rest by the application's."""

    def __init__(
        self,
        config: ServiceConfig,
        group: str,
        *,
        queue: int,
        commit: Callable[[CommitToken], None] | None,
        on_gone: Callable[[Tenure], None],
    ) -> None:
        """A reader of nothing."""
        self._follower = Follower(
            config,
            "reading claimed partitions",
            group_id=group,
            ignores=partial(is_retriable, or_missing=True),
            queued_min_messages=max(queue, 1000),
        )
        self._commit = commit
        self._on_gone = on_gone
        self._changes: deque[tuple[Tenure, int]] = deque()
        self._tenures: dict[tuple[str, int], Tenure] = {}
        self._paused: set[Tenure] = set()
        self._room = max(queue, 1000)  # messages in all lanes, unless one is empty
        self._max_lane = max(_MIN_LANE, queue)
        self.lanes: dict[Tenure, deque[ClaimedMessage]] = {}  # the next in turn first

    @property
    def is_idle(self) -> bool:
        """Nothing is read, and nothing is about to be."""
        return not self._tenures and not self._changes

    def gain(self, tenure: Tenure, offset: int) -> None:
        self._changes.append((tenure, offset))

    def drop(self, tenure: Tenure) -> None:
        self._changes.append((tenure, -1))

    def apply(self) -> None:
        """Do what ``gain`` and ``drop`` asked for."""
        while self._changes:
            tenure, offset = self._changes.popleft()
            place, known = tenure.place, self._tenures.get(tenure.place)
            if offset < 0 and known is not tenure:
                continue  # a later tenure reads it already
            if known is not None:
                self._paused.discard(known)
                self._follower.drop([place])
                del self._tenures[place], self.lanes[known]
            if offset >= 0:
                self._follower.place({place: offset})
                self._tenures[place] = tenure
                self.lanes[tenure] = deque()

    def next_lane(self) -> Tenure | None:
        """Whose turn it is: a lane with messages, which goes to the back of the line."""
        for tenure, lane in self.lanes.items():
            if lane and not _is_full(tenure, lane[0].offset):
                self.lanes[tenure] = self.lanes.pop(tenure)
                return tenure
        return None

    def fill(self, timeout_s: float) -> None:
        """Read into the lanes; waits only while all of them are empty."""
        self.apply()
        waiting = sum(map(len, self.lanes.values()))
        if waiting < self._room or not all(self.lanes.values()):
            self._read(_READ, 0.0 if waiting else timeout_s)
        for tenure, lane in self.lanes.items():
            if tenure in self._paused and len(lane) < self._max_lane // 2:
                self._paused.discard(tenure)
                self._follower.resume([tenure.place])
            elif len(lane) > self._max_lane and tenure not in self._paused:
                self._paused.add(tenure)
                self._follower.pause([tenure.place])

    def _read(self, max_messages: int, timeout_s: float) -> None:
        tenures, lanes, commit = self._tenures, self.lanes, self._commit
        for record in self._follower.poll(max_messages, timeout_s):
            message = ClaimedMessage(record, commit)
            tenure = tenures.get((message.topic, message.partition))
            if tenure is not None:
                message.token = tenure.claimant.token
                lanes[tenure].append(message)
        for place in list(self._follower.outside):
            self._follower.drop([place])
            tenure = tenures.get(place)
            if tenure is not None:
                self._on_gone(tenure)

    def close(self) -> None:
        self._follower.close()


def _is_full(tenure: Tenure, offset: int) -> bool:
    """Whether too much is done behind a message without a verdict to hand out what comes next.

    All of that is remembered until the verdict comes, and repeated after a crash.
    """
    claimant = tenure.claimant
    return bool(claimant.outstanding) and offset - claimant.position >= MAX_BEHIND
