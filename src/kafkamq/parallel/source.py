"""Where a parallel consumer's records come from: its member of the group, and where that reads.

Reading begins at the committed offset, with the map of what is done beyond it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from time import monotonic, sleep
from typing import Protocol

from kafkamq.errors import BrokerError, ConfigError, DataLossError, KafkaMQError, WireError
from kafkamq.parallel.config import ParallelConfig, Partition
from kafkamq.parallel.rules.offsets import OffsetTracker
from kafkamq.parallel.stats import Stats
from kafkamq.parallel.wire import offsets as offset_maps
from kafkamq.transport.commits import CommitTurns, OffsetCommit
from kafkamq.transport.errors import Meaning, is_retriable, meaning
from kafkamq.transport.group_consumer import GroupConsumer
from kafkamq.transport.record import Record

_REQUEST_S = 5.0
_PATIENCE_S = 30.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Position:
    """Where reading begins.

    Attributes:
        offset: The first record to poll.
        tracker: What is done from there on.
        is_committed: Whether the group has committed it.
    """

    topic: str
    partition: int
    offset: int
    tracker: OffsetTracker
    is_committed: bool


class Membership(Protocol):
    """Who is told of partitions that come and go, inside ``Source.poll``."""

    def assigned(self, positions: Sequence[Position]) -> None:
        """These are ours from now on."""

    def revoked(self, partitions: Sequence[Partition]) -> None:
        """These go when this returns; commits still count."""

    def lost(self, partitions: Sequence[Partition]) -> None:
        """These are another member's already."""

    def restarted(self, position: Position) -> None:
        """This one is read from elsewhere: what is known of it is of records that are gone."""


