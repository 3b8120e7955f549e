"""Time for silent partitions: appends TICKs where R4 wants one, and publishes the statuses (R24).

Spark runs a batch only when there are records. What waits for a time to pass would wait forever
on a silent log, so the driver appends TICKs: one per partition at a start (R17), later by the
policy of ``rules/ticks.py`` from what each batch has folded. What a TICK passes is settled behind
the batch that reads it, so it is not written while one is under way, if it can wait.
A partition that rests gets a TICK an hour, too: without a batch nobody commits its position, and
Kafka forgets one of a group that is silent for days.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.markers.rules.redelivery import Wake
from kafkamq.markers.rules.ticks import TickPolicy
from kafkamq.markers.tracker.records import Ticker
from kafkamq.markers.wire.records import TrackerStatus
from kafkamq.transport.clock import monotonic_ms

_log = logging.getLogger(__name__)
MAX_REST_MS = 3_600_000
_UNKNOWN = Wake(None, None, False)
_LEAD_MS = 150  # between a TICK and the batch that reads it
_STATUS_S = 1.0  # between two statuses of a partition


class TickKeeper:
    """TICKs and statuses of one start of the engine; one owner thread but for ``latest``."""

    def __init__(
        self, config: ServiceConfig, tracker: TrackerConfig, *, epoch: int, token: str
    ) -> None:
        self._config = config
        self._max_silence_ms = tracker.max_silence_ms
        self._epoch = epoch
        self._token = token  # in the TICKs: which of them this start waits for
        self._ticker = Ticker(config)
        self._policies: dict[int, TickPolicy] = {}
        self._rests_since_ms: dict[int, int] = {}  # the last TICK, or batch
        self._unpublished: set[int] = set()
        self._publish_s = 0.0  # monotonic: not before
        self.latest: dict[int, TrackerStatus] = {}

    def begin(
        self, partitions: Iterable[int], *, epoch: int | None = None, timeout_s: float = 30.0
    ) -> None:
        """The TICKs of a start; call it when the partitions are claimed (R17).

        ``epoch`` is that of the claim, where the keeper was made before it (R36).

        Raises:
            BrokerError, DeadlineExceededError: Not all were written.
        """
        self._epoch = self._epoch if epoch is None else epoch
        numbers = list(partitions)
        offsets = self._ticker.tick_all(
            numbers, engine=self._token, epoch=self._epoch, timeout_s=timeout_s
        )
        now_ms = monotonic_ms()
        for number in numbers:
            policy = TickPolicy(now_ms, self._max_silence_ms, _LEAD_MS)
            self._policies[number] = policy
            policy.on_sent(now_ms)
            policy.on_delivered(offsets[number])
            self._rests_since_ms[number] = now_ms

    def begin_added(self, partition: int) -> None:
        """``begin`` for a partition that the topic got later: clients remember the old count."""
        self._ticker.close()
        self._ticker = Ticker(self._config)
        self.begin([partition])

    def take(self, status: TrackerStatus, read_ms: int) -> None:
        """What a batch has folded of a partition, which was read at this time (monotonic)."""
        policy = self._policies.get(status.partition)
        if policy is None:
            return  # its TICK of the start comes first
        self.latest[status.partition] = status
        self._unpublished.add(status.partition)
        self._rests_since_ms[status.partition] = monotonic_ms()
        policy.on_read(read_ms, status.position, status.clock_ms)

    def step(self, *, is_read_soon: bool) -> None:
        """Append the TICKs that are wanted, and publish what is new."""
        self._ticker.poll()
        now_ms = monotonic_ms()
        for number, policy in self._policies.items():
            clock_ms, wake = self._wake(number)
            rests = now_ms - self._rests_since_ms[number] >= MAX_REST_MS
            if rests or policy.wants_tick(now_ms, clock_ms, wake, is_read_soon=is_read_soon):
                policy.on_sent(now_ms)
                self._rests_since_ms[number] = now_ms
                _log.debug("TICK wanted", extra={"partition": number})
                self._ticker.tick(
                    number, engine=self._token, epoch=self._epoch, on_done=self._on_done
                )
        if time.monotonic() >= self._publish_s:
            self._publish()

    def is_due(self) -> bool:
        """Whether the next batch finds something to be settled, or what was settled."""
        now_ms = monotonic_ms()
        for number, policy in self._policies.items():
            clock_ms, wake = self._wake(number)
            latest = self.latest.get(number)
            if policy.has_passed(now_ms, clock_ms, wake):
                return True
            if latest is not None and latest.due > latest.awaited:
                return True
        return False

    def _wake(self, number: int) -> tuple[int, Wake]:
        """The log's clock after what was read, and what the partition waits for."""
        latest = self.latest.get(number)
        if latest is None:
            return 0, _UNKNOWN
        return latest.clock_ms, Wake(latest.deadline_ms, latest.warn_ms, latest.due > 0)

    def _publish(self) -> None:
        if self._unpublished:
            self._publish_s = time.monotonic() + _STATUS_S
        for number in self._unpublished:
            self._ticker.publish(self.latest[number])
        self._unpublished.clear()

    def _on_done(self, partition: int, offset: int) -> None:
        policy = self._policies[partition]
        if offset < 0:
            _log.warning("a TICK was not written", extra={"partition": partition})
            policy.on_failed()
        else:
            policy.on_delivered(offset)

    def close(self) -> None:
        """Publish what is new, and end the client; idempotent."""
        self._publish()
        self._ticker.close()
