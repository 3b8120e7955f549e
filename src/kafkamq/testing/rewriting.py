"""What a tracker writes for an action: copy or dead letter, and its END (R14, R18, R19)."""

from __future__ import annotations

import random
from dataclasses import replace

from kafkamq.markers.rules.delivery import Carry, DeadLetter, Settle, decide
from kafkamq.markers.wire.markers import decode_marker, encode_end, encode_schedule
from kafkamq.queue.wire.headers import Origin, copy_headers, dead_letter_headers
from kafkamq.queue.wire.keys import split_key
from kafkamq.queue.wire.partitions import marker_key
from kafkamq.testing.workers import Topics
from kafkamq.transport.memory import MemoryKafka
from kafkamq.types import Headers, Outcome

__all__ = ["Produced", "Rewriter"]

Produced = tuple[str, int, "bytes | None", "bytes | None", Headers]
"""Topic, partition, key, value, headers."""


class Rewriter:
    """Reads STARTs again by their offsets, and says what becomes of them."""

    def __init__(
        self, kafka: MemoryKafka, topics: Topics, rng: random.Random, max_deliveries: int
    ) -> None:
        self._kafka = kafka
        self._topics = topics
        self._rng = rng  # spreads copies over partitions
        self._max_deliveries = max_deliveries

    def rewrite(self, partition: int, action: Settle | Carry) -> list[Produced]:
        """The records of one row: its START is read again by its offset."""
        kafka, topics = self._kafka, self._topics
        record = kafka.record_at(topics.markers, partition, action.start_offset)
        assert record is not None, "the START of an open entry is in the log"
        start = decode_marker(record.value)
        message_id = action.message_id
        key = marker_key(message_id.partition, message_id.offset)
        value = start.value
        if start.by_reference:
            original = kafka.record_at(topics.messages, message_id.partition, message_id.offset)
            assert original is not None, "nothing is deleted here"
            value = original.value
            start = replace(start, key=original.key or b"", headers=original.headers)
        if isinstance(action, Carry):
            carried = encode_schedule(
                start.key,
                value,
                redeliver_after_ms=action.remaining_ms,
                headers=start.headers,
                expires_at_ms=start.expires_at_ms,
                first=message_id,
            )
            return [(topics.markers, partition, key, carried, ())]
        topic = topics.markers if action.of_schedule else topics.messages
        origin = Origin(
            topic, message_id.partition, message_id.offset, max(0, start.message_timestamp_ms)
        )
        decision = decide(
            action,
            start,
            start_timestamp_ms=record.timestamp_ms,
            max_deliveries=self._max_deliveries,
            error=self._error(partition, action),
        )
        if isinstance(decision, DeadLetter):
            outcome = Outcome.DEAD_LETTERED
            headers = dead_letter_headers(
                start.headers,
                reason=decision.reason,
                error=decision.error,
                delivery_count=max(1, start.delivery_count),
                origin=origin,
                queue_id=split_key(start.key)[0],
            )
            produced: Produced = (topics.dead_letters, 0, start.key, value, headers)
        else:
            outcome = Outcome.REDELIVERED
            headers = copy_headers(
                start.headers,
                delivery_count=decision.delivery_count,
                origin=None if action.of_schedule else origin,
            )
            target = self._rng.randrange(kafka.partition_count(topics.messages))
            produced = (topics.messages, target, start.key, value, headers)
        end = encode_end(message_id, outcome, of_schedule=action.of_schedule)
        return [produced, (topics.markers, partition, key, end, ())]

    def _error(self, partition: int, action: Settle) -> str:
        """The reason text of the END that made it due."""
        if action.verdict_offset < 0:
            return ""
        record = self._kafka.record_at(self._topics.markers, partition, action.verdict_offset)
        return decode_marker(record.value).reason if record is not None else ""
