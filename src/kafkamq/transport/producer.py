"""The producer of what is written outside of transactions: idempotent, acks=all.

A record is in the log when its own delivery report says so, and by nothing else: the client that
has nothing under way may be another one than took the record.

A fatal error ends librdkafka's client. The thread that serves reports next makes a new one: what
the former one held would never be sent, so it is reported as failed at once.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import methodcaller
from typing import Any, TypeAlias

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import Message as Record

from kafkamq.config import ServiceConfig
from kafkamq.errors import StateError
from kafkamq.transport.clients import (
    FLUSH_SLICE_S,
    ForkCheck,
    Producer,
    flush_in_slices,
    open_producer,
)
from kafkamq.transport.errors import (
    REFUSALS,
    ErrorWatch,
    Meaning,
    broker_error,
    has_ended,
    kafka_error,
    meaning,
    raised_error,
)
from kafkamq.types import Headers

Report: TypeAlias = "Callable[[KafkaError | None, Record], None]"
NewRecord: TypeAlias = tuple[bytes | None, bytes | None, int, "Headers | None", Report]
"""Value, key, partition (-1: the client's choice), headers, and who is told what became of it."""

# A flush that ends what lingers.
_SET_OUT_S = 0.005
_SLICE_S = 0.25
_POLL_S = 0.5
_CONFIRM_S = 1.0
_TURN_S = 0.002
_SHORT_TURN_S = 0.0005
_ROOM_S = 0.005
_METADATA_S = 5.0
_SHARE_S = 0.0003
_SHARE_COUNT = 500
_MAX_SHARE_COUNT = 8000
_MAX_TURNS = 4
# The delay of reports where the process stood still.
_LATE_S = 30.0
_REPORTS_S = 0.5
NEVER_REPORTED = KafkaError(KafkaError._PURGE_QUEUE, "its client was recreated")
"""What became of a record whose report is not there when ``is_idle``; it may be in the log."""
_FULL = KafkaException(KafkaError(KafkaError._QUEUE_FULL, "the queue is full"))
_log = logging.getLogger(__name__)


def end_producer(client: Producer, *, flush_s: float = 0.0) -> None:
    """End a producer; what it still holds after ``flush_s`` fails, and is reported, at once."""
    with suppress(KafkaException, SystemError):
        # A fatal error is known, or does not matter.
        flush_in_slices(client, flush_s)
    deadline_s = time.monotonic() + _REPORTS_S
    if len(client):
        with suppress(KafkaException, SystemError):
            partial(client.purge)()
    held, left = math.inf, len(client)
    # Once at least, and on while reports come: this thread may have stood still for so long.
    while left and (left < held or time.monotonic() < deadline_s):
        try:
            with suppress(KafkaException, SystemError):
                # Reports stand behind it.
                partial(client.flush)(FLUSH_SLICE_S)
        except Exception:  # noqa: BLE001 - the other reports must come all the same
            _log.exception("a delivery report could not be passed on")
        held, left = left, len(client)
    # It may return with a fatal error raised, which would come up in any later line: calls through
    # ``partial`` are checked for that.
    with suppress(KafkaException, SystemError):
        partial(client.close)()


def _runs_a_loop() -> bool:
    """Return whether this thread runs an event loop; asks without an import of asyncio."""
    running = getattr(sys.modules.get("asyncio.events"), "_get_running_loop", None)
    return running is not None and running() is not None


class IdempotentProducer:
    """One client after the other, as long as one is not closed; thread-safe.

    Delivery reports are served by ``serve``, ``flush`` and ``wait_for``, by one thread at a time.
    They take locks of their own, so call none of these with one held that a report takes.

    Args:
        settings: Of the client, from ``producer_settings``.
        owner: Who has it, for people.
        verb: What it does, for people: "sending".
        max_block_s: How long ``produce`` waits while the queue is full, or the client is recreated.

    Attributes:
        watch: The error callback of the present client.
        queued: Records that ``produce`` has queued so far.
    """

    def __init__(
        self,
        config: ServiceConfig,
        settings: dict[str, object],
        *,
        owner: str = "consumer",
        verb: str = "writing",
        max_block_s: float = 0.0,
    ) -> None:
        self.watch = ErrorWatch(config.bootstrap_servers)
        self.queued = 0
        # The number of queued records at which others get a turn.
        self._turn_at = math.inf
        self._servers = config.bootstrap_servers
        self._settings = settings
        self._owner = owner
        self._verb = verb
        self._max_block_s = max_block_s
        self._fork = ForkCheck("Producer")
        # ``_lock`` is taken before ``_client`` is read. Calls that wait take one of the others;
        # who replaces the client takes all three, in this order, and ends it with the first one.
        self._serving = threading.Lock()
        self._refreshing = threading.Lock()
        self._lock = threading.Lock()
        self._client = open_producer(settings, self.watch)
        self._must_renew = False
        self._fatal: KafkaError | None = None
        self._refusal: KafkaError | None = None
        self._is_closed = False
        # In the object: a report may run with librdkafka's fatal error raised, and then Python
        # finds no name in a base class.
        self.failed = self._cause

    def __len__(self) -> int:
        with self._lock:
            return len(self._client)

    def _closed(self) -> StateError:
        return StateError(f"the {self._owner} is closed; it writes no more")

    def check(self, doing: str) -> None:
        """Raise what no waiting can mend."""
        self._fork.check()
        if self._is_closed:
            raise self._closed()
        if not self._must_renew:
            # A fatal error of the old client is no reason to stop.
            self.watch.check(doing)

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int,
        headers: Headers | None,
        on_delivery: Report,
        max_block_s: float | None = None,
    ) -> None:
        """Queue one record.

        Args:
            partition: -1: the client's choice.
            on_delivery: Told what became of it.
            max_block_s: In the place of the producer's own.

        Raises:
            StateError: Closed, or in a forked child.
            BrokerError: The client refuses it; without a wait also that the queue is full.
            DeadlineExceededError: The queue stayed full; the record is not sent.
        """
        deadline_s, is_refreshed = 0.0, False
        most_s = self._max_block_s if max_block_s is None else max_block_s
        own: list[tuple[str, str | bytes | None]] | None = None if headers is None else [*headers]
        while True:
            if self._fork.is_forked or (most_s and self.watch.is_troubled):
                self.check(self._verb)
            with self._lock:
                if self._is_closed:
                    raise self._closed()
                client = self._client
                # This comes first: what an interrupt breaks off is never "confirmed".
                self.queued += 1
                try:
                    # By position: names would cost a quarter more.
                    client.produce(topic, value, key, partition, on_delivery, None, 0, own)
                    break
                except BufferError:
                    refused = _FULL
                except KafkaException as error:
                    refused = error
                    self._must_renew = self._must_renew or has_ended(error)
                except Exception:
                    self.queued -= 1
                    raise
                self.queued -= 1
            if not is_refreshed and self._refresh(client, topic, refused):
                is_refreshed = True
                continue
            is_over = has_ended(refused)
            if not most_s or not (is_over or refused is _FULL):
                raise broker_error(refused, f"{self._verb} to {topic}") from refused
            now_s = time.monotonic()
            deadline_s = deadline_s or now_s + most_s
            if now_s >= deadline_s:
                why = "the producer is being recreated" if is_over else "the queue is full"
                raise self.watch.deadline(f"{self._verb} ({why})", most_s)
            self._make_room()
        if self.queued >= self._turn_at:
            self._give_turn()

    def produce_all(self, topic: str, records: Sequence[NewRecord]) -> int:
        """Queue records, without a wait; how many are queued before one that is not.

        ``produce`` tries that one again, and says why.
        """
        if self._fork.is_forked or self.watch.is_troubled:
            self.check(self._verb)
        with self._lock:
            if self._is_closed:
                raise self._closed()
            produce = self._client.produce
            for number, (value, key, partition, headers, on_delivery) in enumerate(records):
                own = None if headers is None else [*headers]
                self.queued += 1
                try:
                    produce(topic, value, key, partition, on_delivery, None, 0, own)
                except Exception:  # noqa: BLE001 - ``produce`` meets it
                    self.queued -= 1
                    return number
        if self.queued >= self._turn_at:
            self._give_turn()
        return len(records)

    def produce_many(self, topic: str, partition: int, records: list[dict[str, Any]]) -> None:
        """Queue records of one partition, without a wait; those not queued have an ``_error``."""
        self._fork.check()
        with self._lock:
            if self._is_closed:
                raise self._closed()
            try:
                queued = self._client.produce_batch(topic, records, partition)
                error = None
            except KafkaException as refused:
                error = refused
                self._must_renew = self._must_renew or has_ended(error)
        if error is not None:
            for record in records:
                record["_error"] = error
            raise broker_error(error, f"{self._verb} to {topic}") from error
        if queued == len(records):
            return
        for record in records:
            if "_error" in record:
                # The queue is full, or the partition is new: the error says which.
                self.produce(
                    topic, record["value"], record["key"], partition, None, record["callback"]
                )
                del record["_error"]

    def _refresh(self, client: Producer, topic: str, error: KafkaException) -> bool:
        """Return whether the client knows a new partition now (R26): it looks every 5 minutes."""
        if meaning(error) is not Meaning.NO_PARTITION:
            return False
        # It takes seconds: others may write meanwhile.
        with self._refreshing:
            if self._client is not client or self._is_closed:
                return not self._is_closed
            try:
                client.list_topics(topic, timeout=_METADATA_S)
            except KafkaException:
                return False
        return True

    def _make_room(self) -> None:
        self.serve(_ROOM_S)

    def _give_turn(self) -> None:
        """Let others run; see ``ThreadedProducer``."""

    def _cause(self, error: KafkaError) -> KafkaError:
        """Return for reports why a record failed that may have gone with its client."""
        if error.fatal():
            self._must_renew = self._must_renew or self._fatal is None
        elif self._fatal is not None and meaning(error) is Meaning.PURGED:
            return self._fatal
        return error

    # Reports.

    def serve(self, timeout_s: float) -> None:
        """Serve reports for so long, or until there are some; a client that failed is replaced."""
        self._serve(methodcaller("poll", timeout_s))
        self.watch.check(self._verb)
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            # It is told once: the next client may be luckier.
            raise broker_error(refusal, f"{self._verb} to {self._servers}")

    def flush(self, timeout_s: float) -> None:
        """Serve reports until nothing is under way, or the time is over."""
        self._raise(self._serve(partial(flush_in_slices, timeout_s=timeout_s)))

    def wait_for(self, is_known: Callable[[], bool], timeout_s: float) -> bool:
        """Serve reports until ``is_known()``, which reads what they said; False: not in time.

        Other records that are under way are not waited for. Also False, and at once, when nothing
        is under way any more: then the report will never come.
        """
        deadline_s = time.monotonic() + timeout_s
        self._serve_if_free(methodcaller("poll", 0.0))
        if is_known():
            # A flush would wait for other records, too.
            return True
        self._serve_if_free(partial(flush_in_slices, timeout_s=min(timeout_s, _SET_OUT_S)))
        while not is_known():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or self.is_idle:
                return is_known()
            self._serve_if_free(methodcaller("poll", min(left_s, _SLICE_S)))
            # Without it other threads that wait would never get their turn.
            time.sleep(_SHORT_TURN_S)
        return True

    def _serve_if_free(self, call: Callable[[Producer], int]) -> None:
        """A thread that serves reports serves all, and may do so for long: it is not waited for."""
        if not self._serving.locked():
            self._raise(self._serve(call))

    def confirm(self, is_known: Callable[[], bool], doing: str, timeout_s: float) -> None:
        """Wait until it is known; raise DeadlineExceededError where that is not in time."""
        deadline_s = time.monotonic() + timeout_s
        while not self.wait_for(is_known, min(_CONFIRM_S, deadline_s - time.monotonic())):
            self.check(doing)
            is_over = self.is_idle and not is_known()
            if is_over or time.monotonic() > deadline_s:
                raise self.watch.deadline(doing, timeout_s)

    @property
    def is_idle(self) -> bool:
        """Whether no record is under way and all reports have run; not while some are served.

        A record without a report was then in a client that is gone, or an interrupt took it.
        """
        if self._serving.locked():
            # A report that runs is not counted.
            return False
        with self._serving:
            return len(self) == 0

    def _serve(self, call: Callable[[Producer], int]) -> KafkaException | None:
        """The fatal error of a client that held records; another one has taken its place."""
        failure: KafkaException | None = None
        held = 0
        with self._serving:
            if self._is_closed:
                return None
            client = self._client
            try:
                call(client)
            except (KafkaException, SystemError) as error:
                failure = raised_error(error)
                # It is counted only now: before, the error itself was counted, too.
                held = len(client)
        if failure is not None or self._must_renew:
            self._renew(client, failure)
        return failure if held else None

    def _raise(self, failure: KafkaException | None) -> None:
        if failure is not None:
            # Else nobody's record has failed: the next one meets the cause.
            raise broker_error(failure, f"{self._verb} to {self._servers}") from failure

    # Clients.

    def _renew(self, spent: Producer, error: KafkaException | None) -> None:
        """Make a new client after a fatal error; what the old one held is reported as failed."""
        cause = kafka_error(error or KafkaException(KafkaError(KafkaError._FATAL)))
        with self._serving:
            with self._refreshing, self._lock:
                if self._is_closed or self._client is not spent:
                    # Another thread has replaced it.
                    return
                self.watch = ErrorWatch(self._servers)
                self._client = open_producer(self._settings, self.watch)
                self._must_renew = False
                if meaning(cause) in REFUSALS:
                    self._refusal = cause
            self._fatal = cause
            try:
                end_producer(spent)
            finally:
                self._fatal = None
        _log.error("a producer failed for good and was recreated: %s", cause.str())

    def close(self, timeout_s: float = 0.0) -> None:
        """End the client; what is not confirmed by then fails, and is reported. Idempotent."""
        if self._fork.is_forked:
            return
        with self._serving:
            with self._refreshing, self._lock:
                if self._is_closed:
                    return
                self._is_closed = True
            end_producer(self._client, flush_s=timeout_s)


