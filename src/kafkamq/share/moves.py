"""Messages of a share group that leave their place: as dead letters, or as copies to the tail.

The broker gives a record up, in silence, when its last delivery ends with anything but an
acknowledgement, and no lock can be renewed. So what is not done and comes to its last delivery
must be written elsewhere before that ends:

- M1. Who is given up is a dead letter first; the record is acknowledged when that is in Kafka.
- M2. While a dead letter is refused its record is held. Shortly before its lock ends, in its last
  delivery after a few seconds, the message is copied to the tail of its queue with what was decided
  of it: no handler is asked again. What comes first, letter or copy, counts.
- M3. What is to be delivered again, and has no more delivery but the last one, is copied as well.
- M4. Nothing of this is forgotten when a lock has ended: a record that comes again is acknowledged
  by what became of it.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from kafkamq.queue.dead_letter_writer import RequeueWriter, Verdict
from kafkamq.share.member import Member, ShareMessage
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.record import AcknowledgeType

_PATIENCE_MS = 5000  # of a copy before its lock ends; a third of a shorter lock
_log = logging.getLogger(__name__)
_Key = tuple[int, int, int]


@dataclass(slots=True, eq=False)
class _Move:
    message: ShareMessage | None  # None: its lock has ended
    verdict: Verdict | None
    count: int  # of the copy's next delivery
    letter: Future[None] | None = None
    copy: Future[None] | None = None
    began_ms: int = field(default_factory=monotonic_ms)
    ended_ms: int = 0
    kind: AcknowledgeType = AcknowledgeType.RELEASE


class Moves:
    """What is under way, and what was lately; guarded by the consumer's lock.

    Args:
        letters: Who writes.
        changed: The consumer's lock; notified when something has ended.
        limit: The broker's deliveries.
        lock_ms: How long a record is held.
    """

    def __init__(
        self, dead_letters: RequeueWriter, changed: threading.Condition, *, limit: int, lock_ms: int
    ) -> None:
        self._dead_letters = dead_letters
        self._changed = changed
        self._limit = limit
        self._lock_ms = lock_ms
        self._patience_ms = min(_PATIENCE_MS, lock_ms // 3)
        self._open: dict[_Key, _Move] = {}
        self._ended: dict[_Key, _Move] = {}  # in the order of their ends

    @property
    def open_count(self) -> int:
        return len(self._open)

    def is_last(self, message: ShareMessage) -> bool:
        """Whether the broker gives it up after this delivery."""
        return message.broker_count >= self._limit

    def is_near_last(self, message: ShareMessage) -> bool:
        """Whether the next delivery would be the last one."""
        return message.broker_count + 1 >= self._limit

    def bury(self, message: ShareMessage, verdict: Verdict) -> None:
        """Write a dead letter (M1); with the lock held."""
        move = _Move(message, verdict, message.delivery_count + 1)
        self._open[message.key_of_place] = move
        move.letter = self._dead_letters.write(message, *verdict)
        self._watch(message.key_of_place, move, move.letter, AcknowledgeType.REJECT)

    def send_back(self, message: ShareMessage, count: int) -> None:
        """Copy a message to the tail (M3); its next delivery has that count. With the lock held."""
        move = _Move(message, None, count)
        self._open[message.key_of_place] = move
        self._copy(message, move)

    def take_over(self, message: ShareMessage) -> bool:
        """Tell whether a record that has come is one of these (M4); with the lock held."""
        self._forget(monotonic_ms() - 4 * self._lock_ms)
        key = message.key_of_place
        move = self._open.get(key) or self._ended.get(key)
        if move is None:
            return False
        if move.ended_ms:
            message.member.acknowledge(message, move.kind)
        else:
            move.message = message
        return True

    def look_after(self, member: Member, now_ms: int) -> None:
        """Copy what is refused for too long (M2); with the lock held, by the member's thread."""
        for key, move in list(self._open.items()):
            message = move.message
            if message is None or message.place is not member:
                continue
            copy_ms = message._deadline_ms - self._patience_ms
            if self.is_last(message):
                copy_ms = min(copy_ms, move.began_ms + self._patience_ms)
            if move.copy is None and now_ms > copy_ms:
                _log.error(
                    "a dead letter is not written, and the lock of its message ends: it is copied"
                    " to the queue's tail",
                    extra={"queue": message.queue_id, "place": repr(message)},
                )
                self._copy(message, move, key)
            if now_ms > message._deadline_ms:
                move.message = None
                member.acknowledge(message, AcknowledgeType.RELEASE, is_late=True)

    def hurry(self) -> None:
        """Copy what is in its last delivery, as the consumer ends; with the lock held."""
        for key, move in list(self._open.items()):
            if move.message is not None and move.copy is None and self.is_last(move.message):
                self._copy(move.message, move, key)

    def _copy(self, message: ShareMessage, move: _Move, key: _Key | None = None) -> None:
        move.copy = self._dead_letters.copy(message, move.count, move.verdict)
        self._watch(key or message.key_of_place, move, move.copy, AcknowledgeType.ACCEPT)

    def _watch(self, key: _Key, move: _Move, future: Future[None], kind: AcknowledgeType) -> None:
        def ended(outcome: Future[None]) -> None:
            if not outcome.cancelled():
                self._end(key, move, outcome.exception(), kind)

        future.add_done_callback(ended)

    def _end(
        self, key: _Key, move: _Move, failure: BaseException | None, kind: AcknowledgeType
    ) -> None:
        with self._changed:
            if move.ended_ms:
                return
            futures = [each for each in (move.letter, move.copy) if each is not None]
            if failure is not None:
                self._failed(key, move, failure, all(each.done() for each in futures))
                return
            move.ended_ms, move.kind = monotonic_ms(), kind
            for other in futures:
                other.cancel()
            self._open.pop(key, None)
            self._ended[key] = move
            message, move.message = move.message, None
            self._changed.notify_all()
        if move.verdict is not None and kind is AcknowledgeType.REJECT:
            _log.info("a message is given up; it is a dead letter", extra={"place": key})
        if message is not None:
            message.member.acknowledge(message, kind)

    def _failed(self, key: _Key, move: _Move, failure: BaseException, is_over: bool) -> None:
        """At the end of the consumer only; with the lock held."""
        if not is_over:
            return
        self._open.pop(key, None)
        message = move.message
        is_last = message is None or self.is_last(message)
        _log.error(
            "a message could be written neither to the dead letters nor to its queue; %s",
            "the broker may give it up" if is_last else "it comes again",
            extra={"place": key, "error": str(failure)},
        )
        self._changed.notify_all()

    def _forget(self, before_ms: int) -> None:
        while self._ended:
            key, move = next(iter(self._ended.items()))
            if move.ended_ms > before_ms:
                return
            del self._ended[key]
