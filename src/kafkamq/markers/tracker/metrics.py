"""A tracker's metrics, the same for every engine: what its status records say (R24)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from kafkamq.config import ServiceConfig
from kafkamq.markers.rules.delivery import Carry, Settle, settled_of
from kafkamq.markers.tracker.log_ends import LogWatch
from kafkamq.markers.tracker.settlement import SettleReport
from kafkamq.markers.wire.status import TrackerStatus
from kafkamq.metrics import catalog
from kafkamq.metrics.catalog import LATENESS
from kafkamq.metrics.families import Family, Labels


class TrackerMetrics:
    """Shows the statuses of one tracker until ``close``; asked by scrapes, free otherwise."""

    def __init__(
        self, config: ServiceConfig, statuses: Callable[[], Iterable[TrackerStatus]]
    ) -> None:
        """``statuses``: the latest per partition of this process; any thread may call it."""
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
            catalog.LSO_STALLED.watch(self._markers_stalled),
            catalog.MESSAGES_LSO_STALLED.watch(self._messages_stalled),
        ]

    def close(self) -> None:
        """Show them no more; idempotent."""
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
        ends = self._logs.markers()
        return {
            (str(each.partition),): max(0, ends[each.partition].stable_offset - each.position)
            for each in self._statuses()
            if each.partition in ends
        }

    def _markers_stalled(self) -> dict[Labels, float]:
        ours = {each.partition for each in self._statuses()}  # replicas share the partitions
        now_s = time.monotonic()
        return {
            (str(number),): end.stalled_s(now_s)
            for number, end in self._logs.markers().items()
            if number in ours
        }

    def _messages_stalled(self) -> dict[Labels, float]:
        now_s = time.monotonic()
        return {
            (str(number),): end.stalled_s(now_s) for number, end in self._logs.messages().items()
        }


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
