"""Reads the partitions that are held: one Kafka consumer, assigned as claims come and go.

Kafka's client queues what it fetched in one line: thousands of small messages of one partition may
stand before the first one of another, whose claim would look stuck meanwhile. So each partition has
a buffer here, filled as long as a buffer is empty, and buffers take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from kafkamq.claims.message import ClaimedMessage, CommitToken
from kafkamq.claims.session import ClaimSession
from kafkamq.config import ServiceConfig
from kafkamq.transport.errors import is_retriable
from kafkamq.transport.follower import Follower

MAX_BEHIND = 100_000  # offsets of a partition behind its first message without a verdict

_READ = 1000
_MIN_BUFFER = 10_000  # a buffer that is this long is paused; what one fetch may bring, about


class PartitionReader:
    """``gain`` and ``drop`` may be called by any thread; the rest by the application's."""

    def __init__(
        self,
        config: ServiceConfig,
        group: str,
        *,
        queue: int,
        commit: Callable[[CommitToken], None] | None,
        on_gone: Callable[[ClaimSession], None],
    ) -> None:
        self._follower = Follower(
            config,
            "reading claimed partitions",
            group_id=group,
            ignores=partial(is_retriable, or_missing=True),
            queued_min_messages=max(queue, 1000),
        )
        self._commit = commit
        self._on_gone = on_gone
        self._changes: deque[tuple[ClaimSession, int]] = deque()
        self._sessions: dict[tuple[str, int], ClaimSession] = {}
        self._paused: set[ClaimSession] = set()
        self._room = max(queue, 1000)  # messages in all buffers, unless one is empty
        self._max_buffer = max(_MIN_BUFFER, queue)
        self.buffers: dict[ClaimSession, deque[ClaimedMessage]] = {}  # the next in turn first

    @property
    def is_idle(self) -> bool:
        """Nothing is read, and nothing is about to be."""
        return not self._sessions and not self._changes

    def gain(self, session: ClaimSession, offset: int) -> None:
        self._changes.append((session, offset))

    def drop(self, session: ClaimSession) -> None:
        self._changes.append((session, -1))

    def apply(self) -> None:
        """Do what ``gain`` and ``drop`` asked for."""
        while self._changes:
            session, offset = self._changes.popleft()
            place, known = session.place, self._sessions.get(session.place)
            if offset < 0 and known is not session:
                continue  # a later session reads it already
            if known is not None:
                self._paused.discard(known)
                self._follower.drop([place])
                del self._sessions[place], self.buffers[known]
            if offset >= 0:
                self._follower.place({place: offset})
                self._sessions[place] = session
                self.buffers[session] = deque()

    def next_buffer(
        self, credit_of: Callable[[tuple[str, int]], int] = lambda _: 1
    ) -> ClaimSession | None:
        """Whose turn it is: a buffer with messages, which goes to the back of the line."""
        for session, buffer in self.buffers.items():
            if buffer and credit_of(session.place) > 0 and not _is_full(session, buffer[0].offset):
                self.buffers[session] = self.buffers.pop(session)
                return session
        return None

    def fill(self, timeout_s: float) -> None:
        """Read into the buffers; waits only while all of them are empty."""
        self.apply()
        waiting = sum(map(len, self.buffers.values()))
        if waiting < self._room or not all(self.buffers.values()):
            self._read(_READ, 0.0 if waiting else timeout_s)
        for session, buffer in self.buffers.items():
            if session in self._paused and len(buffer) < self._max_buffer // 2:
                self._paused.discard(session)
                self._follower.resume([session.place])
            elif len(buffer) > self._max_buffer and session not in self._paused:
                self._paused.add(session)
                self._follower.pause([session.place])

    def _read(self, max_messages: int, timeout_s: float) -> None:
        sessions, buffers, commit = self._sessions, self.buffers, self._commit
        for record in self._follower.poll(max_messages, timeout_s):
            message = ClaimedMessage(record, commit)
            session = sessions.get((message.topic, message.partition))
            if session is not None:
                message.token = session.claimant.token
                buffers[session].append(message)
        for place in list(self._follower.outside):
            self._follower.drop([place])
            session = sessions.get(place)
            if session is not None:
                self._on_gone(session)

    def close(self) -> None:
        self._follower.close()


def _is_full(session: ClaimSession, offset: int) -> bool:
    """Whether too much is done behind a message without a verdict to hand out what comes next.

    All of that is remembered until the verdict comes, and repeated after a crash.
    """
    claimant = session.claimant
    return bool(claimant.outstanding) and offset - claimant.position >= MAX_BEHIND
