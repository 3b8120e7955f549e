"""Where a parallel consumer's records come from: its member of the group, and where that reads."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Protocol

from kafkamq.errors import BrokerError, ConfigError, DataLossError, KafkaMQError
from kafkamq.parallel.config import ParallelConfig, Partition
from kafkamq.parallel.positions import Position, data_loss, find_positions
from kafkamq.parallel.rules.offsets import OffsetTracker
from kafkamq.parallel.stats import Stats
from kafkamq.transport.commits import CommitTurns
from kafkamq.transport.errors import Meaning, is_retriable, meaning
from kafkamq.transport.group_consumer import GroupConsumer
from kafkamq.transport.record import Record

_log = logging.getLogger(__name__)


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
            error_text = data_loss(self._config, place, position, low, high)
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
        return find_positions(self._group, partitions, self._config, self._stats, begun or {})

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
