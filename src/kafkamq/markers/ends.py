"""What is written of a worker's verdicts: one END for all messages that it can name (R30)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from kafkamq.markers.message import EndRecord, EndReports
from kafkamq.markers.rules.batching import delay_by_reference_ms, join
from kafkamq.markers.rules.handout import nack_delay_ms
from kafkamq.markers.rules.leases import Lease, Verdict
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

    def of(self, parts: Iterable[Lease]) -> list[EndRecord]:
        """ENDs that say the verdicts of these: one for all that it can name (R30)."""
        groups: dict[tuple[int, str, Verdict], list[Lease]] = {}
        for part in parts:
            same = part.marker_partition, part.holder_id, part.verdict
            groups.setdefault(same, []).append(part)
        ends: list[EndRecord] = []
        for members in groups.values():
            if self._is_batched:
                ends += [self._one(*each) for each in join((one.batch(), one) for one in members)]
            else:
                ends += [self._one((), [part]) for part in members]
        return ends

    def _one(self, batches: Sequence[MessageBatch], parts: list[Lease]) -> EndRecord:
        first = parts[0]
        if len(parts) > 1 or len(first.offsets) > 1:
            identity = encode_batches(batches)
        else:
            identity = encode_identity(first.partition, first.offsets[0], *first.log)
        verdict, delay_ms = first.verdict, 0
        if verdict.outcome is Outcome.NACK:
            delay_ms = self._delay_ms(parts, verdict)
        known = first.holder_id, delay_ms, verdict.reason
        end = EndRecord(self._reports, parts, encode_known_end(identity, verdict.outcome, *known))
        for part in parts:
            part.end = end
        return end

    def _delay_ms(self, parts: Sequence[Lease], verdict: Verdict) -> int:
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
        oldest_ms = min((part.oldest_ms for part in parts if part.oldest_ms >= 0), default=None)
        if oldest_ms is None or now_ms is None:
            return delay_ms
        return delay_by_reference_ms(
            delay_ms, oldest_ms, now_ms, retention_ms=facts.message_retention_ms
        )
