"""Messages that get their verdicts elsewhere: tokens, holds, and what their holder learns (R34)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import NoReturn, Protocol

from kafkamq.errors import KafkaMQError, LeaseLostError, StateError
from kafkamq.markers.message import MarkersMessage
from kafkamq.markers.rules.leases import Lease, LeaseState, Refusal, Sharing
from kafkamq.markers.state import ConsumerState
from kafkamq.markers.tokens.settler import Settler
from kafkamq.markers.wire.markers import encode_keepalive
from kafkamq.markers.wire.tokens import MessageToken
from kafkamq.queue.ids import new_consumer_id
from kafkamq.queue.wire.partitions import marker_key
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.errors import KafkaError, broker_error
from kafkamq.transport.record import Record
from kafkamq.types import Outcome

HOLD_TIMEOUT_S = 60.0  # a KEEPALIVE is confirmed or failed after 30 s
_LOOKS_PER_TIMEOUT = 3
_log = logging.getLogger(__name__)


class OwnVerdicts(Protocol):
    """The acknowledger of a consumer's other messages."""

    state: ConsumerState
    queue_id: str

    def own_lease(self, message: MarkersMessage) -> Lease:
        """A lease of this message alone, which is held; with the lock held."""

    def extend(self, message: MarkersMessage, extension_ms: int) -> None:
        """Renew its lease; raises ``LeaseLostError`` when that has ended."""

    def has_verdict(self, message: MarkersMessage) -> bool:
        """Whether a verdict was given already, or it was handed over."""

    def check_reason(self, reason: str, outcome: Outcome) -> None:
        """Refuse a reason that cannot be written, and a rejection without one."""

    def refuse(self, message: MarkersMessage, refusal: Refusal) -> NoReturn:
        """Raise why a verdict is none."""

    def forget(self, parts: Sequence[Lease]) -> None:
        """Tell nothing of these from now on."""


class _NotHere:
    """In place of a consumer's state: ``MarkersMessage.ack`` asks its acknowledger then."""

    is_closed = True


