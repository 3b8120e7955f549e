"""Reads one queue's messages off the shared topic: filter, rebalances, commits, lost positions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from time import monotonic

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as Record

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import KafkaMQError
from kafkamq.markers.membership import Membership, is_eager, leave, max_idle_ms, reader_settings
from kafkamq.markers.message import MarkersMessage
from kafkamq.markers.offset_commits import OffsetCommits
from kafkamq.markers.positions import Positions
from kafkamq.markers.rules.fetch_buffer import Intake
from kafkamq.queue.data_loss import report_loss
from kafkamq.queue.names import group_of, group_of_workers
from kafkamq.transport.clients import open_consumer
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.errors import (
    ErrorWatch,
    Meaning,
    broker_error,
    is_retriable,
    kafka_error,
    meaning,
)
from kafkamq.transport.offset_commits import Commit
from kafkamq.transport.port import Consumer as KafkaConsumer
from kafkamq.transport.record import all_headers

__all__ = ["Membership", "MessageReader", "group_of"]

MAX_POLL = 1000  # records of one consume() while our own messages come
MAX_SKIP = 10_000  # while only foreign ones come
REQUEST_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 10.0
_WAIT_S = 0.25  # one blocking wait; between two, errors are looked at
# In place of the position of a partition that is to be read from another place.
_UNKNOWN = -1  # from what is committed
_ANEW = -10  # from its start, whatever is committed
_log = logging.getLogger(__name__)


class MessageReader:
    """Owns the Kafka consumer of one worker and fills its intake; the caller serialises."""

    def __init__(
        self,
        config: ServiceConfig,
        queue: QueueConfig,
        intake: Intake[MarkersMessage],
        member: Membership,
        make: Callable[[Record, int, int, int, Sequence[tuple[str, bytes | None]]], MarkersMessage],
    ) -> None:
        """``make`` gets a record, its partition, its offset, the poll's ms, and its headers."""
        self._config = config
        self._queue = queue
        self._intake = intake
        self._member = member
        self._make = make
        self._topic = config.message_topic
        self._key = queue.queue_id.encode()
        self._prefix = self._key + b"\0"
        self._settings = reader_settings(config, queue)
        self._is_eager = is_eager(self._settings)
        self.max_idle_ms = max_idle_ms(self._settings)
        self._unplaced: dict[int, int] = {}  # partition -> the position that is not in the log
        self._gained_s: dict[int, float] = {}  # partition -> when it was assigned, monotonic
        self._poll_size = MAX_POLL
        self._is_paused = False
        self._commits = OffsetCommits(self._topic, queue, intake, self._note)
        self.positions = Positions(config, group_of_workers(config, queue), queue.queue_id)
        self._asked: Future[list[TopicPartition]] | None = None  # what is committed
        self._failure: KafkaMQError | None = None  # of a poll whose caller had no use for it
        # Whether a transaction is under way, which alone decides what is committed.
        self.is_in_transaction: Callable[[], bool] = lambda: False
        self._connect()

    def _connect(self) -> None:
        self.watch = ErrorWatch(self._config.bootstrap_servers)
        self._consumer = open_consumer(self._settings, self.watch)
        self._join()

    def _join(self) -> None:
        self.is_away = False
        self._consumer.subscribe(
            [self._topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
        )

    # Reading.

    def poll(self, wanted: int, timeout_s: float) -> None:
        """Poll once and keep what is the queue's own; returns early when something came.

        Args:
            wanted: Own messages that can be used now: bounds what is polled (back-pressure).
            timeout_s: Longest wait, cut to a quarter of a second.

        Raises:
            BrokerError: What no waiting can mend.
            DataLossError: A position lies outside the log.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self.watch.check(f"reading {self._topic}")
        if self.is_away:
            self._join()
        self._resume()
        size = max(1, min(self._poll_size, max(wanted, MAX_POLL // 10)))
        if self._poll_size > MAX_POLL:
            size = self._poll_size
        polled_ms = monotonic_ms()
        try:
            records = self._consumer.consume(size, 0)
            if not records and timeout_s > 0:
                records = self._consumer.consume(1, min(timeout_s, _WAIT_S))
                if records and size > 1:
                    records += self._consumer.consume(size - 1, 0)
        except KafkaException as error:
            self._event(kafka_error(error))
            return
        if records:
            self._take(records, polled_ms)
        if self._unplaced:
            self._place()
        self._commit_skipped()

    def poll_ahead(self, wanted: int) -> None:
        """Poll what the next batch needs, without waiting; ``poll`` raises what goes wrong."""
        if self._failure is None and len(self._intake) < wanted:
            try:
                self.poll(wanted, 0.0)
            except KafkaMQError as error:
                self._failure = error

    def _take(self, records: Sequence[Record], polled_ms: int) -> None:
        queue_key, prefix = self._key, self._prefix
        own: list[tuple[Record, int, int]] = []
        first: dict[int, int] = {}
        following: dict[int, int] = {}
        events: list[Record] = []
        last_partition, is_unplaced = -1, False
        for record in records:
            key = record.key()
            if key is None and record.error() is not None:  # only records without key can be one
                events.append(record)
                continue
            partition, offset = record.partition(), record.offset()
            assert partition is not None, "records have a partition"
            assert offset is not None, "records have an offset"
            if partition != last_partition:  # seldom: they come in runs
                last_partition = partition
                is_unplaced = partition in self._unplaced or partition in self._intake.held
                if not is_unplaced:
                    first.setdefault(partition, offset)
            if is_unplaced:
                continue  # read on from a place that is given up; soon it is read again
            following[partition] = offset + 1
            if key == queue_key or (key is not None and key.startswith(prefix)):
                own.append((record, partition, offset))
        make, headers = self._make, all_headers([record for record, _, _ in own])
        messages = [
            make(record, partition, offset, polled_ms, of)
            for (record, partition, offset), of in zip(own, headers, strict=True)
        ]
        self._intake.polled(
            messages,
            first_offsets=first,
            next_offsets=following,
            count=len(records) - len(events),
        )
        self._poll_size = MAX_POLL if own or not following else MAX_SKIP  # foreign: skip faster
        for record in events:
            error = record.error()
            assert error is not None, "events are errors"
            if meaning(error) is Meaning.OUTSIDE_LOG:
                offset = record.offset()
                self._unplaced[record.partition() or 0] = _UNKNOWN if offset is None else offset
            else:
                self._event(error)

    def _event(self, error: KafkaError) -> None:
        self.watch.check(f"reading {self._topic}")
        if error.fatal():
            self.rebuild()
        elif not is_retriable(error):
            raise broker_error(error, f"reading {self._topic}")
        _log.info("reading is disturbed", extra={"code": error.name(), "topic": self._topic})

    def rebuild(self) -> None:
        """Make a new client after a fatal error; it reads from what is committed."""
        self._intake.revoked(list(self._intake.partitions()))
        self._unplaced.clear()
        self._commits.give_up()
        self._asked = None
        self._gained_s.clear()
        old, commits = self._consumer, self._commits
        self._connect()
        commits.finish(lambda: leave(old), CLOSE_TIMEOUT_S)
        self._commits = OffsetCommits(self._topic, self._queue, self._intake, self._note)

    # Positions.

    def _place(self) -> None:
        """Partitions whose position is not in the log: a new group's, or data was lost."""
        if self.is_in_transaction():  # given up, perhaps before its offsets were sent: ask after it
            return
        assigned = {each.partition for each in self._consumer.assignment()}
        for partition in self._unplaced.keys() - assigned:  # an error that came after a revocation
            del self._unplaced[partition]
        asked = [TopicPartition(self._topic, partition) for partition in self._unplaced]
        if not asked:
            return
        try:
            committed = self._consumer.committed(asked, timeout=REQUEST_TIMEOUT_S)
            kept = self._kept([each.partition for each in committed if each.offset < 0])
            for found in committed:
                if not self._place_one(found.partition, found.offset, kept):
                    return
        except KafkaException as error:
            inner = kafka_error(error)
            wrapped = broker_error(error, f"finding where to read {self._topic}")
            if not is_retriable(wrapped):
                raise wrapped from error
            # The group moves on, or a broker is not ready. What is not revoked stays ours without
            # being assigned again (cooperative), and Kafka does not ask twice for its position: the
            # next poll does.
            _log.info(
                "where to read is not known yet", extra={"topic": self._topic, "code": inner.name()}
            )

    def _place_one(self, partition: int, committed: int, kept: Mapping[int, int]) -> bool:
        """Read a partition from where it is to be read; False: ask again later."""
        position = self._unplaced[partition]
        low, high = self._consumer.get_watermark_offsets(
            TopicPartition(self._topic, partition), timeout=REQUEST_TIMEOUT_S
        )
        if committed < 0 <= position and self._member._is_topic_another():
            return False  # it was deleted, and what the group had committed with it
        is_new = committed < 0 or position == _ANEW
        if position == _ANEW:
            start = low
        elif is_new:
            start = kept.get(partition, low)  # its start, unless Kafka dropped the group's offsets
        else:
            start = position if position >= 0 else committed
        if not low <= start <= high:  # else a former owner has committed meanwhile
            report_loss(self._config, self._queue, partition, start, low, high)
            start = low
            self._intake.skipped_to(partition, low)
        elif is_new:
            if not self._commits.commit_now(self._consumer, {partition: start}):
                return False
            self._intake.placed(partition, start)
        self._read_from(partition, start)
        self._unplaced.pop(partition, None)
        return True

    def _kept(self, partitions: Sequence[int]) -> dict[int, int]:
        """Where the ledger has the group in partitions for which Kafka has nothing.

        STARTs behind these places are told to the member.
        """
        wanted = [number for number in partitions if self._unplaced[number] != _ANEW]
        if not wanted:
            return {}
        found = self.positions.find(wanted, self._member._topic_id())
        if found:
            _log.warning(
                "the group's offsets are gone (offsets.retention.minutes); the ledger has them",
                extra={"queue": self._queue.queue_id, "partitions": sorted(found)},
            )
            self._member._answered(self.positions.started_since(found))
        return {number: position.offset for number, position in found.items()}

    def _note(self, offsets: Mapping[int, int]) -> None:
        self.positions.note(offsets, self._member._topic_id())

    def _note_committed(self) -> None:
        """The ledger is to have every partition's position, also where nothing is committed anew.

        A queue may be empty for as long as this worker runs, and longer.
        """
        asked, self._asked = self._asked, None
        numbers = [number for number in self._gained_s if not self.positions.is_known(number)]
        if asked is None:
            if numbers and not self._commits.is_pending:
                wanted = [TopicPartition(self._topic, number) for number in numbers]
                self._asked = self._commits.ask(self._consumer, wanted)
        elif not asked.done():
            self._asked = asked
        elif asked.exception() is None:
            found = {each.partition: each.offset for each in asked.result() if each.offset >= 0}
            self._note({number: found[number] for number in numbers if number in found})

    def _read_from(self, partition: int, offset: int) -> None:
        """Start fetching a partition that stands still; ``seek`` does not work on such a one."""
        target = TopicPartition(self._topic, partition, offset)
        if not self._is_eager:
            self._consumer.incremental_unassign([TopicPartition(self._topic, partition)])
            self._consumer.incremental_assign([target])
            return
        others = [
            TopicPartition(
                self._topic,
                other.partition,
                self._intake.next_offset(other.partition, other.offset),
            )
            for other in self._consumer.assignment()
            if other.partition != partition
        ]
        self._consumer.assign([*others, target])

    def seek_back(self, partitions: Iterable[int] | None = None) -> None:
        """Read again from the committed offsets (R5); None: all that are not held back."""
        held = set(self._intake.held)
        offsets = self._intake.rewind(partitions)
        self._seek(offsets)
        self._resume_these(held.intersection(offsets))

    def hold(self, late: Mapping[int, int]) -> None:
        """Read no more of these partitions, whose STARTs are late from these offsets on."""
        self._intake.hold(late)
        self._consumer.pause([TopicPartition(self._topic, number) for number in late])

    def go_on(self, partitions: Iterable[int]) -> None:
        """Read on in those of the partitions that were held back."""
        offsets = self._intake.go_on(partitions)
        self._seek(offsets)
        self._resume_these(offsets)

    def _resume_these(self, partitions: Collection[int]) -> None:
        if partitions and not self._is_paused:  # else with all others
            self._consumer.resume([TopicPartition(self._topic, each) for each in partitions])

    def _seek(self, offsets: Mapping[int, int]) -> None:
        for partition, offset in offsets.items():
            try:
                self._consumer.seek(TopicPartition(self._topic, partition, offset))
            except KafkaException as error:  # noqa: PERF203 - it is gone, or stands still
                self._unplaced[partition] = offset
                _log.info(
                    "a partition could not be sought",
                    extra={"partition": partition, "code": kafka_error(error).name()},
                )

    def read_anew(self, gained_before_s: float) -> None:
        """The topic is another one: positions in the former one are not in this one (R13).

        What was committed in it since then may be such a position, so it is read from its start;
        but not where another member has, who knew.

        Args:
            gained_before_s: Partitions that are ours since then (monotonic) nobody has read anew.
        """
        assigned = {each.partition for each in self._consumer.assignment()}
        _log.warning("the topic was recreated", extra={"topic": self._topic})
        self._is_paused = self._is_paused or bool(self._intake.held)
        self._intake.revoked(self._intake.partitions())
        for partition in assigned:
            was_ours = self._gained_s.get(partition, 0.0) < gained_before_s
            self._unplaced[partition] = _ANEW if was_ours else _UNKNOWN

    def read_again(self) -> None:
        """``ask_again`` of all: a call was broken off, perhaps with records in its hands."""
        assigned = {each.partition for each in self._consumer.assignment()}
        self._is_paused = self._is_paused or bool(self._intake.held)
        self._intake.revoked(assigned | set(self._intake.partitions()))
        self._commits.give_up()
        self._unplaced.update(dict.fromkeys(assigned, _UNKNOWN))

    def ask_again(self, partitions: Iterable[int]) -> None:
        """Read again from what the group has committed, which only it knows."""
        for partition in set(partitions).intersection(self._intake.partitions()):  # not the lost
            self._intake.revoked([partition])
            self._unplaced[partition] = _UNKNOWN

    # Commits.

    def commit(self, timeout_s: float) -> Commit:
        """Commit up to the last STARTs (R5), foreign messages along; call again while pending.

        Raises:
            BrokerError: It failed, and would fail again.
        """
        outcome = self._commits.commit(self._consumer, timeout_s)
        if outcome is Commit.PENDING and (timeout_s > 0 or self.is_skipping):
            self.tend()  # the group may wait for us
        return outcome

    def committed(self, offsets: dict[int, int], count: int) -> None:
        """These offsets are committed, which are those of ``count`` polled records."""
        self._commits.committed(offsets, count)

    @property
    def is_skipping(self) -> bool:
        """Whether a commit is under way that no batch asked for; ``tend`` sees its end."""
        return self._commits.is_skipping

    def _commit_skipped(self) -> None:
        self._commits.see_skipped()
        self._note_committed()
        if not self.is_in_transaction():
            self._commits.skip(self._consumer)

    # Membership.

    def membership(self) -> bytes:
        """What fences this member's transactions once the group has gone on without it."""
        metadata: bytes = self._consumer.consumer_group_metadata()
        return metadata

    def leave(self) -> None:
        """Leave the group: others get the partitions. The next ``poll`` joins it again."""
        self.is_away = True
        self._consumer.unsubscribe()  # ``tend`` serves what follows from it

    def tend(self) -> None:
        """Stay a member while nobody receives: poll, with all partitions paused."""
        self._is_paused = True
        self._pause_all()
        records = self._consumer.consume(1, 0)
        if records:  # of a partition that was assigned just now
            self._take(records, monotonic_ms())
        self._commit_skipped()  # asynchronous: nothing here may wait

    def _pause_all(self) -> None:
        assignment = self._consumer.assignment()
        if assignment:
            self._consumer.pause(assignment)

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            held = self._intake.held
            going_on = [each for each in self._consumer.assignment() if each.partition not in held]
            if going_on:
                self._consumer.resume(going_on)

    def _assigned(self, _: KafkaConsumer, partitions: list[TopicPartition]) -> None:
        self._gained_s.update((each.partition, monotonic()) for each in partitions)
        self._member._gained([each.partition for each in partitions])

    def _revoked(self, consumer: KafkaConsumer, partitions: list[TopicPartition]) -> None:
        # librdkafka would remember the pause when they come back, and nobody would end it.
        consumer.resume(partitions)
        numbers = [each.partition for each in partitions]
        self.positions.forget(numbers)
        self._asked = None  # or its answer would be noted as if they were never another's
        for number in numbers:
            self._unplaced.pop(number, None)
            self._gained_s.pop(number, None)
            self._commits.forget(number)  # it may come back with another's position
        self._intake.revoked(numbers)
        self._member._lost(numbers)

    def close(self) -> None:
        """Leave the group; what Kafka keeps waiting ends behind us."""
        consumer = self._consumer
        if not self._commits.finish(lambda: leave(consumer), CLOSE_TIMEOUT_S):
            _log.warning(
                "leaving the group takes long and goes on", extra={"queue": self._queue.queue_id}
            )
