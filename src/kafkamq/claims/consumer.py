"""What an application works with: messages of claimed partitions, and their commits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from kafkamq.claims.engine import Engine
from kafkamq.claims.holding import ClaimOptions, Holding
from kafkamq.claims.message import Batch, ClaimedMessage, CommitToken, Outputs
from kafkamq.claims.reading import AtMostOnceBatches, PartitionReader
from kafkamq.claims.rules.steps import Delivery, End, Fetch, HandOut, Phase
from kafkamq.claims.session import ClaimSession
from kafkamq.config import wait_seconds
from kafkamq.errors import DataLossError, LeaseLostError, StateError
from kafkamq.transport.clock import monotonic_ms

_log = logging.getLogger(__name__)
_SLICE_S = 0.05


class Consumer(Holding):
    """Claims partitions and hands out their messages; ``Member.consumer`` makes it.

    One thread receives; ``commit``, ``flush`` and ``stop`` may be called by any. Iterable and a
    context manager: leaving the block, also by an exception, releases what is held, at the first
    message that is not committed.
    """

    def __init__(self, engine: Engine, options: ClaimOptions) -> None:
        super().__init__(engine, options)
        self._failure: Exception | None = None
        self._turn: ClaimSession | None = None  # whose messages come now
        self._left_of_turn = 0
        self._handed_out: dict[tuple[str, int], int] = {}  # up to where, ever
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
        """Yield messages, until ``stop``."""
        while not self._is_stopped:
            message = self.receive(1.0)
            if message is not None:
                yield message

    # ---- messages

    @property
    def is_stopped(self) -> bool:
        """Whether ``stop`` or ``close`` was called."""
        return self._is_stopped

    def receive(self, timeout: float | timedelta = 1.0) -> ClaimedMessage | None:
        """The next message; None: there was none for ``timeout`` seconds, or ``stop`` was called.

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
        """The next messages of one partition, at most ``batch``; None as for ``receive``.

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
        """As ``next_batch``, but the application has it only when ``take`` says so.

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
        return self._reader.has_read

    @property
    def is_full(self) -> bool:
        """Messages of each partition that is held were read: no other ones can be handed out."""
        return self._reader.is_full

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
            with self._engine.changed:  # commits make room
                self._engine.changed.wait(min(_SLICE_S, left_s))
        return self._turn is not None or left_s > 0

    def _take_of(self, session: ClaimSession, limit: int) -> list[ClaimedMessage]:
        """What was read under this claim, handed out now; none when the claim has ended."""
        buffer = self._reader.buffers[session]
        found = [buffer.popleft() for _ in range(min(limit, len(buffer)))]
        return found if self._may_hand_out(session, [each.offset for each in found]) else []

    def _may_hand_out(self, session: ClaimSession, offsets: Sequence[int]) -> bool:
        """Hand these out, unless the claim has ended."""
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
        """It is done; see ``ClaimedMessage.commit``. Of a batch: all of its messages."""
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
        """It is dropped without a verdict: the end of its claim does not wait for one."""
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
            else:  # a new session begins at the log's start
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
        """As ``Hold.close``; messages that were not handed out are dropped."""
        if not self.is_closed:
            self._is_stopped = True
            super().close(release=release, drain=drain, timeout=timeout)
            self._reader.close()
