"""Reads single records of a topic again, by their offsets (R18)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from confluent_kafka import KafkaException, Message, TopicPartition

from kafkamq.config import ServiceConfig
from kafkamq.transport.clients import open_consumer
from kafkamq.transport.errors import ErrorWatch, Meaning, broker_error, is_retriable, meaning
from kafkamq.transport.port import Consumer
from kafkamq.transport.settings import consumer_settings

__all__ = ["MAX_READ_THROUGH", "RecordReader"]

MAX_READ_THROUGH = 280
"""Records between two wanted ones that are read and dropped; a wider gap is sought (R18)."""

_BATCH = 1000
_END_GRACE_S = 3.0  # a new leader may know less for a moment than the old one served
_END_MEMORY_S = 60.0
_REQUEST_S = 10.0
_FOR_EVER_S = 1e9


class RecordReader:
    """A read_committed reader of one topic; one owner thread.

    It never commits: of the group it needs the right to describe it.
    """

    def __init__(
        self, config: ServiceConfig, topic: str, *, group_id: str = "kafkamq.reader"
    ) -> None:
        self._config = config
        self._topic = topic
        self._group_id = group_id
        self._watch = ErrorWatch(config.bootstrap_servers)
        self._consumer: Consumer | None = None
        self._ends: dict[int, tuple[int, float]] = {}  # by partition: end, monotonic s

    def read(self, partition: int, offset: int, *, timeout_s: float = 30.0) -> Message | None:
        """The record at one offset, or None; also when it lies beyond the log's end."""
        if self._is_beyond(partition, offset):
            return None
        for _offset, message in self.stream(
            partition, (offset,), timeout_s=timeout_s, end_grace_s=_END_GRACE_S
        ):
            return message
        return None

    def _is_beyond(self, partition: int, offset: int) -> bool:
        """Whether the log did not come so far when that was waited for, and has not since."""
        end, seen_s = self._ends.get(partition, (1 << 62, 0.0))
        if offset < end or time.monotonic() - seen_s > _END_MEMORY_S:
            return False
        place = TopicPartition(self._topic, partition)
        try:
            _, end = self._connected().get_watermark_offsets(place, timeout=_REQUEST_S)
        except KafkaException as error:
            raise broker_error(error, f"finding the end of {self._topic}[{partition}]") from error
        return offset >= end

    def stream(
        self,
        partition: int,
        offsets: Sequence[int],
        *,
        timeout_s: float = 60.0,
        end_grace_s: float = _FOR_EVER_S,
    ) -> Iterator[tuple[int, Message | None]]:
        """The records at ``offsets`` (ascending, without repetition), in that order.

        An offset without a record (deleted, or aborted) comes with None. One beyond the log's end
        is waited for, because the caller has seen it: after a change of leaders the end may step
        back for a moment. ``end_grace_s`` ends that wait with None.

        Raises:
            BrokerError, DeadlineExceededError: Not all were read within ``timeout_s``.
        """
        if not offsets:
            return
        doing = f"reading {self._topic}[{partition}] from {offsets[0]}"
        deadline_s = time.monotonic() + timeout_s
        scan = _Scan(offsets)
        consumer = self._connected()
        try:
            self._go(consumer, partition, offsets[0])
            while scan.remains:
                if time.monotonic() > deadline_s:  # each seek takes its time, all together much
                    raise self._watch.deadline(doing, timeout_s)
                # `consume` alone would wait for a full batch.
                first = consumer.poll(0.5)
                batch = [] if first is None else [first, *consumer.consume(_BATCH, 0)]
                for message in batch:
                    if message.error() is None:
                        yield from scan.take(message)
                    else:
                        known = self._event(message, consumer, partition, scan.target, doing)
                        yield from scan.pass_to(known)
                if scan.is_far:
                    self._go(consumer, partition, scan.target)
                if batch:
                    continue
                self._watch.check(doing)
                if scan.waited_s() > end_grace_s:
                    self._ends[partition] = (scan.position, time.monotonic())
                    yield from scan.pass_to(1 << 62)
        except KafkaException as error:
            self.close()
            raise broker_error(error, doing) from error
        finally:
            if self._consumer is not None:
                self._consumer.unassign()  # otherwise it would go on fetching what nobody wants

    def _go(self, consumer: Consumer, partition: int, offset: int) -> None:
        """Read on at another place; a seek is refused while the last one is under way."""
        consumer.assign([TopicPartition(self._topic, partition, offset)])

    def _event(
        self, message: Message, consumer: Consumer, partition: int, target: int, doing: str
    ) -> int:
        """Where the log continues, as an event says; -1: it says nothing of that."""
        error = message.error()
        assert error is not None, "events are errors"
        what = meaning(error)
        if what is Meaning.LOG_END:
            offset = message.offset()
            return -1 if offset is None else offset
        if what is Meaning.OUTSIDE_LOG:
            # Deleted, or a leader that does not know the end yet.
            low, high = consumer.get_watermark_offsets(
                TopicPartition(self._topic, partition), timeout=_REQUEST_S
            )
            known = low if target < low else high
            self._go(consumer, partition, known)
            return known
        if not is_retriable(error):
            raise broker_error(error, doing)
        return -1

    def _connected(self) -> Consumer:
        if self._consumer is None:
            settings = consumer_settings(
                self._config,
                group_id=self._group_id,
                **{
                    "enable.partition.eof": True,
                    "queued.min.messages": 2 * _BATCH,
                    "queued.max.messages.kbytes": 32_768,
                },
            )
            self._consumer = open_consumer(settings, self._watch)
        return self._consumer

    def prepare(self, partition: int = 0, *, timeout_s: float = 5.0) -> None:
        """Connect, so that the first ``stream`` need not; what fails is left to that one."""
        with contextlib.suppress(KafkaException):
            consumer = self._connected()
            consumer.get_watermark_offsets(TopicPartition(self._topic, partition), timeout_s)

    def close(self) -> None:
        """End the client; idempotent."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()


class _Scan:
    """The wanted offsets of one stream against what the log gives."""

    def __init__(self, offsets: Sequence[int]) -> None:
        self._rest = iter(offsets)
        self.target = next(self._rest)
        self.position = self.target  # the log is known up to here
        self.remains = True
        self._end_s: float | None = None  # monotonic: since when the log ended before the target

    @property
    def is_far(self) -> bool:
        """Whether seeking the target is cheaper than reading up to it."""
        return self.remains and self.target - self.position > MAX_READ_THROUGH

    def take(self, message: Message) -> Iterator[tuple[int, Message | None]]:
        """A record: it is the target, or shows that targets before it are gone."""
        offset = message.offset()
        assert offset is not None, "records have an offset"
        self._end_s = None
        self.position = offset + 1
        while self.remains and self.target <= offset:
            found = message if self.target == offset else None
            yield self.target, found
            self._advance()

    def pass_to(self, position: int) -> Iterator[tuple[int, Message | None]]:
        """The log has nothing wanted before ``position`` (negative: nothing is known)."""
        if position < 0:
            return
        self.position = position
        while self.remains and self.target < position:
            yield self.target, None
            self._advance()
        if self.remains and self._end_s is None:
            self._end_s = time.monotonic()

    def waited_s(self) -> float:
        """How long the log has ended before the target."""
        return 0.0 if self._end_s is None else time.monotonic() - self._end_s

    def _advance(self) -> None:
        following = next(self._rest, None)
        if following is None:
            self.remains = False
        else:
            self.target = following
