"""Whether the markers log still holds all that no tracker has read (R23).

The ledger says where a tracker begins. Kafka drops it when nobody has committed there for
``offsets.retention.minutes``; then the last tracker's status (R24) is all that is known. It is no
place to begin at: the topic may be another one by now. But a log that starts behind it has lost
records that nobody read.
"""

from __future__ import annotations

import logging

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DataLossError
from kafkamq.markers.tracker.ledger import LedgerKey, read_ledgers
from kafkamq.markers.tracker.status_reader import StatusReader
from kafkamq.transport.admin import Admin
from kafkamq.transport.errors import Meaning, meaning

_log = logging.getLogger(__name__)


def told_positions(config: ServiceConfig) -> dict[int, int]:
    """By marker partition: where its last tracker would have begun again, as its status tells.

    Empty, with a warning, for a tracker that may not read the statuses.

    Raises:
        BrokerError, DeadlineExceededError: No answer.
    """
    try:
        reader = StatusReader(config)
        try:
            statuses = reader.read_to_end().values()
        finally:
            reader.close()
    except BrokerError as error:
        if meaning(error) is not Meaning.FORBIDDEN:
            raise
        _log.warning(
            "the tracker has no committed position, and may not read where the last one was: "
            "markers that were deleted unread would go unnoticed",
            extra={"topic": config.tracker_topic, "error": str(error)},
        )
        return {}
    return {
        # With nothing open, what was read last may be control records, which need no reading.
        each.partition: each.committable_offset if each.entries else each.position
        for each in statuses
        if each.topic == config.marker_topic
    }


def require_inside(key: LedgerKey, position: int, first: int, end: int) -> None:
    """Refuse to begin where the log has lost what comes next; never jumps.

    Args:
        key: Of the marker partition.
        position: From where on its records are needed.
        first: Of the log.
        end: Of the log.

    Raises:
        DataLossError: Says how many records are gone, and how to go on without them.
    """
    where = f"{key.topic}[{key.partition}]: the tracker's position is {position}, but the log"
    reset = (
        "to go on without them, stop all trackers and set the position: kafka-consumer-groups "
        f"--group {key.transactional_id} --topic {key.topic}:{key.partition} "
        "--reset-offsets --to-earliest --execute"
    )
    if position < first:
        raise DataLossError(
            f"{where} starts at {first}: up to {first - position} records were deleted before "
            f"they were read, and messages may be lost; {reset}",
            code="OFFSET_OUT_OF_RANGE",
        )
    if position > end:
        raise DataLossError(
            f"{where} ends at {end}: the topic was truncated or recreated; {reset}",
            code="OFFSET_OUT_OF_RANGE",
        )


def require_unbroken(config: ServiceConfig, partitions: int) -> None:
    """Refuse a start without state, where a log has lost records that nobody read.

    Raises:
        DataLossError: As ``require_inside``.
        BrokerError, DeadlineExceededError: No answer.
    """
    keys = [LedgerKey.of_markers(config, number) for number in range(partitions)]
    with Admin(config) as admin:
        known = read_ledgers(admin, keys, stable=False)
        told = told_positions(config) if len(known) < len(keys) else {}
        bounds = admin.log_bounds(config.marker_topic, range(partitions))
    for key in keys:
        first, end = bounds[key.partition]
        position = known[key].position if key in known else told.get(key.partition, first)
        require_inside(key, position, first, end)