class HandOver:
    """The acknowledger of one consumer's messages whose tokens were asked for; thread-safe.

    A verdict of the holder goes the way of everybody's (``Settler``), so that the log says whose
    was first. A thread that runs while there are such messages looks which of them were settled
    elsewhere: these are held and renewed no more.
    """

    state = _NotHere()

    def __init__(self, ack_writer: OwnVerdicts) -> None:
        self._ack_writer = ack_writer
        self._consumer = ack_writer.state
        self.queue_id = ack_writer.queue_id
        self._lock = threading.Lock()
        self._settler: Settler | None = None
        self._shared: dict[Lease, str] = {}  # tokens of what is held, and not held over
        self._watch: threading.Thread | None = None
        self._ending = threading.Event()

    # What ``Message`` calls.

    def token(self, message: MarkersMessage) -> str:
        consumer = self._consumer
        consumer.check()
        with consumer.lock:
            lease = message._lease
            text = self._text(message)
            is_new = lease.sharing is Sharing.NONE and lease.holds(message.offset)
            if is_new:
                lease = self._ack_writer.own_lease(message)
                lease.sharing = Sharing.TOKEN
                message._acknowledger = self  # type: ignore[assignment]  # asked first: its state
        if is_new:
            self._look_after(lease, text)
        return text

    def hold(self, message: MarkersMessage, seconds_ms: int) -> None:
        consumer, now_ms = self._consumer, monotonic_ms()
        consumer.check()
        with consumer.lock:
            lease = self._begin(message, now_ms)
            before_ms, lease.deadline_ms = lease.deadline_ms, now_ms + int(HOLD_TIMEOUT_S * 1000)
            longest_ms = lease.begin_ms + consumer.queue.max_lease_ms - now_ms
        asked_ms = max(1, min(seconds_ms, longest_ms))
        try:
            log_ms = self._write_hold(lease, message, asked_ms)
        except BaseException:  # it is held as before; who knows which KEEPALIVE is in the log
            with consumer.lock:
                lease.sharing, lease.deadline_ms = Sharing.TOKEN, before_ms
                consumer.leases.keep(lease)
            self._look_after(lease, self._text(message))
            raise
        with consumer.lock:
            is_late = 0 <= lease.log_deadline_ms < log_ms  # R9
            lease.deadline_ms = now_ms + asked_ms
            lease.sharing = Sharing.HELD
            consumer.leases.hand_over(lease, message.offset)
        self._ack_writer.forget([lease])
        with self._lock:
            self._shared.pop(lease, None)
        if is_late:
            raise LeaseLostError(
                f"the lease of {message!r} ended before it was held: it may be with another worker",
                (message.message_id,),
            )

    def acknowledge(
        self,
        message: MarkersMessage,
        outcome: Outcome,
        *,
        wait: bool = False,
        reason: str = "",
        delay_ms: int | None = None,
    ) -> None:
        """The holder's verdict, judged by the log."""
        del wait  # it does
        consumer, lease = self._consumer, message._lease
        consumer.check()
        self._ack_writer.check_reason(reason, outcome)
        with consumer.lock:
            self._require_held(message)
            consumer.leases.may_hand_out(lease, monotonic_ms())
            is_lost = lease.state is LeaseState.LOST
        if is_lost:
            self._ack_writer.refuse(message, Refusal.LOST)
        try:
            self._own_settler().settle(
                self._text(message), outcome, reason=reason, delay_ms=delay_ms
            )
        except (StateError, LeaseLostError):
            self._give_up(lease, message.offset)
            raise
        self._give_up(lease, message.offset)

    def extend(self, message: MarkersMessage, extension_ms: int) -> None:
        with self._consumer.lock:
            self._require_held(message)
        self._ack_writer.extend(message, extension_ms)

    def has_verdict(self, message: MarkersMessage) -> bool:
        """Whether there is nothing left to say here."""
        return self._ack_writer.has_verdict(message)

    def note(self, lease: Lease) -> None:
        """Nothing is acked past ``acknowledge``."""

    # Holding.

    def _begin(self, message: MarkersMessage, now_ms: int) -> Lease:
        """The message's own lease, which nothing renews from here on; with the lock held."""
        self._require_held(message)
        self._text(message)  # or nobody could settle it
        if not self._consumer.leases.may_hand_out(message._lease, now_ms):
            self._ack_writer.refuse(message, Refusal.LOST)
        lease = self._ack_writer.own_lease(message)
        lease.sharing = Sharing.HOLDING
        lease.holder_id = new_consumer_id()  # no KEEPALIVE of a consumer renews it
        message._acknowledger = self  # type: ignore[assignment]  # asked first: its state
        return lease

    def _require_held(self, message: MarkersMessage) -> None:
        sharing = message._lease.sharing
        if sharing in (Sharing.HELD, Sharing.HOLDING):
            raise StateError(
                f"{message!r} was handed over by hold(): its verdict is queue.ack(token) or one of "
                "its siblings"
            )
        if self.has_verdict(message):
            self._ack_writer.refuse(message, Refusal.ACKNOWLEDGED_BEFORE)

    def _write_hold(self, lease: Lease, message: MarkersMessage, asked_ms: int) -> int:
        """Its KEEPALIVE is in the log; the log's time."""
        answers: list[tuple[KafkaError | None, int]] = []

        def reported(error: KafkaError | None, record: Record) -> None:
            answers.append((error, -1 if error is not None else record.timestamp()[1]))

        writer, doing = self._consumer.writer, f"holding {message!r}"
        value = encode_keepalive(
            message.message_id, consumer_id=lease.holder_id, redeliver_after_ms=asked_ms
        )
        key = marker_key(lease.partition, message.offset)
        writer.write(value, key, lease.marker_partition, reported)
        writer.confirm(lambda: bool(answers), doing, HOLD_TIMEOUT_S)
        error, log_ms = answers[0]
        if error is not None:
            raise broker_error(error, doing)
        return log_ms

    def _text(self, message: MarkersMessage) -> str:
        lease = message._lease
        if lease.start_offset < 0:
            raise StateError(
                f"{message!r} has no token: Kafka did not say where its START is; give its verdict "
                "here"
            )
        return MessageToken(
            namespace=self._consumer.namespace.config.namespace,
            queue_id=self.queue_id,
            message_id=message.message_id,
            marker_partition=lease.marker_partition,
            start_offset=lease.start_offset,
            holder_id=lease.holder_id,
            delivery_count=message.delivery_count,
            message_ms=message.timestamp_ms if lease.oldest_ms >= 0 else -1,
        ).encode()

    # What was settled elsewhere.

    def _own_settler(self) -> Settler:
        consumer = self._consumer
        with self._lock:
            if self._settler is None:
                self._settler = Settler(consumer.namespace, consumer.queue, consumer.writer)
            return self._settler

    def _give_up(self, lease: Lease, offset: int) -> None:
        """It is settled, here or elsewhere."""
        with self._lock:
            self._shared.pop(lease, None)
        with self._consumer.lock:
            self._consumer.leases.hand_over(lease, offset)
        self._ack_writer.forget([lease])

    def _look_after(self, lease: Lease, text: str) -> None:
        with self._lock:
            self._shared[lease] = text
            if self._watch is None:
                self._watch = threading.Thread(
                    target=self._run, name=f"kafkamq-tokens-{self.queue_id}", daemon=True
                )
                self._watch.start()

    def _run(self) -> None:
        period_s = self._consumer.queue.redelivery_timeout_ms / 1000 / _LOOKS_PER_TIMEOUT
        while not self._ending.wait(period_s):
            with self._lock:
                shared = dict(self._shared)
                if not shared:
                    self._watch = None
                    return
            for lease, text in shared.items():
                if self._ending.is_set():
                    return
                self._look(lease, text, period_s)

    def _look(self, lease: Lease, text: str, period_s: float) -> None:
        if not lease.holds(lease.offsets[0]):
            with self._lock:
                self._shared.pop(lease, None)
            return
        try:
            if self._own_settler().is_settled(text, timeout_s=max(1.0, period_s)):
                self._give_up(lease, lease.offsets[0])
                _log.debug("a message was settled elsewhere", extra={"queue": self.queue_id})
        except KafkaMQError as error:
            _log.info(
                "it is not known whether a message was settled elsewhere",
                extra={"queue": self.queue_id, "error": str(error)},
            )
        except Exception:  # noqa: BLE001 - the others are looked after all the same
            _log.exception("a message's token could not be looked after")

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread; what is held over stays so, the rest runs out."""
        self._ending.set()
        with self._lock:
            watch, settler = self._watch, self._settler
        if watch is not None and watch is not threading.current_thread():
            watch.join(timeout_s)
        if settler is not None:
            settler.close()
