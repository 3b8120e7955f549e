"""From the reader to messages that are ready: one batch of STARTs after the other (R5)."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import chain

from kafkamq.errors import KafkaMQError
from kafkamq.markers.ack_writer import AckWriter
from kafkamq.markers.handover import Handover
from kafkamq.markers.message import MarkersMessage
from kafkamq.markers.reader import MessageReader
from kafkamq.markers.recorder import ConsumerRecorder
from kafkamq.markers.rules.fetch_buffer import FetchBuffer
from kafkamq.markers.starts import Batch, Starter
from kafkamq.markers.state import ConsumerState
from kafkamq.queue.namespace import IDENTITY_AGE_S
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.offset_commits import Commit

MAX_GATHERED = 1000  # messages for which a transaction waits no longer
AHEAD_COUNT = 500  # so many that are handed out at once, and used up within AHEAD_MS,
AHEAD_MS = 100  # let the next ones be STARTed while these are committed
MIN_TIMEOUT_MS = 5000  # ... on queues with such a redelivery timeout, or a longer one
_LATE_S = 0.05  # how often it is looked whether late STARTs are known
_GATE_S = 0.02  # how often R6 is asked again
_log = logging.getLogger(__name__)


class Batches:
    """The batches of one consumer; its owner thread calls it, one step at a time."""

    def __init__(
        self,
        state: ConsumerState,
        buffer: FetchBuffer[MarkersMessage],
        starter: Starter,
        reader: MessageReader,
        handover: Handover,
        closing: threading.Event,
    ) -> None:
        """``closing`` is set when nobody will want more, which ends a wait."""
        self._state = state
        self._queue = state.queue
        self._buffer = buffer
        self._starter = starter
        self._reader = reader
        self._handover = handover
        self._closing = closing
        self._recorder = ConsumerRecorder(state.queue.queue_id)
        self._batch: Batch | None = None
        self._next: Batch | None = None  # STARTed behind it, while it is committed
        self._gather_until_s = 0.0  # monotonic; 0: no batch is being gathered
        self.ready: deque[MarkersMessage] = deque()  # STARTed and committed, not handed out
        self.ready_count = 0  # so many were there when the last ones came, at
        self.ready_ms = 0

    @property
    def is_open(self) -> bool:
        """Whether STARTs, or the commit behind them, are under way."""
        return self._batch is not None or self._next is not None

    def step(self, wanted: int, timeout_s: float) -> None:
        """One step from polling to messages that are ready; waits at most ``timeout_s``."""
        batch = self._take_next() or self._handover.next_late(is_settled=True)
        if batch is not None:
            self._batch = batch
            self._finish(batch, timeout_s, wanted if self._is_fast() else 0)
            return
        if self._state.namespace.facts() is not self._starter.facts:
            self._know_topics()
        late_count = self._handover.late_count
        if late_count:  # they may be known at any moment
            timeout_s = min(timeout_s, _LATE_S)
        # What is late does not keep the others from going on, but has a bound.
        room = self._queue.max_in_flight - self._state.leases.open_count
        room += min(late_count, self._queue.max_in_flight)
        if room <= 0:  # back-pressure: verdicts make room
            self._closing.wait(min(timeout_s, _GATE_S))
            return
        if not len(self._buffer):
            self._reader.poll(wanted, timeout_s)
        elif self._buffer.is_stale(monotonic_ms()):  # R5's 20 s: fetch again
            self._reader.seek_back()
        if not len(self._buffer) or not self._has_gathered(min(wanted, room), timeout_s):
            return
        self._begin(min(wanted, room), timeout_s)

    def _has_gathered(self, wanted: int, timeout_s: float) -> bool:
        """Whether a batch may begin: it is full, or has waited for more as long as it may."""
        gather_s = self._handover.gather_s
        if not gather_s:
            return True
        now_s = time.monotonic()
        self._gather_until_s = self._gather_until_s or now_s + gather_s
        if len(self._buffer) < min(wanted, MAX_GATHERED) and now_s < self._gather_until_s:
            self._reader.poll(wanted, min(timeout_s, self._gather_until_s - now_s))
            return False
        if self._reader.is_skipping:  # of an older position: a transaction would not wait for it
            self._closing.wait(min(timeout_s, _GATE_S))
            self._reader.tend()
            return False
        self._gather_until_s = 0.0
        return True

    def _begin(self, wanted: int, timeout_s: float) -> None:
        try:
            batch = self._starter.plan(wanted)
        except BaseException:  # an interrupted plan too: nothing that was taken may be forgotten
            self._reader.seek_back()
            raise
        if batch is None:  # R6: others first
            self._closing.wait(min(timeout_s, _GATE_S))
            return
        self._batch = batch
        try:
            self._handover.begin(batch, wanted)
        except BaseException:
            self._give_up(batch)
            raise

    def tend(self) -> None:
        """Nobody receives: see what is under way through, so that its leases are renewed."""
        batch = self._take_next()
        if batch is not None:
            self._finish(batch, 0.0)

    def _take_next(self) -> Batch | None:
        """The batch that is under way, the older one of two."""
        if self._batch is None and self._next is not None:
            self._batch, self._next = self._next, None
        return self._batch

    def _is_fast(self) -> bool:
        """Whether what was ready was many, and is used up already."""
        if self.ready_count < AHEAD_COUNT or self.ready or self._queue.is_at_most_once:
            return False
        # A worker that stops receiving must not lose it before ``tend`` sees it through.
        is_safe = self._queue.redelivery_timeout_ms >= MIN_TIMEOUT_MS
        return is_safe and monotonic_ms() - self.ready_ms <= AHEAD_MS

    def _begin_next(self, wanted: int) -> None:
        """STARTs of the next batch, whose commit comes behind this one's (R5)."""
        namespace, starter, buffer = self._state.namespace, self._starter, self._buffer
        if self._next is not None or namespace.facts() is not starter.facts:
            return
        self._reader.poll_ahead(wanted)
        room = self._queue.max_in_flight - self._state.leases.open_count
        count = min(wanted, room, len(buffer))
        if count < min(wanted, AHEAD_COUNT) or buffer.is_stale(monotonic_ms()):
            return
        try:
            self._next = starter.plan(count)
        except BaseException:  # as in ``_begin``; the batch before it is given up, too
            self._reader.seek_back()
            raise
        if self._next is not None:
            try:
                self._handover.begin(self._next, 0)  # ``_finish`` reads on
            except KafkaMQError as error:  # found out when it is its turn: it is not reported
                _log.info("STARTs were not queued", extra={"error": str(error)})

    def _finish(self, batch: Batch, timeout_s: float, next_count: int = 0) -> None:
        """``next_count``: so many may be STARTed behind it meanwhile."""
        if batch.is_committed:  # broken off behind that
            self._make_ready(batch)
            return
        try:
            meanwhile = partial(self._begin_next, next_count) if next_count else None
            outcome = self._handover.advance(batch, timeout_s, meanwhile)
        except BaseException:
            self._give_up(batch)
            raise
        if outcome is Commit.PENDING:
            return
        if outcome is Commit.FAILED:
            _log.info("a commit failed and is made again", extra={"queue": self._queue.queue_id})
            self._give_up(batch)
            return
        batch.is_committed = True
        self._make_ready(batch)
        if next_count and not self._handover.late_count:  # this commit was done at once
            self._begin_next(next_count)
        if self._next is not None:  # not before: the client lets no poll in while it commits
            self._reader.poll_ahead(next_count)
            self._commit_next()

    def _commit_next(self) -> None:
        """Commit it while the application works, if its STARTs are known to be in the log (R5)."""
        batch = self._next
        if batch is not None and self._starter.is_in_log(batch):
            self._next, self._batch = None, batch
            try:
                self._finish(batch, 0.0)
            except KafkaMQError as error:  # given up; what is ready goes out all the same
                _log.info("a commit failed and is made again", extra={"error": str(error)})

    def _make_ready(self, batch: Batch) -> None:
        held = self._starter.finish(batch)
        if held:
            self._reader.positions.started(held[-1][0].log_begin_ms)
        messages = [of for _, of in held]
        with self._state.lock:  # in one statement: an interrupt leaves them in one of both
            self.ready, self._batch = deque(chain(self.ready, *messages)), None
        self._recorder.received(held, are_first=batch.is_plain)
        self.ready_count, self.ready_ms = len(self.ready), monotonic_ms()

    def _give_up(self, batch: Batch) -> None:
        """R5: read again from the committed offset; the next step works.

        What was STARTed behind it goes, too: it may be of the same partitions.
        """
        self._batch = batch  # until both are given up
        if self._next is not None:
            self._handover.give_up(self._next)
            self._next = None
        self._batch = None
        self._handover.give_up(batch)

    def _know_topics(self) -> None:
        """Partitions or settings have changed, or the messages are in another topic (R13)."""
        namespace, starter = self._state.namespace, self._starter
        former, starter.facts = starter.facts, namespace.facts()
        if starter.facts.are_of_another_topic(former):
            self._handover.give_up_late()
            self._reader.reread_topic(namespace.certain_until_s + 2 * IDENTITY_AGE_S)

    def take_back(self, handing: Sequence[MarkersMessage]) -> None:
        """A broken-off call had these in its hands, or still among those that are ready."""
        taken = set(map(id, handing))
        with self._state.lock:
            rest = [message for message in self.ready if id(message) not in taken]
            self.ready = deque([*handing, *rest])

    def mend(self) -> None:
        """What a broken-off call has committed is ready, the rest is read again."""
        batch = self._batch
        if batch is not None and batch.is_committed:
            self._make_ready(batch)
        elif batch is not None:
            self._give_up(batch)
        if self._next is not None:
            self._give_up(self._next)
        self._handover.give_up_late()
        self._starter.sweep()
        self._reader.read_again()

    def lost(self, partitions: Sequence[int]) -> None:
        """Partitions went to others; leases of what is held stay."""
        batch = self._batch
        if batch is not None and batch.is_started and not batch.partitions().isdisjoint(partitions):
            _log.debug(
                "partitions went to others with STARTs not committed",
                extra={"queue": self._queue.queue_id, "partitions": list(partitions)},
            )
        self._handover.lost(batch, partitions)
        if self._next is not None:
            self._handover.lost(self._next, partitions)

    def end(self, deadline_s: float) -> None:
        """See what is under way through, and give up what is not in time (monotonic seconds)."""
        while time.monotonic() < deadline_s:
            batch = self._take_next() or self._handover.next_late(is_settled=False)
            if batch is None:
                return
            self._batch = batch
            try:
                self._finish(batch, deadline_s - time.monotonic())
            except KafkaMQError as error:  # given up; the others may come through
                _log.warning(
                    "messages could not be released; they come back when their leases end",
                    extra={"queue": self._queue.queue_id, "error": str(error)},
                )
        batch = self._take_next()
        if batch is not None:
            self._give_up(batch)
        self._handover.give_up_late()

    def release(self, ack_writer: AckWriter) -> None:
        """R8: RELEASE of what is ready, also of what is put back meanwhile."""
        while self.ready:
            released = list(self.ready)
            ack_writer.release(released)
            gone = set(map(id, released))
            with self._state.lock:
                self.ready = deque(each for each in self.ready if id(each) not in gone)
