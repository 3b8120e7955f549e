"""What follows when a handler fails or gives a verdict: another attempt, or a dead letter.

A record whose dead letter is refused is given up all the same: its handler is not called again. It
stays open, and what is behind it in its order waits, until the letter is kept. Before each try the
partition is asked whether the record is open still; the letter of one that was done meanwhile, or
whose partition went, is not written.
"""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from kafkamq.config import Backoff
from kafkamq.errors import ConfigError, KafkaMQError, StateError
from kafkamq.parallel.config import OnExhausted, ParallelConfig, tell
from kafkamq.parallel.record import Failure, ParallelRecord
from kafkamq.parallel.work_queue import HELD_MS, ParallelWorkQueue, Stats
from kafkamq.queue.dead_letter_writer import OutgoingDeadLetter, letter_writer
from kafkamq.queue.rules.retry import Done, GiveUp, Retry, backoff_delay_ms, backoff_on, judge
from kafkamq.queue.schemas.registry import BodyUnavailableError
from kafkamq.queue.sure_writer import Written
from kafkamq.queue.wire.headers import Origin, reason_of
from kafkamq.runtime.steps import Steps
from kafkamq.runtime.verdicts import VERDICTS, Verdict, seconds, understood, unfinished
from kafkamq.runtime.work_queue import enter
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.producer import ThreadedProducer
from kafkamq.transport.settings import producer_settings
from kafkamq.types import Ack, DeadLetterReason, Nack

_MAX_DELAY_S = 366 * 86_400.0
_DELAY_S = 1.0
_STOPPED_S = 3600.0
_log = logging.getLogger(__name__)
WriteDeadLetter = Callable[[ParallelRecord, DeadLetterReason, str], Written]
Hold = Callable[[ParallelRecord, DeadLetterReason, Written], None]
# Records that one pass gives up at most: the thread that polls has other things to do.
_MOST = 200


