"""The state of a namespace as its topics, groups and status records say it (R24)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from confluent_kafka import TopicPartition

from kafkamq.clients.admin import Admin
from kafkamq.clients.ticker import StatusReader
from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError
from kafkamq.kafka.reader import group_of
from kafkamq.kafka.scan import scan
from kafkamq.wire.keys import split_key
from kafkamq.wire.status import TrackerStatus

__all__ = ["MarkerPartition", "Overview", "QueueBacklog", "overview"]

MAX_SCANNED = 100_000
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBacklog:
    """A queue and what it has before it."""

    queue_id: str
    behind: int  # records of all queues behind its position: the most that can wait
    waiting: int | None  # of these, its own; None: not counted, there are too many to read
    members: int  # consumers in its group now


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkerPartition:
    """A marker partition and what its tracker last said of it; None: no tracker has, yet."""

    partition: int
    end: int  # offset behind its last record
    status: TrackerStatus | None

    @property
    def lag(self) -> int | None:
        """Records that the tracker has not folded yet."""
        return None if self.status is None else max(0, self.end - self.status.position)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """All of it."""

    queues: tuple[QueueBacklog, ...]
    markers: tuple[MarkerPartition, ...]
    messages: int  # records of the messages topic that retention has left
    dead_letters: int  # records of the dead letters topic


def overview(config: ServiceConfig, *, max_scanned: int = MAX_SCANNED) -> Overview:
    """Asks the cluster; counts a queue's own messages by reading at most ``max_scanned`` keys.

    Raises:
        BrokerError: A topic does not exist, or the broker refuses.
        DeadlineExceededError: No broker answers.
    """
    with Admin(config, timeout_s=TIMEOUT_S) as admin:
        bounds = _bounds(admin, config.message_topic)
        marker_bounds = _bounds(admin, config.marker_topic)
        dead = _bounds(admin, config.dead_letter_topic)
        positions = _positions(admin, config, bounds)
        members = {
            queue_id: len(admin.group_assignments(group_of(config, queue_id)))
            for queue_id in positions
        }
    waiting = _count(config, bounds, positions, max_scanned)
    known = sorted({*positions, *(waiting or ())})
    reader = StatusReader(config)
    try:
        statuses = reader.read_to_end()
    finally:
        reader.close()
    return Overview(
        queues=tuple(
            QueueBacklog(
                queue_id=queue_id,
                behind=_behind(bounds, positions.get(queue_id, {})),
                waiting=None if waiting is None else waiting[queue_id],
                members=members.get(queue_id, 0),
            )
            for queue_id in known
        ),
        markers=tuple(
            MarkerPartition(
                partition=partition,
                end=end,
                status=statuses.get((config.marker_topic, partition)),
            )
            for partition, (_, end) in sorted(marker_bounds.items())
        ),
        messages=sum(end - start for start, end in bounds.values()),
        dead_letters=sum(end - start for start, end in dead.values()),
    )


_Bounds = Mapping[int, tuple[int, int]]
_Positions = dict[str, dict[int, int]]


def _bounds(admin: Admin, topic: str) -> dict[int, tuple[int, int]]:
    return admin.log_bounds(topic, range(admin.require_topic(topic).partitions))


def _positions(admin: Admin, config: ServiceConfig, bounds: _Bounds) -> _Positions:
    """Committed positions by queue, of every group that has one in this messages topic."""
    prefix = group_of(config, "")
    listed = admin.wait(admin.client.list_consumer_groups(), "listing groups").valid or []
    groups = [group.group_id for group in listed if group.group_id.startswith(prefix)]
    asked = [
        (group, TopicPartition(config.message_topic, partition))
        for group in groups
        for partition in bounds
    ]
    found: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for (group, _), place in zip(asked, admin.committed(asked), strict=True):
        if place.offset >= 0:
            found[group.removeprefix(prefix)][place.partition] = place.offset
    return {
        queue_id: {
            partition: places.get(partition, start) for partition, (start, _) in bounds.items()
        }
        for queue_id, places in found.items()
    }


def _behind(bounds: _Bounds, positions: Mapping[int, int]) -> int:
    return sum(
        max(0, end - max(start, positions.get(partition, start)))
        for partition, (start, end) in bounds.items()
    )


def _count(
    config: ServiceConfig, bounds: _Bounds, positions: _Positions, max_scanned: int
) -> Counter[str] | None:
    """Messages behind each queue's position.

    Queues that nobody has received from yet are found when the whole topic may be read; in a longer
    one only what lies behind the first position is.
    """
    whole = {partition: start for partition, (start, _) in bounds.items()}
    behind = {
        partition: min(
            (max(start, places[partition]) for places in positions.values()), default=start
        )
        for partition, start in whole.items()
    }
    for starts in (whole, behind):
        if sum(bounds[partition][1] - start for partition, start in starts.items()) <= max_scanned:
            break
    else:
        return None
    counts: Counter[str] = Counter()
    try:
        for record in scan(config, config.message_topic, starts):
            queue_id = split_key(record.key())[0].decode("utf-8", "replace")
            position = positions.get(queue_id, {}).get(record.partition() or 0, 0)
            counts[queue_id] += (record.offset() or 0) >= position
    except BrokerError as error:
        if error.code not in ("OFFSET_OUT_OF_RANGE", "_AUTO_OFFSET_RESET"):
            raise
        return None  # retention moved on while we looked
    return counts
