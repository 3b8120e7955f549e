"""Reads partitions that it is told, in no group: where, and from which offset on, is its owner's.

What a client says beside records is told apart here, for every reader: the end of a log, a position
outside of it, what polling on mends, and what nothing mends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DataLossError, DeadlineExceededError
from kafkamq.transport.clients import open_consumer
from kafkamq.transport.errors import (
    UNANSWERED,
    ErrorWatch,
    Meaning,
    broker_error,
    has_ended,
    is_retriable,
    kafka_error,
    meaning,
    raised_inside,
)
from kafkamq.transport.record import Record, place_of
from kafkamq.transport.settings import consumer_settings
from kafkamq.types import PartitionId

OnCommit: TypeAlias = Callable[[KafkaError | None, list[TopicPartition]], None]

READER_GROUP = "kafkamq.reader"
"""librdkafka wants a group; who may describe it may read, and nothing is committed in it."""

COMMITTED = -1001
"""In place of an offset: where the group is, which the client looks up."""

REQUEST_S = 10.0
_FIRST_SLICE_S = 1.0
Answer = TypeVar("Answer")
_log = logging.getLogger(__name__)


class Follower:
    """A consumer that is assigned what it shall read; one owner thread.

    Attributes:
        ends: Of the last ``poll``: partitions that were read to their end, and that offset, which
            may lie behind control records.
        outside: Partitions that stand still, as the log does not have their positions (negative:
            unknown), until they are placed again, or dropped.
        watch: The client's error callback.
        client: For commits, which are not this class's.
    """

    def __init__(
        self,
        config: ServiceConfig,
        doing: str,
        *,
        group_id: str = READER_GROUP,
        ignores: Callable[[KafkaError], bool] = is_retriable,
        on_commit: OnCommit | None = None,
        **settings: object,
    ) -> None:
        """Open a client that reads nothing yet.

        Args:
            doing: What it does, for error texts: "reading topic x".
            group_id: Its name for the brokers.
            ignores: Errors that end nothing, as polling on mends them.
            on_commit: Hears, inside ``poll``, the answers to commits that nobody waits for.
            **settings: The client's properties, ``_`` for ``.``.
        """
        self.ends: dict[PartitionId, int] = {}
        self.outside: dict[PartitionId, int] = {}
        self.watch = ErrorWatch(config.bootstrap_servers)
        self._doing = doing
        self._ignores = ignores
        self._placed: dict[PartitionId, int] = {}
        # Where to read what is taken out and put in again.
        self._moving: dict[PartitionId, int] = {}
        # False: the client does not read what it is to read.
        self._is_moved = True
        self._is_closed = False
        self._failure: BaseException | None = None
        self.settings = consumer_settings(config, group_id=group_id, **settings)
        if on_commit is not None:
            self.settings["on_commit"] = on_commit
        self.client = open_consumer(self.settings, self.watch)

    # Where it reads.

    @property
    def places(self) -> frozenset[PartitionId]:
        return frozenset(self._placed).union(self._moving)

    def place(self, positions: Mapping[PartitionId, int]) -> None:
        for place in positions:
            self.ends.pop(place, None)
            self.outside.pop(place, None)
        assigned = self._begin_move()
        self._moving |= positions
        self._move(assigned)

    def drop(self, places: Iterable[PartitionId]) -> None:
        """Read these no more; what was fetched of them is thrown away."""
        known = self.places & set(places)
        if not known:
            return
        assigned = self._begin_move()
        self._forget(known)
        self._move(assigned)

    def _begin_move(self) -> set[PartitionId]:
        """Return what the client reads; the client is asked where a move was broken off."""
        assigned = set(self._placed) if self._is_moved else self._assigned_places()
        self._is_moved = False
        return assigned

    def _move(self, assigned: set[PartitionId]) -> None:
        """Take out and put in again; what an interrupt breaks off, the next call does."""
        moving = self._moving
        self._placed |= moving
        gone = {each for each in assigned if each in moving or each not in self._placed}
        if moving and gone == assigned:
            self.client.assign(targets_of(moving))
        else:
            if gone:
                self.client.incremental_unassign(partitions_of(gone))
            if moving:
                self.client.incremental_assign(targets_of(moving))
        self._moving = {}
        self._is_moved = True

    def _assigned_places(self) -> set[PartitionId]:
        return {(each.topic, each.partition) for each in self.client.assignment()}

    def _forget(self, places: Collection[PartitionId]) -> None:
        """A pause ends with the assignment, which librdkafka would remember."""
        for place in places:
            self.ends.pop(place, None)
            self.outside.pop(place, None)
            self._placed.pop(place, None)
            self._moving.pop(place, None)
        self.resume(places)

    def pause(self, places: Iterable[PartitionId]) -> None:
        """Fetch these no more; those that are not read are passed."""
        self.client.pause(partitions_of(places))

    def resume(self, places: Iterable[PartitionId]) -> None:
        partitions = partitions_of(places)
        if partitions:
            self.client.resume(partitions)

    def positions(self, places: Iterable[PartitionId]) -> dict[PartitionId, int]:
        """Return the next offsets to be polled; where none was polled, those that were told."""
        told = self._placed
        return {
            place: each.offset if each.offset >= 0 else told.get(place, COMMITTED)
            for each in self.client.position(partitions_of(places))
            for place in ((each.topic, each.partition),)
        }

    # Reading.

    def poll(self, limit: int, timeout_s: float) -> Sequence[Record]:
        """Return up to ``limit`` records, of a partition in order; waits for the first alone."""
        if self._failure is not None:
            self._raise_failure()
        self.watch.check(self._doing)
        batch = self._fetch(limit, timeout_s)
        if self._failure is not None and not (batch and isinstance(self._failure, Exception)):
            self._raise_failure()
        # An interrupt does not wait.
        return batch

    def serve(self) -> Sequence[Record]:
        """Poll for one record without waiting; what goes wrong is raised by the next ``poll``."""
        return self._fetch(1, 0.0)

    def _fetch(self, limit: int, timeout_s: float) -> Sequence[Record]:
        if not self._is_moved:
            self._move(self._assigned_places())
        client = self.client
        self.ends.clear()
        try:
            batch = client.consume(limit, 0)
            if not batch and timeout_s > 0:
                # For more than one record it would wait for all of them.
                batch = client.consume(1, timeout_s)
                if batch and limit > 1:
                    batch += client.consume(limit - 1, 0)
        except KafkaException as error:
            self._failed(kafka_error(error), self._doing)
            batch = []
        except SystemError as error:
            raise raised_inside(error) from None
        if not any(map(Record.error, batch)):
            return batch
        records = []
        for record in batch:
            event = record.error()
            if event is None:
                records.append(record)
            else:
                self._event(event, record)
        return records

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        assert failure is not None, "there is one"
        if isinstance(failure, Exception):
            # The watch may know more of it.
            self.watch.check(self._doing)
        raise failure

    def _event(self, error: KafkaError, record: Record) -> None:
        what, place = meaning(error), place_of(record)
        offset = record.offset()
        if what is Meaning.LOG_END:
            self.ends[place] = 0 if offset is None else offset
        elif what is Meaning.OUTSIDE_LOG:
            if place in self.places:
                self.outside[place] = -1 if offset is None else offset
        else:
            topic, number = place
            self._failed(error, f"reading {topic}[{number}]" if topic else self._doing)

    def _failed(self, error: KafkaError, doing: str) -> None:
        if self._ignores(error):
            _log.info("reading is disturbed", extra={"code": error.name(), "doing": doing})
        elif self._failure is None:
            self._failure = broker_error(error, doing)
            if has_ended(error):
                # It may not have been told.
                self.watch(error)

    def require_inside(self) -> None:
        """Raise that records are gone (DataLossError), if a position is not in the log."""
        for place, position in self.outside.items():
            low, high = self.bounds(place)
            raise DataLossError(
                f"{self._doing} failed: the position of partition {place[1]} is {position}, and the"
                f" log has {low} to {high}: it was truncated or deleted there, or the topic"
                " recreated",
                code="OFFSET_OUT_OF_RANGE",
            )

    # Questions.

    def bounds(self, place: PartitionId, *, timeout_s: float = REQUEST_S) -> tuple[int, int]:
        """Return the first offset of a partition, and the one behind the last that it may read."""
        topic, number = place
        doing = f"finding the ends of {topic}[{number}]"
        try:
            low, high = self._answer(
                lambda: self.client.get_watermark_offsets(TopicPartition(topic, number), timeout_s),
                doing,
                timeout_s,
            )
        except BrokerError as error:
            # What librdkafka says of one without a leader, too, which has one again some time.
            if meaning(error) is not Meaning.NO_PARTITION:
                raise
            if number >= self.partition_count(topic, timeout_s=timeout_s):
                raise
            raise broker_error(KafkaError(KafkaError.LEADER_NOT_AVAILABLE), doing) from error
        return low, high

    def known_end(self, place: PartitionId) -> int:
        """Return the log's end as the last fetch told it; negative: there was none. Asks nobody."""
        _, end = self.client.get_watermark_offsets(TopicPartition(*place), cached=True)
        return end

    def offsets_for_times(
        self, topic: str, times_ms: Mapping[int, int], *, timeout_s: float = REQUEST_S
    ) -> dict[int, int]:
        """Return the first offsets of these partitions from those times on; -1: there is none.

        A time of -1 asks for the end of what may be read, -2 for the start.
        """
        if not times_ms:
            return {}
        asked = [TopicPartition(topic, number, at_ms) for number, at_ms in times_ms.items()]

        def ask() -> list[TopicPartition]:
            found = self._in_slices(
                lambda slice_s: self.client.offsets_for_times(asked, timeout=slice_s), timeout_s
            )
            for each in found:
                if each.error is not None:
                    raise KafkaException(each.error)
            return found

        found = self._answer(ask, f"asking for offsets of {topic}", timeout_s)
        return {each.partition: each.offset for each in found}

    def partition_count(self, topic: str, *, timeout_s: float = REQUEST_S) -> int:
        def ask() -> int:
            found = self._in_slices(
                lambda slice_s: self.client.list_topics(topic, timeout=slice_s).topics[topic],
                timeout_s,
            )
            if found.error is not None:
                raise KafkaException(found.error)
            return len(found.partitions)

        return self._answer(ask, f"looking up topic {topic}", timeout_s)

    def _in_slices(self, ask: Callable[[float], Answer], timeout_s: float) -> Answer:
        """Ask again until there is an answer, or the time is over; in longer and longer slices.

        librdkafka tells wrong credentials to the error callback alone, which ``poll`` serves; a
        question that blocks meanwhile would wait for all of its time, and say that nobody answers.
        """
        if self._placed:
            # ``poll`` would lose a record.
            return ask(timeout_s)
        deadline_s = time.monotonic() + timeout_s
        slice_s = _FIRST_SLICE_S
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                return ask(max(0.1, min(slice_s, left_s)))
            except KafkaException as error:
                self.client.poll(0)
                self.watch.check(self._doing)
                if left_s <= slice_s or meaning(error) not in UNANSWERED:
                    raise
            slice_s *= 2

    def _answer(self, ask: Callable[[], Answer], doing: str, timeout_s: float) -> Answer:
        try:
            return ask()
        except KafkaException as error:
            self.watch.check(doing)
            if meaning(error) in UNANSWERED:
                raise self.watch.deadline(doing, timeout_s) from error
            raise broker_error(error, doing) from error

    def deadline(self, timeout_s: float) -> DeadlineExceededError:
        """Return the error to raise when a bounded wait for records is over."""
        return self.watch.deadline(self._doing, timeout_s)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._placed.clear()
            self.client.close()


def partitions_of(places: Iterable[PartitionId]) -> list[TopicPartition]:
    return [TopicPartition(*place) for place in places]


def targets_of(positions: Mapping[PartitionId, int]) -> list[TopicPartition]:
    return [TopicPartition(*place, offset) for place, offset in positions.items()]
