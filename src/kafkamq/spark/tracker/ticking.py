"""Time for silent partitions: reads what the workers publish, appends TICKs where R4 wants one.

Spark runs a batch only when there are records. What waits for a time to pass would wait forever
on a silent log, so the driver appends TICKs: one per partition at a start (R17), later by the
policy of ``rules/ticks.py`` from the status that each batch publishes (R24). What a TICK passes is
settled in the batch that reads it, so it is written just before a batch begins, if it can wait.
A status may be lost; Spark itself says how far a batch has read, and a TICK asks for another one.
A partition that rests gets a TICK an hour, too: without a batch nobody commits its position, and
Kafka forgets one of a group that is silent for days.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.markers.rules.redelivery import Wake
from kafkamq.markers.rules.ticks import TickPolicy
from kafkamq.markers.tracker.status_reader import StatusReader
from kafkamq.markers.tracker.ticker import Ticker
from kafkamq.markers.wire.status import TrackerStatus
from kafkamq.spark.tracker.lateness import observe_lateness
from kafkamq.transport.clock import monotonic_ms

_log = logging.getLogger(__name__)
_BATCHES = 5  # whose durations are remembered
_MAX_LAG_MS = 3_000
MAX_REST_MS = 3_600_000
_UNKNOWN = Wake(None, None, False)
_LEAD_MS = 150  # before a batch begins; ``step`` is called more often than that


class TickKeeper:
    """TICKs of one start of the engine; one owner thread but for ``latest``."""

    def __init__(
        self,
        config: ServiceConfig,
        tracker: TrackerConfig,
        *,
        engine: str,
        epoch: int,
        token: str,
        trigger_ms: int = 0,
    ) -> None:
        self._trigger_ms = trigger_ms
        self._lead_ms = _LEAD_MS if trigger_ms > _LEAD_MS else 0
        self._config = config
        self._topic = config.marker_topic
        self._max_silence_ms = tracker.max_silence_ms
        self._engine = engine
        self._epoch = epoch
        self._token = token  # in the TICKs: which of them this start waits for
        self._ticker = Ticker(config)
        self._reader = StatusReader(config)
        self._policies: dict[int, TickPolicy] = {}
        self._rests_since_ms: dict[int, int] = {}  # the last TICK or status
        self.latest: dict[int, TrackerStatus] = {}
        self.lag = Lag()

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
            policy = TickPolicy(now_ms, self._max_silence_ms, self._lead_ms)
            self._policies[number] = policy
            policy.on_sent(now_ms)
            policy.on_delivered(offsets[number])
            self._rests_since_ms[number] = now_ms

    def begin_added(self, partition: int) -> None:
        """``begin`` for a partition that the topic got later: clients remember the old count."""
        self._ticker.close()
        self._ticker = Ticker(self._config)
        self.begin([partition])

    def step(self, timeout_s: float) -> None:
        """Take in what was published within ``timeout_s``, and append what is wanted."""
        for status in self._reader.poll(timeout_s):
            if (status.topic, status.engine, status.epoch) == (
                self._topic,
                self._engine,
                self._epoch,
            ):
                self._take(status)
        self._ticker.poll()
        now_ms = monotonic_ms()
        is_read_soon = batch_is_near(self._trigger_ms, time.time() * 1000)
        for number, policy in self._policies.items():
            latest = self.latest.get(number)
            clock_ms, wake = 0, _UNKNOWN
            if latest is not None:
                clock_ms = latest.clock_ms
                wake = Wake(latest.deadline_ms, latest.warn_ms, latest.due > 0)
            rests = now_ms - self._rests_since_ms[number] >= MAX_REST_MS
            if rests or policy.wants_tick(now_ms, clock_ms, wake, is_read_soon=is_read_soon):
                policy.on_sent(now_ms)
                self._rests_since_ms[number] = now_ms
                _log.debug("TICK wanted", extra={"partition": number})
                self._ticker.tick(
                    number, engine=self._token, epoch=self._epoch, on_done=self._on_done
                )

    def batch_done(self, ends: Mapping[int, int]) -> None:
        """A batch has read partitions up to these ends; their statuses are there, or under way."""
        now_ms = monotonic_ms()
        for number, end in ends.items():
            policy = self._policies.get(number)
            if policy is not None:
                policy.on_passed(now_ms, end)

    def _take(self, status: TrackerStatus) -> None:
        policy = self._policies.get(status.partition)
        if policy is None:
            return  # its TICK of the start comes first
        before = self.latest.get(status.partition)
        if before is None or before.batch < status.batch:  # a repeated batch was counted
            observe_lateness(status.lateness, status.partition)
        self.latest[status.partition] = status
        _log.debug("status", extra={"status": status})
        now_ms = self._rests_since_ms[status.partition] = monotonic_ms()
        read_ms = now_ms - self.lag.hear(status.batch, now_ms)
        policy.on_read(read_ms, status.position, status.clock_ms)

    def _on_done(self, partition: int, offset: int) -> None:
        policy = self._policies[partition]
        if offset < 0:
            _log.warning("a TICK was not written", extra={"partition": partition})
            policy.on_failed()
        else:
            policy.on_delivered(offset)

    def close(self) -> None:
        """End the clients; idempotent."""
        self._reader.close()
        self._ticker.close()


class Lag:
    """How long ago the records were read of which a batch tells: about as long as one takes.

    One that is too long has a price: the policy remembers for a minute how far the log's clock was
    ahead, so its TICKs would be early and pass too little. So the shortest of the last durations
    counts, and the time since the batch before was heard of, if that is less.
    """

    def __init__(self) -> None:
        self._took_ms = deque([0], maxlen=_BATCHES)
        self._batch = -1
        self._heard_ms = 0  # of any batch
        self._before_ms = 0  # ... of one before this batch

    def note(self, took_ms: int) -> None:
        """A batch with records is done."""
        self._took_ms.append(took_ms)

    def hear(self, batch: int, monotonic_ms: int) -> int:
        """A partition tells of a batch; returns the lag, 0 to 3000 ms."""
        if batch > self._batch:
            self._batch, self._before_ms = batch, self._heard_ms
        self._heard_ms = monotonic_ms
        return min(*self._took_ms, _MAX_LAG_MS, monotonic_ms - self._before_ms)


def batch_is_near(trigger_ms: int, now_ms: float) -> bool:
    """Whether Spark begins a batch next: it does so at multiples of the trigger since the epoch."""
    return trigger_ms - now_ms % max(1, trigger_ms) <= _LEAD_MS
