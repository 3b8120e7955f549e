"""Rows of the views ``deliveries`` and ``in_flight``: attempts in, Arrow columns out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kafkamq.markers.rules.attempts import Attempt, OpenAttempt
from kafkamq.queue.wire.headers import read_message_headers
from kafkamq.queue.wire.keys import split_key
from kafkamq.spark.source.columns import Column, arrow_batch, micros, text
from kafkamq.spark.source.message_facts import UNKNOWN
from kafkamq.types import Outcome

if TYPE_CHECKING:
    import pyarrow as pa


def is_of_queue(attempt: Attempt, queue_id: bytes) -> bool:
    """Whether its message belongs to that queue."""
    return split_key(attempt.key)[0] == queue_id


def _known(attempts: Sequence[Attempt], read: Callable[[Attempt], Any]) -> Column:
    """What the message says; null where retention has deleted it, and its START does not say it."""
    return [None if each.delivery_count == UNKNOWN else read(each) for each in attempts]


def _message_columns(attempts: Sequence[Attempt]) -> list[Column]:
    keys = [split_key(attempt.key) for attempt in attempts]
    ids = [attempt.message_id for attempt in attempts]
    return [
        [text(queue_id) for queue_id, _ in keys],
        _known(attempts, lambda each: read_message_headers(each.headers).id),
        [user_key for _, user_key in keys],
        _known(attempts, lambda each: each.delivery_count),
        [one.partition for one in ids],
        [one.offset for one in ids],
        [one.topic_id.hex() for one in ids],
        [one.leader_epoch for one in ids],
    ]


def _origin_columns(attempts: Sequence[Attempt], message_topic: str) -> list[Column]:
    """Where the first copy stands: a first copy is its own origin."""
    rows: list[tuple[Any, ...]] = []
    for attempt in attempts:
        if attempt.delivery_count == UNKNOWN:
            rows.append((None,) * 4)
            continue
        origin = read_message_headers(attempt.headers).origin
        one = attempt.message_id
        if origin is None:
            rows.append((message_topic, one.partition, one.offset, attempt.message_timestamp_ms))
        else:
            rows.append((origin.topic, origin.partition, origin.offset, origin.timestamp_ms))
    return [
        [row[0] for row in rows],
        [row[1] for row in rows],
        [row[2] for row in rows],
        [None if row[3] is None else micros(row[3]) for row in rows],
    ]


def deliveries_batch(
    attempts: Sequence[Attempt], schema: pa.Schema, *, message_topic: str, marker_partition: int
) -> pa.RecordBatch:
    """One row per attempt, ended or not."""

    def ended(read: Callable[[Attempt], Any]) -> Column:
        return [None if attempt.outcome is None else read(attempt) for attempt in attempts]

    columns = [
        *_message_columns(attempts),
        *_origin_columns(attempts, message_topic),
        [attempt.consumer_id for attempt in attempts],
        [micros(attempt.started_ms) for attempt in attempts],
        ended(lambda each: micros(each.ended_ms)),
        ended(lambda each: each.ended_ms - each.started_ms),
        [_name(attempt) for attempt in attempts],
        ended(lambda each: each.is_late),
        ended(lambda each: each.reason or None),
        [attempt.delay_ms if attempt.outcome is Outcome.NACK else None for attempt in attempts],
        [attempt.starts for attempt in attempts],
        [micros(attempt.message_timestamp_ms) for attempt in attempts],
        [marker_partition] * len(attempts),
        [attempt.start_offset for attempt in attempts],
        ended(lambda each: each.end_offset),
    ]
    return arrow_batch(columns, schema)


def _name(attempt: Attempt) -> str | None:
    return None if attempt.outcome is None else attempt.outcome.name


def in_flight_batch(
    found: Sequence[OpenAttempt], schema: pa.Schema, *, marker_partition: int
) -> pa.RecordBatch:
    """One row per message that is held, waits or is due."""
    attempts = [each.attempt for each in found]
    columns = [
        *_message_columns(attempts),
        [each.state for each in found],
        [each.consumer_id for each in found],
        [micros(attempt.started_ms) for attempt in attempts],
        [_name(attempt) for attempt in attempts],
        [each.remaining_ms for each in found],
        [marker_partition] * len(found),
        [attempt.start_offset for attempt in attempts],
    ]
    return arrow_batch(columns, schema)
