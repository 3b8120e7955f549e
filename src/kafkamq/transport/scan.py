"""Reads a topic once, up to its end: for looks at dead letters, ledgers and waiting messages."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping

from kafkamq.config import ServiceConfig
from kafkamq.transport.admin import Admin
from kafkamq.transport.follower import READER_GROUP, Follower
from kafkamq.transport.record import Record

STALL_S = 30.0  # without a record or an end of the log: give up
_BATCH = 1000
_WAIT_MS = 20  # nothing is waited for at the end of the log


def scan(
    config: ServiceConfig,
    topic: str,
    starts: Mapping[int, int] | None = None,
    *,
    group_id: str = READER_GROUP,
    ends: Mapping[int, int] | None = None,
    until_s: float = math.inf,
) -> Generator[Record, None, None]:
    """The committed records of a topic up to the end of each partition, each in log order.

    Args:
        config: Of the client.
        topic: What is read.
        starts: The first offset by partition; None: all there is.
        group_id: Of the client.
        ends: Offsets to read to at least, also where a transaction is open before them.
        until_s: Monotonic: longest wait.

    Raises:
        BrokerError: The topic does not exist, a start is outside the log, or the broker refuses.
        DeadlineExceededError: No broker answers, or the time is over.
    """
    if starts is None:
        with Admin(config) as admin:
            count = admin.require_topic(topic).partitions
            bounds = admin.log_bounds(topic, range(count))
        # Told to begin at the beginning librdkafka takes half a second to find it.
        starts = {number: first for number, (first, end) in bounds.items() if end > first}
    if not starts:
        return
    wanted = ends or {}
    missing = {(topic, partition) for partition in starts}
    follower = Follower(
        config,
        f"reading {topic}",
        group_id=group_id,
        enable_partition_eof=True,
        fetch_wait_max_ms=_WAIT_MS,
    )
    try:
        follower.place({(topic, partition): offset for partition, offset in starts.items()})
        last_news_s = time.monotonic()
        while missing:
            if time.monotonic() > until_s:
                raise follower.deadline(0.0)
            records = follower.poll(_BATCH, 0.2)
            follower.require_inside()
            if records or follower.ends:
                last_news_s = time.monotonic()
            elif time.monotonic() - last_news_s > STALL_S:
                raise follower.deadline(STALL_S)
            missing -= {
                place for place, end in follower.ends.items() if end >= wanted.get(place[1], 0)
            }
            yield from records
    finally:
        follower.close()
