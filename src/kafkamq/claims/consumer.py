"""An application works with what is here: messages of claimed partitions, batches, and their
commits.

Kafka's client queues what it fetched in one line: thousands of small messages of one partition may
stand before the first one of another, whose claim would look stuck meanwhile. So each partition has
a buffer here, filled as long as a buffer is empty, and buffers take turns.

At most once, batches are announced ahead, committed when they are asked for, then handed out. Ahead
of the application only ClaimingMessages is written, which moves no position; so a process that dies
loses the batch it works on, or the one it was about to be given, and no other.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from kafkamq.claims.engine import ClaimSession, Engine
from kafkamq.claims.holding import ClaimOptions, Holding
from kafkamq.claims.rules.steps import Delivery, End, Fetch, HandOut, Phase
from kafkamq.config import wait_seconds
from kafkamq.errors import DataLossError, LeaseLostError, StateError
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.errors import is_retriable
from kafkamq.transport.follower import Follower
from kafkamq.transport.record import Record, headers_of
from kafkamq.transport.transactions import TransactionalProducer

_log = logging.getLogger(__name__)
_SLICE_S = 0.05


@dataclass(frozen=True, slots=True)
class CommitToken:
    """Names a message that was handed out; small, and can be sent to another process and back."""

    topic: str
    partition: int
    offset: int
    token: int


class ClaimedMessage:
    """A record of a partition that this process holds.

    Attributes:
        payload: Its value; None: null.
        timestamp_ms: Its timestamp; -1: it has none.
        token: The fencing token of the claim under which it was handed out. Tokens of a partition
            rise with every new owner: a store that refuses writes with a smaller one than it has
            seen is safe from former owners.
    """

    __slots__ = (
        "_commit",
        "_record",
        "key",
        "offset",
        "partition",
        "payload",
        "timestamp_ms",
        "token",
        "topic",
    )

    def __init__(self, record: Record, commit: Callable[[CommitToken], None] | None) -> None:
        """``commit`` is None where nothing is committed: at most once."""
        self.topic: str = record.topic() or ""
        self.partition: int = record.partition() or 0
        offset = record.offset()
        self.offset: int = -1 if offset is None else offset
        self.key: bytes | None = record.key()
        self.payload: bytes | None = record.value()
        self._record = record
        self.timestamp_ms: int = record.timestamp()[1]
        self.token = -1
        self._commit = commit

    def __repr__(self) -> str:
        return f"ClaimedMessage({self.topic}[{self.partition}]@{self.offset}, token {self.token})"

    @property
    def headers(self) -> dict[str, bytes | None]:
        """Return headers by name, the last of each; none at all where a name is no text."""
        return dict(headers_of(self._record))

    @property
    def commit_token(self) -> CommitToken:
        """Return what ``Consumer.commit`` takes in place of this message."""
        return CommitToken(self.topic, self.partition, self.offset, self.token)

    def commit(self) -> None:
        """Note that the message is done: once a heartbeat has told so, it does not come again.

        Raises:
            LeaseLostError: The claim has ended; the message may be with another consumer.
            StateError: It was not handed out, everything up to it is done, or delivery is at most
                once.
        """
        if self._commit is None:
            raise StateError("delivery is at most once: there is nothing to commit")
        self._commit(self.commit_token)


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages of one partition, in order; at most once they never come again."""

    topic: str
    partition: int
    token: int
    messages: tuple[ClaimedMessage, ...]

    @property
    def first_offset(self) -> int:
        return self.messages[0].offset

    @property
    def next_offset(self) -> int:
        return self.messages[-1].offset + 1

    def __len__(self) -> int:
        return len(self.messages)


class Outputs:
    """The open transaction of one claimed partition; ``Consumer.transaction`` makes it."""

    def __init__(self, producer: TransactionalProducer) -> None:
        self._producer = producer

    def send(
        self,
        topic: str,
        payload: bytes | None,
        *,
        key: bytes | None = None,
        headers: Mapping[str, bytes | None] | None = None,
        partition: int = -1,
    ) -> None:
        """Queue one record; it is there when the block has ended.

        Raises:
            FencedError: Another owner took the partition over.
            BrokerError: Kafka refused.
        """
        self._producer.produce((topic, partition, key, payload, tuple((headers or {}).items())))


