"""How far a queue is done in each partition: what its group has committed, and the ledger's copy.

Ordinary workers go on where Spark stopped, and the other way round. Kafka drops what was committed
long ago, also while a query runs whose queue is empty. The copy stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping

from kafkamq.config import ServiceConfig
from kafkamq.errors import StateError
from kafkamq.markers.positions import Positions
from kafkamq.markers.rules.batching import MessageSet
from kafkamq.spark.queues.owner import QueueOwner
from kafkamq.spark.queues.starting import identity_of
from kafkamq.transport.admin import Admin
from kafkamq.transport.log_reader import LogRange, Record, log_reader

_log = logging.getLogger(__name__)


class QueuePosition:
    """The position of one queue; one owner thread.

    Args:
        config: The namespace.
        queue_id: The queue.
        group: The consumer group of its position.
        is_own: Whether a record is the queue's.
        owner: Commits for the group, as long as no other query has started.
    """

    def __init__(
        self,
        config: ServiceConfig,
        queue_id: str,
        group: str,
        is_own: Callable[[Record], bool],
        owner: QueueOwner,
    ) -> None:
        self._config = config
        self._queue_id = queue_id
        self._is_own = is_own
        self._group = group
        self._positions: Positions | None = None  # Spark pickles a reader before it is used
        self._owner = owner
        self._committed: dict[int, int] = {}

    @property
    def _kept(self) -> Positions:
        if self._positions is None:
            self._positions = Positions(self._config, self._group, self._queue_id)
        return self._positions

    @property
    def is_known(self) -> bool:
        """Whether this start has committed it."""
        return bool(self._committed)

    def find(self, numbers: Iterable[int], topic_id: bytes) -> dict[int, int]:
        """Of these partitions; absent: the queue is new there."""
        wanted = list(numbers)
        topic = self._config.message_topic
        with Admin(self._config) as admin:
            asked = [(self._group, (topic, number)) for number in wanted]
            committed = admin.committed(asked)
        found = {each.partition: each.offset for each in committed if each.offset >= 0}
        missing = [number for number in wanted if number not in found]
        return found | (self._find_kept(missing, topic_id) if missing else {})

    def _find_kept(self, numbers: Collection[int], topic_id: bytes) -> dict[int, int]:
        """What the ledger has of partitions for which Kafka has nothing."""
        found = self._kept.find(numbers, topic_id)
        if not found:
            return {}
        _log.warning(
            "the group's offsets are gone (offsets.retention.minutes); the ledger has them",
            extra={"queue": self._queue_id, "partitions": sorted(found)},
        )
        started = self._kept.started_since(found)
        return {
            number: self._behind(started, number, position.offset, topic_id)
            for number, position in found.items()
        }

    def _behind(self, started: MessageSet, number: int, offset: int, topic_id: bytes) -> int:
        """Behind the messages that a killed worker had begun: they are the tracker's."""
        last = started.end(number)
        if not last:
            return offset
        topic, reader = self._config.message_topic, log_reader(self._config)
        end = min(last, reader.log_ends(topic, [number])[number])
        for records in reader.read(LogRange(topic, number, offset, end), skips_lost=True):
            for record in records:
                if self._is_own(record) and identity_of(record, topic_id) not in started:
                    return record.offset()
        return max(offset, end)

    def commit(self, offsets: Mapping[int, int], topic_id: bytes) -> None:
        """Everything before these offsets is done."""
        news = {number: at for number, at in offsets.items() if self._committed.get(number) != at}
        if news:
            self._require_alone()
            topic = self._config.message_topic
            self._owner.commit({(topic, number): at for number, at in news.items()})
            self._committed.update(news)
            self._kept.note(news, topic_id)
        self._kept.write()  # also what was refused before

    def _require_alone(self) -> None:
        """A transaction commits for a group whatever members it has, so these are asked for.

        Each time: what a worker has committed since it joined would be set back.
        """
        if self._owner.has_members():
            raise StateError(
                f"workers joined queue {self._queue_id!r} (group {self._group}) while Spark reads "
                "it, and hand out the same messages; stop one of them"
            )

    def close(self) -> None:
        """Write what the ledger lacks, bounded; idempotent."""
        if self._positions is not None:
            self._positions.close()
