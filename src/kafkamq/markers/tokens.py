"""Verdicts by token (R34): given from any process, written as ENDs, and judged by the log.

``TokenSettler`` gives them; ``HandOver`` has a consumer's messages whose tokens were asked for.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from kafkamq.config import QueueConfig
from kafkamq.errors import (
    ConfigError,
    DataLossError,
    DeadlineExceededError,
    KafkaMQError,
    LeaseLostError,
    StateError,
    WireError,
)
from kafkamq.markers.ack_writer import OF_OUTCOME, AckWriter
from kafkamq.markers.message import MarkersMessage
from kafkamq.markers.rules.attempts import Fate, Fates
from kafkamq.markers.rules.hold import NEVER
from kafkamq.markers.rules.leases import Lease, LeaseState, Refusal, Sharing
from kafkamq.markers.state import MarkerWriter, nack_ms
from kafkamq.markers.wire.marker_writer import (
    MAX_DURATION_MS,
    encode_identity,
    encode_keepalive,
    encode_known_end,
)
from kafkamq.markers.wire.markers import decode_slim
from kafkamq.markers.wire.tokens import MessageToken, decode_token
from kafkamq.metrics import catalog
from kafkamq.queue.names import group_of_workers, new_consumer_id
from kafkamq.queue.namespace import Namespace
from kafkamq.queue.wire.headers import cut_text
from kafkamq.queue.wire.keys import marker_key
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.errors import KafkaError, broker_error
from kafkamq.transport.log_reader import LogRange, LogReader
from kafkamq.transport.record import LOG_APPEND_TIME, Record
from kafkamq.types import Outcome

# A KEEPALIVE is confirmed or failed after 30 s.
HOLD_TIMEOUT_S = 60.0
_LOOKS_PER_TIMEOUT = 3
_log = logging.getLogger(__name__)
_WORDS = {
    Outcome.ACK: "acked",
    Outcome.NACK: "nacked",
    Outcome.REJECT: "rejected",
}


class _NotHere:
    """In place of a consumer's state it has ``MarkersMessage.ack`` ask its acknowledger."""

    is_closed = True


class HandOver:
    """The acknowledger of one consumer's messages whose tokens were asked for; thread-safe.

    A verdict of the holder goes everybody's way (``TokenSettler``), so that the log says whose
    was first. A thread that runs while there are such messages looks which of them were settled
    elsewhere: these are held and renewed no more.
    """

    state = _NotHere()

    def __init__(self, ack_writer: AckWriter) -> None:
        """``ack_writer`` is the acknowledger of the consumer's other messages."""
        self._ack_writer = ack_writer
        self._consumer = ack_writer.state
        self.queue_id = ack_writer.queue_id
        self._lock = threading.Lock()
        self._settler: TokenSettler | None = None
        self._shared: dict[Lease, str] = {}
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
        except BaseException:
            # It is held as before; nobody knows which KEEPALIVE is in the log.
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
        """Take the holder's verdict, judged by the log."""
        # It always waits.
        del wait
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
        return self._ack_writer.has_verdict(message)

    def note(self, lease: Lease) -> None: ...

    # Holding.

    def _begin(self, message: MarkersMessage, now_ms: int) -> Lease:
        """Return the message's own lease, which nothing renews from here on; with the lock held."""
        self._require_held(message)
        # Without a token nobody could settle it.
        self._text(message)
        if not self._consumer.leases.may_hand_out(message._lease, now_ms):
            self._ack_writer.refuse(message, Refusal.LOST)
        lease = self._ack_writer.own_lease(message)
        lease.sharing = Sharing.HOLDING
        # No KEEPALIVE of a consumer renews it.
        lease.holder_id = new_consumer_id()
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
        """Write its KEEPALIVE, and return the log's time when it is in the log."""
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

    def _own_settler(self) -> TokenSettler:
        consumer = self._consumer
        with self._lock:
            if self._settler is None:
                self._settler = TokenSettler(consumer.namespace, consumer.queue, consumer.writer)
            return self._settler

    def _give_up(self, lease: Lease, offset: int) -> None:
        """Let go of a message that has been settled, here or elsewhere."""
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


@dataclass(slots=True)
class _Written:
    is_known: bool = False
    error: KafkaError | None = None
    # -1: it is not reported, has failed, or Kafka did not say.
    offset: int = -1


