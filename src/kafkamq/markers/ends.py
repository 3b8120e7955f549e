"""What is written of a worker's verdicts: one END for all messages that it can name (R30)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from kafkamq.markers.message import EndRecord, EndReports, MarkersMessage, Verdict
from kafkamq.markers.rules.batching import delay_by_reference_ms, gather
from kafkamq.markers.rules.handout import nack_delay_ms
from kafkamq.markers.state import ConsumerState
from kafkamq.markers.wire.markers import (
    MAX_DURATION_MS,
    encode_batches,
    encode_identity,
    encode_known_end,
)
from kafkamq.types import MessageBatch, Outcome


class Ends:
    """Makes the ENDs of one consumer; ``reports`` is told what becomes of them."""

    def __init__(self, state: ConsumerState, reports: EndReports) -> None:
        self._state = state
        self._reports = reports
        self._is_batched = state.queue.batch_markers

    def of(self, messages: Iterable[MarkersMessage]) -> list[EndRecord]:
        """ENDs that say the verdicts on these: one for all that it can name (R30)."""
        groups: dict[tuple[int, str, Verdict], list[MarkersMessage]] = {}
        last_verdict, last_holder, last_route = None, None, -1
        for message in messages:
            lease = message._lease
            verdict, holder, route = message._verdict, lease.holder_id, lease.marker_partition
            # Seldom: they come in runs.
            if verdict is not last_verdict or holder is not last_holder or route != last_route:
                last_verdict, last_holder, last_route = verdict, holder, route
                add = groups.setdefault((route, holder, verdict), []).append
            add(message)
        ends: list[EndRecord] = []
        for (_, holder, verdict), members in groups.items():
            if self._is_batched and len(members) > 1:
                ends += [self._one(*each, holder, verdict) for each in gather(members)]
            else:
                ends += [self._one((), [each], holder, verdict) for each in members]
        return ends

    def _one(
        self,
        batches: Sequence[MessageBatch],
        messages: list[MarkersMessage],
        holder_id: str,
        verdict: Verdict,
    ) -> EndRecord:
        if len(messages) > 1:
            identity = encode_batches(batches)
        else:
            lease = messages[0]._lease
            identity = encode_identity(lease.partition, lease.offset, *lease.log)
        outcome, delay_ms = verdict.outcome, 0
        if outcome is Outcome.NACK:
            delay_ms = self._delay_ms(messages, verdict)
        value = encode_known_end(identity, outcome, holder_id, delay_ms, verdict.reason)
        end = EndRecord(self._reports, messages, value)
        for message in messages:
            message._end = end
        return end

    def _delay_ms(self, messages: Sequence[MarkersMessage], verdict: Verdict) -> int:
        """Of a NACK: its jitter is drawn once for the record, or each message would stand alone."""
        facts = self._state.namespace.facts()
        delay_ms = nack_delay_ms(
            verdict.delay_ms,
            backoff=self._state.queue.backoff,
            delivery_count=verdict.delivery_count,
            retention_ms=facts.marker_retention_ms,
            random_unit=random.random(),
        )
        delay_ms = min(delay_ms, MAX_DURATION_MS)
        now_ms = self._state.broker_ms()
        oldest_ms = min((each.timestamp_ms for each in messages if not each._start), default=None)
        if oldest_ms is None or now_ms is None:
            return delay_ms
        return delay_by_reference_ms(
            delay_ms, oldest_ms, now_ms, retention_ms=facts.message_retention_ms
        )