class Source:
    """The member of the group; one owner thread."""

    def __init__(self, config: ParallelConfig, member: Membership, stats: Stats) -> None:
        self._config = config
        self._member = member
        self._stats = stats
        self._group = GroupConsumer(
            config.service,
            self,
            config.topics,
            group_id=config.group_id,
            client_id=f"kafkamq-{config.group_id[:20]}-{uuid.uuid4().hex[:12]}",
            socket_timeout_ms=10_000,
            allow_auto_create_topics=False,
            enable_partition_eof=True,  # markers and deleted records behind the last one count
        )
        self.commits = CommitTurns(self._group)

    @property
    def ends(self) -> Mapping[Partition, int]:
        """Partitions that the last poll has read to their end."""
        return self._group.ends

    def subscribe(self) -> None:
        for topic in self._config.topics:
            if not topic.startswith("^"):
                self._require(topic)
        try:
            self._group.join()
        except BrokerError as error:
            raise ConfigError(f"topics is {self._config.topics!r}: {error}") from error

    def _require(self, topic: str) -> None:
        try:
            self._group.partition_count(topic)
        except BrokerError as error:
            if meaning(error) is not Meaning.NO_TOPIC:
                raise
            error_text = f"topic {topic} cannot be read: {error}; create it first"
            raise BrokerError(error_text, code=error.code) from error

    # Reading.

    def poll(self, limit: int, wait_s: float) -> list[tuple[Partition, Sequence[Record]]]:
        """Records by partition, in order; returns as soon as there are any."""
        self.commits.serve()
        self._note_member()
        with self.commits.inside():
            batch = self._group.poll(limit, wait_s)
        groups = _by_partition(batch) if batch else []
        if self._group.outside:
            others = {place for place in list(self._group.outside) if self._is_another_log(place)}
            groups = [each for each in groups if each[0] not in others]  # of the log that is gone
        return groups

    def _is_another_log(self, place: Partition) -> bool:
        """Read a partition on whose position is outside its log; True: the offsets are others'."""
        position = self._group.outside[place]
        try:
            low, high = self._group.bounds(place)
        except KafkaMQError as error:
            if not is_retriable(error):
                raise
            return False  # the next poll asks again
        if low <= position <= high:
            start = position
        else:
            error_text = self._data_loss(place, position, low, high)
            if self._config.on_data_loss == "raise":
                raise DataLossError(
                    f"{error_text}; go on at the log's start with on_data_loss='skip', or set the"
                    f" offsets of group {self._config.group_id}",
                    code="OFFSET_OUT_OF_RANGE",
                )
            _log.warning("records were lost and are skipped", extra={"error": error_text})
            start = low
        self._group.place({place: start})
        is_another = position > high
        if is_another:
            self._member.restarted(Position(*place, start, OffsetTracker(start), False))
            self.resume([place])  # the member knows of no pause any more
        return is_another

    def _data_loss(self, place: Partition, position: int, low: int, high: int) -> str:
        """What to say of a position outside the log."""
        where = f"{place[0]}[{place[1]}] of group {self._config.group_id!r}"
        if position < low:
            return (
                f"{low - position} records of {where} are gone: they were deleted before they were"
                f" read; the position is {position}, the log starts at {low}"
            )
        return (
            f"the position {position} of {where} is beyond the log's end {high}: the topic was"
            " truncated or recreated"
        )

    def rewind(self, begun: Mapping[Partition, int]) -> list[Position]:
        """Read these again from what is committed; where nothing is, from where they began."""
        positions = self._find(list(begun), begun)
        self._group.place({(each.topic, each.partition): each.offset for each in positions})
        self.resume(begun)
        return positions

    def pause(self, partitions: Iterable[Partition]) -> None:
        """Fetch these no more; those that went meanwhile are left out."""
        self._group.pause(partitions)

    def resume(self, partitions: Iterable[Partition]) -> None:
        self._group.resume(partitions)

    def _find(
        self, partitions: Sequence[Partition], begun: Mapping[Partition, int] | None = None
    ) -> list[Position]:
        """Ask the group's coordinator, and the log's ends where they matter.

        Raises:
            BrokerError: No answer, or a refusal.
            DataLossError: Nothing is committed and ``start`` is "none".
            WireError: Foreign metadata, and the policy is to raise.
        """
        deadline_s = monotonic() + _PATIENCE_S
        while True:
            try:
                found = self._group.committed_with_metadata(partitions, timeout_s=_REQUEST_S)
                return [self._position(each, begun or {}) for each in found]
            except KafkaMQError as error:  # noqa: PERF203 - the loop is the repetition
                if not is_retriable(error) or monotonic() > deadline_s:
                    raise
                _log.info("where to read is not known yet", extra={"error": str(error)})
                sleep(0.1)

    def _position(self, found: OffsetCommit, begun: Mapping[Partition, int]) -> Position:
        topic, partition, offset = found.topic, found.partition, found.offset
        if offset < 0:
            start = begun.get((topic, partition))
            if start is None:
                return self._first(topic, partition)
            return Position(topic, partition, start, OffsetTracker(start), False)
        if not found.metadata:
            return Position(topic, partition, offset, OffsetTracker(offset), True)
        _, end = self._group.bounds((topic, partition), timeout_s=_REQUEST_S)
        try:
            found_map = offset_maps.decode(offset, found.metadata, log_end=end)
        except WireError as error:
            if self._config.on_foreign_metadata == "raise":
                raise WireError(
                    f"the commit metadata of group {self._config.group_id} is no offset map"
                    f" ({error.reason}); on_foreign_metadata='ignore' starts at the committed"
                    " offset",
                    topic=topic,
                    partition=partition,
                    offset=offset,
                ) from error
            self._stats.maps_ignored += 1
            _log.warning(
                "commit metadata that is no offset map is ignored; what was done beyond the"
                " committed offset is done again",
                extra={
                    "topic": topic,
                    "partition": partition,
                    "error": error.reason,
                    "chars": len(found.metadata),
                },
            )
            return Position(topic, partition, offset, OffsetTracker(offset), True)
        tracker = OffsetTracker(
            offset, highest_seen=found_map.highest_seen, incompletes=found_map.incompletes
        )
        return Position(topic, partition, offset, tracker, True)

    def _first(self, topic: str, partition: int) -> Position:
        """A group without a commit for the partition."""
        if self._config.start == "none":
            raise DataLossError(
                f"group {self._config.group_id} has no committed offset for {topic}[{partition}],"
                " and start is 'none': commit one, or choose start='earliest' or 'latest'",
                code="NO_OFFSET",
            )
        low, high = self._group.bounds((topic, partition), timeout_s=_REQUEST_S)
        offset = low if self._config.start == "earliest" else high
        return Position(topic, partition, offset, OffsetTracker(offset), False)

    def _note_member(self) -> None:
        """Before each poll, and in each callback of a rebalance.

        A cooperative one revokes in the generation that it has begun, and goes on with what stays.
        Kafka would refuse transactions of the generation before, the last of what goes among them.
        """
        if self._config.is_transactional:
            self.commits.note_member()

    # Membership, told by the group consumer inside its calls.

    def assigned(self, places: Sequence[Partition]) -> Mapping[Partition, int]:
        self._note_member()
        positions = self._find(places)
        self._member.assigned(positions)
        return {(each.topic, each.partition): each.offset for each in positions}

    def revoked(self, places: Sequence[Partition], *, is_lost: bool) -> None:
        """These go when this returns; they are another member's already, if they were lost."""
        if is_lost:
            self._member.lost(places)
        else:
            self._note_member()
            self._member.revoked(places)
            self.commits.tend()

    def close(self) -> None:
        with self.commits.inside():
            self._group.close()


def _by_partition(batch: Sequence[Record]) -> list[tuple[Partition, Sequence[Record]]]:
    first, last = batch[0], batch[-1]
    partitions = list(map(Record.partition, batch))
    topics = list(map(Record.topic, batch))
    if partitions.count(first.partition()) == len(batch) == topics.count(last.topic()):
        return [((first.topic() or "", first.partition() or 0), batch)]
    groups: dict[Partition, list[Record]] = {}
    index = 0
    for place, run in groupby(zip(topics, partitions, strict=True)):
        end = index + sum(1 for _ in run)
        topic, partition = place
        groups.setdefault((topic or "", partition or 0), []).extend(batch[index:end])
        index = end
    return list(groups.items())