class TokenSettler:
    """Gives verdicts on a queue's messages by their tokens; thread-safe.

    Each call waits until the log says what became of its verdict. ``writer`` is a consumer's; None:
    it has one of its own.
    """

    def __init__(
        self, namespace: Namespace, queue: QueueConfig, writer: MarkerWriter | None = None
    ) -> None:
        self._namespace = namespace
        self._queue = queue
        self._lock = threading.Lock()
        self._writer = writer
        self._is_owner = writer is None
        self._id = new_consumer_id()
        self._reading = threading.Lock()
        self._reader: LogReader | None = None
        self._is_closed = False

    # What a user asks for; errors as ``Queue.ack`` has them.

    def settle(
        self,
        text: str,
        outcome: Outcome,
        *,
        reason: str = "",
        delay_ms: int | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        deadline_s = time.monotonic() + timeout_s
        token = self._checked(text)
        one = token.message_id
        identity = encode_identity(one.partition, one.offset, *one.log)
        wait_ms = 0
        if outcome is Outcome.NACK:
            wait_ms = nack_ms(
                self._namespace,
                self._queue.backoff,
                delay_ms,
                delivery_count=token.delivery_count,
                message_ms=token.message_ms,
            )
        reason = cut_text(reason) if reason else ""
        value = encode_known_end(identity, outcome, self._id, wait_ms, reason)
        offset = self._write(token, value, deadline_s)
        fates, fate = self._read(token, offset + 1, deadline_s)
        if fate.counts(offset):
            OF_OUTCOME[outcome].add(1, self._queue.queue_id, one.partition)
            return
        catalog.LATE_VERDICTS.add(1, self._queue.queue_id, one.partition)
        raise _refusal(token, fate, fates.is_due(one))

    def extend(self, text: str, extension_ms: int, *, timeout_s: float = 30.0) -> None:
        """Hold a message for at least so long from now."""
        deadline_s = time.monotonic() + timeout_s
        token = self._checked(text)
        fates, fate = self._read(token, None, deadline_s)
        if not fates.is_held(token.message_id):
            raise _refusal(token, fate, fates.is_due(token.message_id))
        holder_id, left_ms = fates.held(token.message_id)
        value = encode_keepalive(
            token.message_id,
            consumer_id=holder_id,
            redeliver_after_ms=min(max(extension_ms, left_ms), MAX_DURATION_MS),
        )
        offset = self._write(token, value, deadline_s)
        fates, fate = self._read(token, offset + 1, deadline_s)
        if not fates.is_held(token.message_id):
            raise _refusal(token, fate, fates.is_due(token.message_id))

    def is_settled(self, text: str, *, timeout_s: float = 30.0) -> bool:
        token = self._checked(text)
        _, fate = self._read(token, None, time.monotonic() + timeout_s)
        return fate.first is not None

    def close(self, timeout_s: float = 30.0) -> None:
        with self._lock:
            self._is_closed = True
            writer = self._writer if self._is_owner else None
        with self._reading:
            reader, self._reader = self._reader, None
            if reader is not None:
                reader.close()
        if writer is not None:
            writer.close()

    # The token.

    def _checked(self, text: str) -> MessageToken:
        self._require_open()
        token = decode_token(text)
        namespace, queue_id = self._namespace.config.namespace, self._queue.queue_id
        if token.namespace != namespace:
            raise ConfigError(
                f"token is of namespace {token.namespace!r}: this service is {namespace!r}'s"
            )
        if token.queue_id != queue_id:
            raise ConfigError(f"token is of queue {token.queue_id!r}: this one is {queue_id!r}")
        topic_id, facts = token.message_id.topic_id, self._namespace.facts()
        is_other = topic_id and facts.message_topic_id not in (b"", topic_id)
        is_beyond = token.marker_partition >= facts.marker_partitions
        if is_other or is_beyond:
            # The facts that say so may be old.
            facts = self._namespace.ask_again()
        if topic_id and facts.message_topic_id not in (b"", topic_id):
            raise StateError(
                f"token is of topic {self._namespace.config.message_topic} as it was before it was "
                "recreated: its message is gone"
            )
        if token.marker_partition >= facts.marker_partitions:
            raise StateError(
                f"token names partition {token.marker_partition} of the markers, which have "
                f"{facts.marker_partitions}: their topic was recreated, or it is another cluster's"
            )
        return token

    # Writing.

    def _opened(self) -> MarkerWriter:
        with self._lock:
            self._require_open()
            if self._writer is None:
                self._writer = MarkerWriter(self._namespace)
            return self._writer

    def _require_open(self) -> None:
        if self._is_closed:
            raise StateError("the service is closed: it gives no verdicts any more")

    def _write(self, token: MessageToken, value: bytes, deadline_s: float) -> int:
        """Write one marker of the token's message; its offset."""
        written, began_ms, one = _Written(), monotonic_ms(), token.message_id

        def reported(error: KafkaError | None, record: Record) -> None:
            if error is None:
                self._namespace.broker_clock.reported(record.timestamp()[1], began_ms)
                offset = record.offset()
                written.offset = -1 if offset is None else offset
            else:
                written.error = error
            # It comes last: a thread that waits for it reads the others then.
            written.is_known = True

        key, route = marker_key(one.partition, one.offset), token.marker_partition
        doing = f"writing a verdict on message {one.partition}/{one.offset}"
        writer = self._opened()
        writer.write(value, key, route, reported)
        try:
            writer.confirm(lambda: written.is_known, doing, deadline_s - time.monotonic())
        except StateError as error:
            # It was closed meanwhile: the verdict may be in the log.
            raise _unread(token) from error
        if written.error is not None:
            raise broker_error(written.error, doing)
        if written.offset < 0:
            # It was a repeated write of which the broker knows no more.
            raise _unread(token)
        return written.offset

    # Reading what became of it.

    def _read(self, token: MessageToken, end: int | None, deadline_s: float) -> tuple[Fates, Fate]:
        """Return the markers from the START to ``end``, or the log's, folded for this message."""
        if not self._reading.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise _unread(token)
        try:
            return self._read_now(token, end, deadline_s)
        except DataLossError as error:
            raise LeaseLostError(
                f"the markers of message {_place(token)} are gone: its lease ended long ago",
                (token.message_id,),
            ) from error
        finally:
            self._reading.release()

    def _read_now(
        self, token: MessageToken, end: int | None, deadline_s: float
    ) -> tuple[Fates, Fate]:
        if self._is_closed:
            raise _unread(token)
        config, number = self._namespace.config, token.marker_partition
        retention_ms = self._namespace.facts().marker_retention_ms
        longest_ms = NEVER if retention_ms < 0 else retention_ms // 2
        fates = Fates(number, token.start_offset, longest_ms=longest_ms)
        fate = fates.watch(token.message_id)
        reader = self._reader
        if reader is None:
            group = group_of_workers(config, self._queue)
            reader = self._reader = LogReader(config, group_id=group)
        if end is None:
            end = reader.log_ends(config.marker_topic, [number])[number]
        left_s = max(0.1, deadline_s - time.monotonic())
        wanted = LogRange(config.marker_topic, number, token.start_offset, end)
        for records in reader.read(wanted, stall_s=left_s):
            for record in records:
                kind, timestamp_ms = record.timestamp()
                log_ms = timestamp_ms if kind == LOG_APPEND_TIME else -1
                try:
                    marker = decode_slim(record.value())
                except WireError:
                    marker = None
                fates.apply(record.offset(), log_ms, marker)
            if time.monotonic() > deadline_s:
                raise _unread(token)
        return fates, fate


def _place(token: MessageToken) -> str:
    return f"{token.message_id.partition}/{token.message_id.offset}"


def _unread(token: MessageToken) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"what became of message {_place(token)} was not read in time: a verdict that was written "
        "stands in the log; ask again with a longer timeout"
    )


def _refusal(token: MessageToken, fate: Fate, is_due: bool) -> StateError | LeaseLostError:
    first, what = fate.first, f"message {_place(token)} of queue {token.queue_id!r}"
    if first is not None and first.outcome in _WORDS:
        return StateError(
            f"{what} has a verdict already: it was {_WORDS[first.outcome]} at {first.offset} of "
            "its marker partition; one in all"
        )
    if first is not None or is_due:
        return LeaseLostError(
            f"the lease of {what} ended before the verdict: it may be with another worker (hold() "
            "it for longer)",
            (token.message_id,),
        )
    return StateError(f"{what} is not held: the markers do not have the START that its token names")