@dataclass(frozen=True, slots=True)
class Unwritten:
    """The outcome of a handler that ended well, and whose result Kafka does not have."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    config: ParallelConfig
    stats: Stats
    write: WriteDeadLetter
    fail: Callable[[BaseException], None]
    hold: Hold

    def apply(self, record: ParallelRecord, outcome: object) -> Steps[int | None]:
        """Return when a record is due again (monotonic ms) whose handler raised or returned
        ``outcome``.

        None: it is done. One whose result is ``Unwritten``, or whose body nobody can read now, is
        tried again, whatever the policy says.
        """
        decision, error = self._decide(record, outcome)
        if not isinstance(decision, GiveUp):
            return self._due(record, decision, error)
        written = self._give_up(record, decision, error)
        if written is not None:
            is_answered = yield written.first, self.config.send_timeout_ms / 1000
            if not is_answered or written.first.exception() is not None:
                # It is given up all the same: its handler has had its attempts.
                self.hold(record, decision.reason, written)
                return monotonic_ms() + HELD_MS
            tell_dead_letter(record, decision.reason, self.config, self.stats)
        elif self.config.on_exhausted is OnExhausted.STOP:
            return monotonic_ms() + HELD_MS
        assert record._failure is not None, "it has failed"
        record._failure = replace(record._failure, is_given_up=True)
        return None

    def _decide(
        self, record: ParallelRecord, outcome: object
    ) -> tuple[Done | Retry | GiveUp, BaseException | None]:
        attempt = record.attempt
        unwritten = 0 if record._failure is None else record._failure.unwritten
        if isinstance(outcome, Unwritten | BodyUnavailableError):
            delay_s = None
            if isinstance(outcome, BodyUnavailableError):
                delay_s, outcome = outcome.delay_s, Unwritten(outcome)
            why = _error_text(outcome.error)
            record._failure = Failure(attempt, outcome.error, why, unwritten + 1)
            return Retry(delay_s), outcome.error
        verdict, error = understood(outcome, self.config.retry_on)
        if error is not None and unfinished(outcome):
            # The handler's code is at fault, so every record would fail: the consumer stops.
            self.fail(error)
            verdict = Nack(delay=_STOPPED_S)
        elif error is not None:
            verdict = self._verdict_on(record, error, verdict)
        own = attempt - unwritten
        decision = judge(verdict, attempt=own, max_attempts=self.config.max_attempts)
        if isinstance(decision, GiveUp) and not self.config.gives_up:
            # What is to happen to such records was not configured, and the default is no choice.
            _log.error(
                "a record is rejected and there is no place for it: it is tried again; set"
                " dead_letter_topic, or on_exhausted",
                extra={"record": repr(record)},
            )
            decision = Retry()
        if not isinstance(decision, Done):
            reason = "" if isinstance(verdict, Ack) else verdict.reason
            record._failure = Failure(attempt, error, reason or _error_text(error), unwritten)
        return decision, error

    def _verdict_on(
        self, record: ParallelRecord, error: BaseException, by_default: Verdict
    ) -> Verdict:
        told = self.config.tell("on_failure", record, error)
        verdict, fault = understood(told) if isinstance(told, VERDICTS) else (by_default, None)
        if fault is not None:
            _log.error(
                "what on_failure returned is no verdict", extra={"error": _error_text(fault)}
            )
        return verdict

    def _due(
        self, record: ParallelRecord, decision: Done | Retry, error: BaseException | None
    ) -> int | None:
        if isinstance(decision, Done):
            return None
        delay_ms = self._delay_ms(record, decision, error)
        _log.info(
            "a record failed and is tried again",
            extra={
                "record": repr(record),
                "attempt": record.attempt - 1,
                "delay_ms": delay_ms,
                "error": _error_text(error),
            },
        )
        return monotonic_ms() + delay_ms

    def _delay_ms(
        self, record: ParallelRecord, decision: Retry, error: BaseException | None
    ) -> int:
        delay_s = decision.delay_s
        backoff = backoff_on(error, self.config.retry_on) or self.config.backoff
        if delay_s is None and not isinstance(backoff, Backoff):
            told = tell("backoff", backoff, record)
            try:
                delay_s = _DELAY_S if told is None else seconds(told)
            except ConfigError as error:
                _log.error("what backoff returned is no delay", extra={"error": str(error)})
                delay_s = _DELAY_S
        if delay_s is not None:
            return round(min(max(delay_s, 0.0), _MAX_DELAY_S) * 1000)
        assert isinstance(backoff, Backoff)
        return backoff_delay_ms(backoff, record.attempt - 1, random.random())

    def _give_up(
        self, record: ParallelRecord, decision: GiveUp, error: BaseException | None
    ) -> Written | None:
        """Write the dead letter, or do what else the policy says (None)."""
        config = self.config
        failure = record._failure
        error_text = _error_text(error) if failure is None else failure.reason
        if config.on_exhausted is OnExhausted.STOP:
            self.fail(
                StateError(
                    f"{record!r} cannot be processed ({error_text}); the offset stays before it"
                )
            )
            return None
        if config.on_exhausted is OnExhausted.SKIP:
            self.stats.skipped += 1
            _log.error("a record is given up and skipped", extra={"record": repr(record)})
            return None
        return self.write(record, decision.reason, error_text)


def _error_text(error: BaseException | None) -> str:
    return "" if error is None else reason_of(error)


class ParallelDeadLetters:
    """It has the dead letters of one consumer, at most one for each open record."""

    def __init__(self, config: ParallelConfig, work_queue: ParallelWorkQueue, stats: Stats) -> None:
        self._config = config
        self._work_queue = work_queue
        self._stats = stats
        what = f"a dead letter of group {config.group_id!r}"
        self._writer = letter_writer(config.dead_letter_writer, self._open_producer, what)
        # In the order in which their letters were kept; at most one of each is told.
        self._kept: dict[ParallelRecord, DeadLetterReason] = {}

    def _open_producer(self) -> ThreadedProducer:
        service = self._config.service
        return ThreadedProducer(
            service,
            # Kafka refuses a whole batch for its size: each letter has its own.
            producer_settings(service, partitioner="murmur2_random", batch_num_messages=1),
            name="kafkamq-letters",
            verb="sending",
            max_block_s=self._config.send_timeout_ms / 1000,
            on_start=partial(enter, self._config),
        )

    def write(self, record: ParallelRecord, reason: DeadLetterReason, error_text: str) -> Written:
        origin = Origin(record.topic, record.partition, record.offset, record.timestamp_ms)
        failure = record._failure
        letter = OutgoingDeadLetter(
            topic=self._config.dead_letter_topic,
            key=record.key,
            record_key=record.key,
            payload=record.value,
            headers=tuple(record.headers),
            reason=reason,
            error=error_text,
            delivery_count=1 if failure is None else failure.attempts,
            place=origin,
            origin=origin,
            queue_id=self._config.group_id,
        )
        return self._writer.write(letter.form, partial(self.is_open, record))

    def is_open(self, record: ParallelRecord) -> bool:
        is_waiting = record._is_ours and record not in self._kept
        return is_waiting and record._assignment.tracker.is_open(record.offset)

    def hold(self, record: ParallelRecord, reason: DeadLetterReason, written: Written) -> None:
        """Take over a letter that nobody waits for: ``tend`` ends its record when it is kept.

        Any thread may call this.
        """
        if reason is not DeadLetterReason.MAX_LEASE:
            # The handler of one that is given up for its age may still end well.
            self._work_queue.held.add(record)
        written.last.add_done_callback(partial(self._ended, record, reason))

    def tend(self, most: int = _MOST) -> None:
        """Give up the records whose letters are kept, many at once."""
        kept = dict(list(self._kept.items())[:most])
        offsets = defaultdict(list)
        for record in kept:
            offsets[record._assignment].append(record.offset)
        for partition, given_up in offsets.items():
            self._work_queue.give_up(partition, given_up)
        for record, reason in kept.items():
            del self._kept[record]
            self._work_queue.held.discard(record)
            tell_dead_letter(record, reason, self._config, self._stats)

    def tend_all(self) -> None:
        self.tend(len(self._kept))

    def forget(self) -> None:
        """Drop what waits here of partitions that went: others decide again on it."""
        self._writer.prune()

    def close(self, timeout_s: float) -> None:
        """Wait for letters that nobody has refused; closing twice is fine."""
        self._writer.give_up_refused()
        try:
            self._writer.close(timeout_s)
        except KafkaMQError as error:
            # What is done is committed all the same.
            _log.warning("dead letters are not confirmed at the end", extra={"error": str(error)})
        self.tend_all()

    def _ended(
        self, record: ParallelRecord, reason: DeadLetterReason, written: Future[None]
    ) -> None:
        if written.cancelled() or written.exception() is not None:
            self._work_queue.held.discard(record)
            return
        # At once, for a worker that puts it back in this moment, behind another that failed.
        if record._failure is not None:
            record._failure = replace(record._failure, is_given_up=True)
        self._kept.setdefault(record, reason)


def tell_dead_letter(
    record: ParallelRecord, reason: DeadLetterReason, config: ParallelConfig, stats: Stats
) -> None:
    """Count a record whose dead letter is kept, and tell the user."""
    stats.dead_lettered += 1
    _log.warning(
        "a record is given up; it is a dead letter",
        extra={"record": repr(record), "reason": reason.value},
    )
    config.tell("on_dead_letter", record, reason.value)