MAX_BEHIND = 100_000
_READ = 1000
# A buffer of this length, about what one fetch may bring, is paused.
_MIN_BUFFER = 10_000


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
        # The messages in all buffers, unless one is empty.
        self._room = max(queue, 1000)
        self._max_buffer = max(_MIN_BUFFER, queue)
        self.buffers: dict[ClaimSession, deque[ClaimedMessage]] = {}

    def gain(self, session: ClaimSession, offset: int) -> None:
        self._changes.append((session, offset))

    def drop(self, session: ClaimSession) -> None:
        self._changes.append((session, -1))

    def apply(self) -> None:
        while self._changes:
            session, offset = self._changes.popleft()
            place, known = session.place, self._sessions.get(session.place)
            if offset < 0 and known is not session:
                continue
            # A later session reads it already.
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
        """Return whose turn it is: a buffer with messages, which goes to the back of the line."""
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
    """Return whether too much is done behind a message without a verdict to hand out what comes
    next.

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
        buffer = self._buffers.get(session)
        if buffer is not None and buffer.offered and buffer.offered[0].offset == step.first_offset:
            buffer.is_handed_out = True

    # ---- the application's thread

    def next_batch(self, timeout_s: float) -> Batch | None:
        """Return a batch; None: there was none for ``timeout_s``."""
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
            self._buffers[buffer.session] = self._buffers.pop(buffer.session)
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
                buffer.offered = ()
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


class Consumer(Holding):
    """Claims partitions and hands out their messages; ``Member.consumer`` makes it.

    One thread receives; ``commit``, ``flush`` and ``stop`` may be called by any. Iterable and a
    context manager: leaving the block, also by an exception, releases what is held, at the first
    message that is not committed.
    """

    def __init__(self, engine: Engine, options: ClaimOptions) -> None:
        super().__init__(engine, options)
        self._failure: Exception | None = None
        self._turn: ClaimSession | None = None
        self._left_of_turn = 0
        self._handed_out: dict[tuple[str, int], int] = {}
        self._is_stopped = False
        is_once = options.delivery is Delivery.AT_MOST_ONCE
        self._reader = PartitionReader(
            engine,
            options.group,
            queue=options.queue,
            commit=None if is_once else self._commit,
            on_gone=self._gone,
        )
        self._batches = AtMostOnceBatches(engine, self._reader, options.batch) if is_once else None

    def __iter__(self) -> Iterator[ClaimedMessage]:
        while not self._is_stopped:
            message = self.receive(1.0)
            if message is not None:
                yield message

    # ---- messages

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    def receive(self, timeout: float | timedelta = 1.0) -> ClaimedMessage | None:
        """Return the next message; None: there was none for ``timeout`` seconds, or ``stop`` was
        called.

        Raises:
            DataLossError: A position lies outside its log (``on_data_loss="raise"``).
            BrokerError: What no waiting can mend.
            StateError: Closed, or delivery is at most once.
        """
        if self._batches is not None:
            raise StateError("delivery is at most once: use batches() or next_batch()")
        self.check()
        deadline_s = time.monotonic() + wait_seconds(timeout, may_be_endless=True)
        while not self._is_stopped:
            session = self._turn
            buffer = self._reader.buffers.get(session) if session is not None else None
            while buffer and session is not None and self._left_of_turn > 0:
                message = buffer.popleft()
                self._left_of_turn -= 1
                if self._may_hand_out(session, (message.offset,)):
                    return message
            if not self._next_turn(deadline_s):
                return None
        return None

    def next_batch(self, timeout: float | timedelta = 1.0) -> Batch | None:
        """Return the next messages of one partition, at most ``batch``; None as for ``receive``.

        At most once: when this returns a batch, the log says that it is behind the position, so
        nobody is handed any of it again; what came before it is done with.

        Raises:
            As ``receive``.
        """
        deadline_s = time.monotonic() + wait_seconds(timeout, may_be_endless=True)
        while True:
            batch = self.find_batch(deadline_s - time.monotonic())
            if batch is None or self.take(batch):
                return batch

    def find_batch(self, timeout: float | timedelta) -> Batch | None:
        """Wait for the next batch, which the application has only when ``take`` says so.

        For those between whom and the application it may be lost. At most once, a claim that ends
        gives back what was not taken; so take each batch before the next one is asked for.
        """
        self.check()
        deadline_s = time.monotonic() + wait_seconds(timeout, may_be_endless=True)
        while not self._is_stopped:
            if self._batches is not None:
                self.check()
                batch = self._batches.next_batch(min(_SLICE_S, deadline_s - time.monotonic()))
                if batch is not None:
                    return batch
                if time.monotonic() >= deadline_s:
                    return None
                continue
            if not self._next_turn(deadline_s):
                return None
            if self._turn is not None and (found := self._take_of(self._turn, self._options.batch)):
                return Batch(*self._turn.place, self._turn.claimant.token, tuple(found))
        return None

    def read(self, timeout: float) -> None:
        """Read ahead; waits no longer than that, and only where nothing was read yet."""
        self.check()
        self._reader.fill(timeout)

    @property
    def has_read(self) -> bool:
        """Messages were read, and wait to be handed out."""
        return any(self._reader.buffers.values())

    @property
    def is_full(self) -> bool:
        """Messages of each partition that is held were read: no other ones can be handed out."""
        buffers = self._reader.buffers.values()
        return bool(buffers) and all(buffers)

    def take_read(
        self, n: int, credit_of: Callable[[tuple[str, int]], int]
    ) -> list[ClaimedMessage]:
        """Up to ``n`` messages of one partition, handed out now; never waits.

        ``credit_of`` says how many of a topic's partition; partitions take turns.
        """
        session = self._reader.next_buffer(credit_of)
        return [] if session is None else self._take_of(session, min(n, credit_of(session.place)))

    def take(self, batch: Batch) -> bool:
        """The application has the batch from now on; False: it may not, for its claim has ended."""
        if self._batches is None:
            return True
        with self._engine.lock:
            session = self._sessions.get((batch.topic, batch.partition))
            if session is None or session.claimant.token != batch.token:
                return False
            is_taken = session.claimant.take_batch(monotonic_ms())
            self._engine.stats.handed_out += len(batch) if is_taken else 0
            return is_taken

    def batches(self, timeout: float | timedelta | None = None) -> Iterator[Batch]:
        """Batches, until ``stop``, or until none came for ``timeout`` seconds."""
        while not self._is_stopped:
            batch = self.next_batch(1.0 if timeout is None else timeout)
            if batch is not None:
                yield batch
            elif timeout is not None:
                return

    def _next_turn(self, deadline_s: float) -> bool:
        """Fill the buffers, and take the next; False: there was nothing before the deadline."""
        self._left_of_turn = self._options.batch
        left_s = deadline_s - time.monotonic()
        self.read(max(0.0, min(_SLICE_S, left_s)))
        self._turn = self._reader.next_buffer()
        if self._turn is None and self.has_read and left_s > 0:
            # Commits make room.
            with self._engine.changed:
                self._engine.changed.wait(min(_SLICE_S, left_s))
        return self._turn is not None or left_s > 0

    def _take_of(self, session: ClaimSession, limit: int) -> list[ClaimedMessage]:
        """Return what was read under this claim, handed out now; none when the claim has ended."""
        buffer = self._reader.buffers[session]
        found = [buffer.popleft() for _ in range(min(limit, len(buffer)))]
        return found if self._may_hand_out(session, [each.offset for each in found]) else []

    def _may_hand_out(self, session: ClaimSession, offsets: Sequence[int]) -> bool:
        with self._engine.lock:
            if not session.claimant.hand_out(offsets, monotonic_ms()):
                return False
            stats, next_offset = self._engine.stats, self._handed_out.get(session.place, 0)
            stats.handed_out += len(offsets)
            if offsets[0] < next_offset:
                stats.redelivered += sum(offset < next_offset for offset in offsets)
            self._handed_out[session.place] = max(next_offset, offsets[-1] + 1)
            return True

    def check(self) -> None:
        """Raise the error that ended this consumer, or its engine."""
        if self.is_closed:
            raise StateError("this consumer is closed")
        if self._failure is not None:
            raise self._failure
        self._engine.check()

    # ---- verdicts

    def commit(self, what: ClaimedMessage | CommitToken | Batch) -> None:
        """Note that a message is done (see ``ClaimedMessage.commit``), or all of a batch are."""
        if isinstance(what, Batch):
            for message in what.messages:
                message.commit()
        elif isinstance(what, ClaimedMessage):
            what.commit()
        else:
            self._commit(what)

    def _commit(self, token: CommitToken) -> None:
        place = (token.topic, token.partition)
        with self._engine.lock:
            session = self._sessions.get(place)
            if session is None or session.claimant.token != token.token:
                raise LeaseLostError(
                    f"the claim of {token.topic}[{token.partition}] under which offset"
                    f" {token.offset} was handed out has ended: its message may be with another"
                    " consumer"
                )
            session.claimant.commit(token.offset)
            if session.claimant.phase is Phase.DRAINING:
                self._engine.drive(session)

    def forget(self, message: ClaimedMessage) -> None:
        """Drop a message without a verdict: the end of its claim does not wait for one."""
        with self._engine.lock:
            session = self._sessions.get((message.topic, message.partition))
            if session is not None and session.claimant.token == message.token:
                session.claimant.forget(message.offset)
                self._engine.plan_soon(session)

    @contextmanager
    def transaction(self, of: ClaimedMessage | Batch) -> Iterator[Outputs]:
        """Produce to Kafka under a claim: a former owner's transaction is refused by the brokers.

        Needs ``fenced=True``, or at most once. Commits when the block ends normally, aborts when
        it ends by an exception. What it was for is not handed out again while the claim lives: make
        it again.

        Raises:
            LeaseLostError: The claim has ended, or ended before the commit.
            BrokerError, DeadlineExceededError: Kafka refused, or does not answer.
        """
        place = (of.topic, of.partition)
        with self._engine.lock:
            session = self._sessions.get(place)
        if session is None or not self.is_held(*place, of.token):
            raise LeaseLostError(f"the claim of {of.topic}[{of.partition}] has ended")
        if session.fence is None:
            raise StateError("outputs are not fenced: make the consumer with fenced=True")
        with session.fence.transaction() as producer:
            yield Outputs(producer)

    # ---- what becomes of a partition, under the engine's lock

    def _gained(self, session: ClaimSession, step: Fetch) -> None:
        """Held: read it, unless its position is not in the log."""
        topic, partition = session.place
        if step.deleted or step.beyond:
            text = (
                f"the position of {topic}[{partition}] lies outside the log: "
                + (f"{step.deleted} messages were deleted unread" if step.deleted else "")
                + (f"it is {step.beyond} behind the log's end" if step.beyond else "")
            )
            if self._options.on_data_loss == "raise":
                self._lose(session, text, step.offset - step.deleted + step.beyond)
                return
            _log.warning("%s; going on at %d", text, step.offset)
        if self._batches is not None:
            self._batches.add(session)
        self._reader.gain(session, step.offset)
        super()._gained(session, step)

    def on_hand_out(self, session: ClaimSession, step: HandOut) -> None:
        if self._batches is not None:
            self._batches.hand_out(session, step)

    def _ended(self, session: ClaimSession, reason: End) -> None:
        """What is queued of it is dropped: ``_may_hand_out`` refuses it."""
        self._reader.drop(session)
        if self._batches is not None:
            self._batches.remove(session)
        super()._ended(session, reason)

    def _gone(self, session: ClaimSession) -> None:
        """The next message was deleted while it was held, or its offset is beyond the end."""
        topic, partition = session.place
        with self._engine.lock:
            position = session.claimant.position
            text = (
                f"messages of {topic}[{partition}] from {position} on are not in the log any more"
            )
            if self._options.on_data_loss == "raise":
                self._lose(session, text, position)
            else:
                # A new session begins at the log's start.
                _log.warning("%s; claiming it again", text)
                self._claim_again(session)

    def _lose(self, session: ClaimSession, text: str, offset: int) -> None:
        self._failure = DataLossError(
            f"{text}; set on_data_loss='skip' to go on, or choose a position with"
            " `kafkamq claims set-position`"
        )
        self._release(session, offset=offset)

    # ---- the end

    def stop(self) -> None:
        """End iterations after the current message; for other threads and signal handlers."""
        self._is_stopped = True

    def close(
        self,
        *,
        release: bool = True,
        drain: float | timedelta = 0.0,
        timeout: float | timedelta = 30.0,
    ) -> None:
        """End as ``Hold.close`` says; messages that were not handed out are dropped."""
        if not self.is_closed:
            self._is_stopped = True
            super().close(release=release, drain=drain, timeout=timeout)
            self._reader.close()
