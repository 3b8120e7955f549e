"""Writes the dead letters of a parallel consumer until they are kept.

A record whose dead letter is refused is given up all the same: its handler is not called again. It
stays open, and what is behind it in its order waits, until the letter is kept. Before each try the
partition is asked whether the record is open still; the letter of one that was done meanwhile, or
whose partition went, is not written.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from kafkamq.errors import KafkaMQError
from kafkamq.parallel.config import ParallelConfig, tell
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.stats import Stats
from kafkamq.parallel.work_queue import ParallelWorkQueue
from kafkamq.queue.dead_letter_writer import OutgoingDeadLetter, letter_writer
from kafkamq.queue.sure_writer import Written
from kafkamq.queue.wire.headers import Origin
from kafkamq.runtime.inside import enter
from kafkamq.transport.producer import ThreadedProducer
from kafkamq.transport.settings import producer_settings
from kafkamq.types import DeadLetterReason

_MOST = 200  # records that one pass gives up: the thread that polls has other things to do
_log = logging.getLogger(__name__)


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
        """Whether its dead letter is still for this consumer to write."""
        is_waiting = record._is_ours and record not in self._kept
        return is_waiting and record._assignment.tracker.is_open(record.offset)

    def hold(self, record: ParallelRecord, reason: DeadLetterReason, written: Written) -> None:
        """Take over a letter that nobody waits for: ``tend`` ends its record when it is kept.

        Any thread may call this.
        """
        if reason is not DeadLetterReason.MAX_LEASE:  # whose handler may still end well
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
        """Do so for all of them, before what is done is committed for the last time."""
        self.tend(len(self._kept))

    def forget(self) -> None:
        """Drop what waits here of partitions that went: others decide again on it."""
        self._writer.prune()

    def close(self, timeout_s: float) -> None:
        """Wait for letters that nobody has refused; closing twice is fine."""
        self._writer.give_up_refused()
        try:
            self._writer.close(timeout_s)
        except KafkaMQError as error:  # what is done is committed all the same
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
    tell("on_dead_letter", config.hooks.on_dead_letter, record, reason.value)
