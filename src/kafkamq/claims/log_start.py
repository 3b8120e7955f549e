"""Where a reader of a log of claims begins: a window before its last record, by broker time; and
where work begins that nobody has claimed.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from kafkamq.claims.topic import CoordinationTopic
from kafkamq.errors import DataLossError
from kafkamq.transport.admin import Admin
from kafkamq.transport.follower import Follower

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Starts:
    """By partition: where to begin, and where it ended just now."""

    # Offset, and the broker's time in s since when that is everything; None: always.
    starts: dict[int, tuple[int, float | None]]
    ends: dict[int, int]  # offsets
    latest_ms: int  # the broker's time of the topic's last record; -1: there is none


def find_starts(
    admin: Admin, follower: Follower, topic: CoordinationTopic, *, window_ms: int
) -> Starts:
    name, partitions = topic.name, list(range(topic.partitions))
    bounds = admin.log_bounds(name, partitions)
    latest = admin.latest_times(name, partitions) if topic.has_broker_time else {}
    now_ms = time.time_ns() // 1_000_000
    since = {number: latest.get(number, now_ms) - window_ms for number in partitions}
    found = follower.offsets_for_times(name, {number: max(0, at) for number, at in since.items()})
    starts: dict[int, tuple[int, float | None]] = {}
    for number, offset in found.items():
        first, end = bounds[number]
        start = end if offset < 0 else max(offset, first)
        starts[number] = (start, None if start == 0 else since[number] / 1000)
    ends = {number: end for number, (_, end) in bounds.items()}
    return Starts(starts, ends, max(latest.values(), default=-1))


def group_starts(
    admin: Admin, topic: str, partitions: int, group_id: str, *, skips: bool
) -> dict[int, int]:
    """By partition: the group's position, or the log's start.

    Raises:
        DataLossError: A position lies outside the log, and that is not to be skipped.
    """
    bounds = admin.log_bounds(topic, range(partitions))
    wanted = [(group_id, (topic, number)) for number in range(partitions)]
    found = {}
    for place in admin.committed(wanted, stable=False):
        first, end = bounds[place.partition]
        known = place.offset if place.offset >= 0 else first
        found[place.partition] = min(max(known, first), end)
        if found[place.partition] != known:
            text = (
                f"the position of {topic}[{place.partition}] of group {group_id!r}"
                f" is {known}, and the log has {first} to {end}"
            )
            if not skips:
                raise DataLossError(f"{text}; set on_data_loss='skip' to go on")
            _log.warning("%s; going on at %d", text, found[place.partition])
    return found