class ThreadedProducer(IdempotentProducer):
    """One whose reports run in a thread of its own.

    Each ``on_delivery`` ends with ``reported += 1``, whatever becomes of it: a wrapper that did so
    would cost a sixth of a send.

    Args:
        name: Of the thread.
        on_start: Called by the thread when it begins.
        on_turn: Called by the thread now and then.
    """

    def __init__(
        self,
        config: ServiceConfig,
        settings: dict[str, object],
        *,
        name: str,
        on_start: Callable[[], object] = lambda: None,
        on_turn: Callable[[], object] = lambda: None,
        **more: Any,
    ) -> None:
        super().__init__(config, settings, **more)
        self.reported = 0
        """Of what was queued. Reports run in the thread alone."""
        self._turn_at = self._turn_count = _SHARE_COUNT
        timeout_ms = float(str(settings.get("message.timeout.ms", 0)))
        most_s = timeout_ms / 1000 + self._max_block_s + _LATE_S
        self.report_s = most_s if timeout_ms else math.inf
        """How long a report takes at most from the call on, unless it never comes."""
        self._on_start, self._on_turn = on_start, on_turn
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._on_start()
        while not self._is_ending.is_set():
            self._turn()
        # Reports run in this thread alone.
        super().close()

    def _turn(self) -> None:
        before = self.reported
        try:
            self._serve(methodcaller("poll", _POLL_S))
            self._on_turn()
        except BaseException:  # noqa: BLE001 - the other reports must come all the same
            _log.exception("a delivery report could not be passed on")
            if self.reported == before:
                # It is no report's fault: the next turn may fail at once, too.
                self._is_ending.wait(_POLL_S)

    def _make_room(self) -> None:
        # The thread that serves reports makes room meanwhile.
        time.sleep(_ROOM_S)

    def _give_turn(self) -> None:
        """Wait a moment for the thread of the reports, longer while it catches up.

        A thread that sends without a pause keeps the interpreter's lock, and what it has sent
        leaves the processor's cache before it is reported: that costs a fifth of each send. A
        thread that runs an event loop is not kept: its coroutines wait where they can.
        """
        if _runs_a_loop():
            self._turn_at = self.queued + _SHARE_COUNT
            return
        first = self.reported
        for _ in range(_MAX_TURNS):
            before = self.reported
            time.sleep(_SHARE_S)
            is_behind = self.queued - self.reported > _SHARE_COUNT
            if not is_behind or self.reported - before < _SHARE_COUNT // 4:
                break
        # Brokers that answer late have nothing for it yet.
        wait = 2 * self._turn_count if self.reported == first else _SHARE_COUNT
        self._turn_count = min(wait, _MAX_SHARE_COUNT)
        self._turn_at = self.queued + self._turn_count

    def flush(self, timeout_s: float) -> None:
        """Wait until everything queued so far is confirmed or failed, each by its own report."""
        deadline_s = time.monotonic() + timeout_s
        while self.reported < self.queued:
            self.check("flushing")
            if time.monotonic() >= deadline_s:
                count = self.queued - self.reported
                raise self.watch.deadline(f"confirming {count} sends", timeout_s)
            time.sleep(_TURN_S)

    def close(self, timeout_s: float = 0.0) -> None:
        if self._is_closed or self._fork.is_forked:
            return
        try:
            self.flush(timeout_s)
        finally:
            self._is_ending.set()
            self._thread.join(4 * _POLL_S)
