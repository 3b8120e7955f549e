"""Where a reader of a log of claims begins: a window before its last record, by broker time."""

from __future__ import annotations

import time
from dataclasses import dataclass

from kafkamq.claims.topic import CoordinationTopic
from kafkamq.transport.admin import Admin
from kafkamq.transport.follower import Follower


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
