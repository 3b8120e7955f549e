"""What is said when a queue's position is not in the log of its messages."""

from __future__ import annotations

import logging

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import DataLossError
from kafkamq.queue.names import group_of_workers

_log = logging.getLogger(__name__)


def report_loss(
    config: ServiceConfig, queue: QueueConfig, partition: int, position: int, low: int, high: int
) -> None:
    """Say that the messages' log, from ``low`` to ``high``, does not have the position."""
    where = f"{config.message_topic}[{partition}] of queue {queue.queue_id!r}"
    if position < low:
        text = (
            f"{low - position} messages of {where} are gone: they were deleted (retention) "
            f"before they were read; the position is {position}, the log starts at {low}"
        )
    else:
        text = (
            f"the position {position} of {where} is beyond the log's end {high}: the topic "
            "was truncated or recreated"
        )
    if queue.on_data_loss == "raise":
        raise DataLossError(
            f"{text}; go on at the log's start with on_data_loss='skip', or set the offsets of "
            f"group {group_of_workers(config, queue)}",
            code="OFFSET_OUT_OF_RANGE",
        )
    _log.warning("messages were lost and are skipped", extra={"error": text})
