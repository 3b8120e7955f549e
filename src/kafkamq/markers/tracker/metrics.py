"""A tracker's metrics, the same for every engine: statuses and the ends of its logs (R24)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kafkamq.config import ServiceConfig
from kafkamq.errors import KafkaMQError
from kafkamq.markers.rules.delivery import Carry, Settle, settled_of
from kafkamq.markers.tracker.settlement import SettleReport
from kafkamq.markers.wire.records import TrackerStatus
from kafkamq.metrics import catalog
from kafkamq.metrics.catalog import LATENESS, Family, Labels
from kafkamq.transport.admin import Admin

_INTERVAL_S = 2.0
_TIMEOUT_S = 5.0
_log = logging.getLogger(__name__)


class TrackerMetrics:
    """Shows the statuses of one tracker until ``close``; asked by scrapes, free otherwise."""

    def __init__(
        self, config: ServiceConfig, statuses: Callable[[], Iterable[TrackerStatus]]
    ) -> None:
        """``statuses``: the latest per partition of this process; any thread may call it."""
        self._config = config
        self._statuses = statuses
        self._logs = LogWatch(config)
        fields: tuple[tuple[Family, Callable[[TrackerStatus], float]], ...] = (
            (catalog.REDELIVERED, lambda status: status.redelivered),
            (catalog.DEAD_LETTERED, lambda status: status.dead_lettered),
            (catalog.TRACKER_LATE, lambda status: status.late_verdicts),
            (catalog.MALFORMED, lambda status: status.malformed),
            (catalog.IN_PROGRESS, lambda status: status.entries),
            (catalog.DUE, lambda status: status.due),
            (catalog.AWAITED, lambda status: status.awaited),
            (catalog.POSITION, lambda status: status.position),
            (catalog.LIVE, lambda status: float(status.is_live)),
        )
        self._forget = [family.watch(self._each(read)) for family, read in fields]
        self._forget += [
            catalog.OLDEST_DEADLINE.watch(self._deadlines),
            catalog.LAG.watch(self._lags),
            catalog.LSO_STALLED.watch(lambda: self._stalled(config.marker_topic)),
            catalog.MESSAGES_LSO_STALLED.watch(lambda: self._stalled(config.message_topic)),
        ]

    def close(self) -> None:
        for forget in self._forget:
            forget()
        self._logs.close()

    def _each(self, read: Callable[[TrackerStatus], float]) -> Callable[[], dict[Labels, float]]:
        return lambda: {(str(each.partition),): read(each) for each in self._statuses()}

    def _deadlines(self) -> dict[Labels, float]:
        return {
            (str(each.partition),): (each.deadline_ms - each.clock_ms) / 1000
            for each in self._statuses()
            if each.deadline_ms is not None
        }

    def _lags(self) -> dict[Labels, float]:
        ends = self._logs.ends(self._config.marker_topic)
        return {
            (str(each.partition),): max(0, ends[each.partition].stable_offset - each.position)
            for each in self._statuses()
            if each.partition in ends
        }

    def _stalled(self, topic: str) -> dict[Labels, float]:
        now_s, found = time.monotonic(), self._logs.ends(topic)
        if topic == self._config.marker_topic:
            # Replicas share the partitions.
            ours = {each.partition for each in self._statuses()}
            found = {number: end for number, end in found.items() if number in ours}
        return {(str(number),): end.stalled_s(now_s) for number, end in found.items()}


def observe_lateness(
    partition: int, actions: Sequence[Settle | Carry], report: SettleReport, took_s: float
) -> None:
    """How late it was what a settlement has done; ``took_s``: from the plan until it was done."""
    LATENESS.observe_all(
        (
            (max(0.0, (action.clock_ms - action.deadline_ms) / 1000 + took_s), count)
            for action, count in settled_of(actions, [*report.left, *report.awaited])
        ),
        partition,
    )


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The end of one partition's log as it was last seen."""

    stable_offset: int
    # The monotonic time since when it stands below the end; None: it does not.
    stable_since_s: float | None

    def stalled_s(self, now_s: float) -> float:
        return 0.0 if self.stable_since_s is None else max(0.0, now_s - self.stable_since_s)

    def seen(self, stable_offset: int, end_offset: int, now_s: float) -> LogEnd:
        if stable_offset >= end_offset:
            return LogEnd(stable_offset, None)
        if stable_offset > self.stable_offset or self.stable_since_s is None:
            return LogEnd(stable_offset, now_s)
        return self


class LogWatch:
    """Looks at the ends of the markers and messages logs, in a thread of its own.

    The thread begins when somebody asks for the first time: who is never scraped pays nothing.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._has_begun = False
        self._ends: dict[str, dict[int, LogEnd]] = {}

    def close(self) -> None:
        self._stopping.set()

    def ends(self, topic: str) -> dict[int, LogEnd]:
        """Return them by partition of the markers or messages topic, as last seen; no waiting."""
        with self._lock:
            if not self._has_begun and not self._stopping.is_set():
                self._has_begun = True
                threading.Thread(target=self._run, name="kafkamq-log-watch", daemon=True).start()
        return dict(self._ends.get(topic, {}))

    def _run(self) -> None:
        with Admin(self._config, timeout_s=_TIMEOUT_S) as admin:
            while not self._stopping.is_set():
                for topic in (self._config.marker_topic, self._config.message_topic):
                    self._look(admin, topic)
                self._stopping.wait(_INTERVAL_S)

    def _look(self, admin: Admin, topic: str) -> None:
        try:
            ends = admin.log_ends(topic)
        except KafkaMQError as error:
            # What is known grows old, and a stall longer.
            _log.debug("the ends of a log are not known", extra={"error": str(error)})
            return
        now_s = time.monotonic()
        known = self._ends.get(topic, {})
        self._ends[topic] = {
            number: known.get(number, LogEnd(-1, None)).seen(stable, end, now_s)
            for number, (stable, end) in ends.items()
        }
