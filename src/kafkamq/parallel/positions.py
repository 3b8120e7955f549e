"""Where to begin in partitions that were assigned: the committed offset, and the map with it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, sleep

from kafkamq.errors import DataLossError, KafkaMQError, WireError
from kafkamq.parallel.config import ParallelConfig, Partition
from kafkamq.parallel.rules.offsets import OffsetTracker
from kafkamq.parallel.stats import Stats
from kafkamq.parallel.wire import offsets as offset_maps
from kafkamq.transport.commits import OffsetCommit
from kafkamq.transport.errors import is_retriable
from kafkamq.transport.group_consumer import GroupConsumer

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


def find_positions(
    group: GroupConsumer,
    partitions: Sequence[Partition],
    config: ParallelConfig,
    stats: Stats,
    begun: Mapping[Partition, int],
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
            found = group.committed_with_metadata(partitions, timeout_s=_REQUEST_S)
            return [_position(group, each, config, stats, begun) for each in found]
        except KafkaMQError as error:  # noqa: PERF203 - the loop is the repetition
            if not is_retriable(error) or monotonic() > deadline_s:
                raise
            _log.info("where to read is not known yet", extra={"error": str(error)})
            sleep(0.1)


def _position(
    group: GroupConsumer,
    found: OffsetCommit,
    config: ParallelConfig,
    stats: Stats,
    begun: Mapping[Partition, int],
) -> Position:
    topic, partition, offset = found.topic, found.partition, found.offset
    if offset < 0:
        start = begun.get((topic, partition))
        if start is None:
            return _first(group, topic, partition, config)
        return Position(topic, partition, start, OffsetTracker(start), False)
    if not found.metadata:
        return Position(topic, partition, offset, OffsetTracker(offset), True)
    _, end = group.bounds((topic, partition), timeout_s=_REQUEST_S)
    try:
        found_map = offset_maps.decode(offset, found.metadata, log_end=end)
    except WireError as error:
        if config.on_foreign_metadata == "raise":
            raise WireError(
                f"the commit metadata of group {config.group_id} is no offset map"
                f" ({error.reason}); on_foreign_metadata='ignore' starts at the committed offset",
                topic=topic,
                partition=partition,
                offset=offset,
            ) from error
        stats.maps_ignored += 1
        _log.warning(
            "commit metadata that is no offset map is ignored; what was done beyond the committed"
            " offset is done again",
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


def _first(group: GroupConsumer, topic: str, partition: int, config: ParallelConfig) -> Position:
    """A group without a commit for the partition."""
    if config.start == "none":
        raise DataLossError(
            f"group {config.group_id} has no committed offset for {topic}[{partition}], and start"
            " is 'none': commit one, or choose start='earliest' or 'latest'",
            code="NO_OFFSET",
        )
    low, high = group.bounds((topic, partition), timeout_s=_REQUEST_S)
    offset = low if config.start == "earliest" else high
    return Position(topic, partition, offset, OffsetTracker(offset), False)


def data_loss(
    config: ParallelConfig, place: tuple[str, int], position: int, low: int, high: int
) -> str:
    """What to say of a position outside the log."""
    where = f"{place[0]}[{place[1]}] of group {config.group_id!r}"
    if position < low:
        return (
            f"{low - position} records of {where} are gone: they were deleted before they were"
            f" read; the position is {position}, the log starts at {low}"
        )
    return (
        f"the position {position} of {where} is beyond the log's end {high}: the topic was"
        " truncated or recreated"
    )
