"""What was read of held partitions, and waits to be handed out.

Kafka's client queues what it fetched in one line: thousands of small messages of one partition may
stand before the first one of another, whose claim would look stuck meanwhile. So each partition has
a buffer here, filled as long as a buffer is empty, and buffers take turns.

At most once, batches are announced ahead, committed when they are asked for, then handed out. Ahead
of the application only ClaimingMessages is written, which moves no position; so a process that dies
loses the batch it works on, or the one it was about to be given, and no other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kafkamq.claims.engine import Engine
from kafkamq.claims.message import Batch, ClaimedMessage, CommitToken
from kafkamq.claims.rules.steps import HandOut
from kafkamq.claims.session import ClaimSession
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.errors import is_retriable
from kafkamq.transport.follower import Follower

MAX_BEHIND = 100_000  # offsets of a partition behind its first message without a verdict

_READ = 1000
_MIN_BUFFER = 10_000  # a buffer that is this long is paused; what one fetch may bring, about


class PartitionReader:
    """``gain`` and ``drop`` may be called by any thread; the rest by the application's."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        *,
        queue: int,
        commit: Callable[[CommitToken], None] | None,
        on_gone: Callable[[ClaimSession], None],
    ) -> None:
        self._engine = engine
        self._follower = Follower(
            engine.config,
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
    def has_read(self) -> bool:
        """Messages wait to be handed out."""
        return any(self.buffers.values())

    @property
    def is_full(self) -> bool:
        """Messages of each partition that is held wait to be handed out."""
        return bool(self.buffers) and all(self.buffers.values())

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
        if timeout_s > 0 and not self._sessions and not self._changes:
            with self._engine.changed:
                self._engine.changed.wait(timeout_s)
            timeout_s = 0.0
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


@dataclass(slots=True)
class _Buffer:
    """The batch that one partition offers of what was read."""

    session: ClaimSession
    offered: tuple[ClaimedMessage, ...] = ()
    is_wanted: bool = False
    is_handed_out: bool = False


class AtMostOnceBatches:
    """The buffers of one consumer; ``next_batch`` belongs to the application's thread."""

    def __init__(self, engine: Engine, reader: PartitionReader, batch: int) -> None:
        self._engine = engine
        self._reader = reader
        self._batch = batch
        self._buffers: dict[ClaimSession, _Buffer] = {}

    # ---- under the engine's lock

    def add(self, session: ClaimSession) -> None:
        self._buffers[session] = _Buffer(session)

    def remove(self, session: ClaimSession) -> None:
        self._buffers.pop(session, None)

    def hand_out(self, session: ClaimSession, step: HandOut) -> None:
        """The log says that the offered batch may be used."""
        buffer = self._buffers.get(session)
        if buffer is not None and buffer.offered and buffer.offered[0].offset == step.first_offset:
            buffer.is_handed_out = True

    # ---- the application's thread

    def next_batch(self, timeout_s: float) -> Batch | None:
        """A batch; None: there was none for ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._engine.lock:
                batch = self._take()
                if batch is not None:
                    return batch
                is_wanting = self._want()
            left_s = max(0.0, deadline_s - time.monotonic())
            self._reader.fill(0.0 if is_wanting else left_s)
            with self._engine.changed:
                self._offer(is_idle=not is_wanting)
                is_wanting = self._want()
                if not left_s:
                    return self._take()
                if is_wanting and not any(
                    buffer.is_handed_out for buffer in self._buffers.values()
                ):
                    self._engine.changed.wait(left_s)

    def _take(self) -> Batch | None:
        for buffer in list(self._buffers.values()):
            if not buffer.is_handed_out:
                continue
            messages, claimant = buffer.offered, buffer.session.claimant
            buffer.offered, buffer.is_handed_out, buffer.is_wanted = (), False, False
            self._buffers[buffer.session] = self._buffers.pop(buffer.session)  # its turn is over
            self._offer(is_idle=False)
            return Batch(*buffer.session.place, claimant.token, messages)
        return None

    def _want(self) -> bool:
        """Commit one offered batch; False: none is offered."""
        if any(buffer.is_wanted for buffer in self._buffers.values()):
            return True
        for buffer in self._buffers.values():
            if buffer.offered:
                buffer.is_wanted = buffer.session.claimant.want_batch()
                if buffer.is_wanted:
                    self._engine.drive(buffer.session)
                    return True
                buffer.offered = ()  # dropped by its claimant
        return False

    def _offer(self, *, is_idle: bool) -> None:
        """Announce what was read: full batches, and smaller ones when nothing else is to do."""
        for buffer in list(self._buffers.values()):
            claimant = buffer.session.claimant
            read = self._reader.buffers.get(buffer.session)
            if buffer.offered or not read or not claimant.wants_batch:
                continue
            if len(read) < self._batch and not is_idle:
                continue
            size = min(self._batch, len(read))
            buffer.offered = tuple(read.popleft() for _ in range(size))
            claimant.offer(
                buffer.offered[0].offset,
                buffer.offered[-1].offset + 1,
                monotonic_ms(),
                is_wanted=False,
            )
            self._engine.drive(buffer.session)
