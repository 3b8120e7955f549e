"""One start of the tracker's engine on Spark, while it runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kafkamq.spark.tracker.query import QueryPlan
from kafkamq.spark.tracker.settling import RowSettling, TickKeeper
from kafkamq.transport.log_reader import LogReader

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_log = logging.getLogger(__name__)
_MAX_PAUSE_S = 30.0
_TOPOLOGY_S = 10.0  # how often added marker partitions are looked for


class Stages:
    """The stages of one start, one after the other; begins when it is made."""

    def __init__(self) -> None:
        self._began_s = self._last_s = time.monotonic()
        self.took_s: dict[str, float] = {}

    def done(self, name: str) -> None:
        now_s = time.monotonic()
        self.took_s[name] = round(now_s - self._last_s, 2)
        self._last_s = now_s
        _log.debug("%s: done after %.2f s", name, now_s - self._began_s)


class Run:
    """One start of the engine, while it runs; used by the minding thread."""

    def __init__(
        self,
        plan: QueryPlan,
        keeper: TickKeeper,
        settling: RowSettling,
        query: StreamingQuery,
        *,
        stages: Stages,
    ) -> None:
        self.plan = plan
        self.keeper = keeper
        self.settling = settling
        self.query = query
        self.reader = LogReader(plan.config)
        self.has_progressed = False
        self.is_turning = True  # lately a batch ended, or there was nothing to do
        self._batch = -1
        self._stages = stages
        self._looked_s = time.monotonic()
        self._counted_s = time.monotonic()

    def note_progress(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < 1.0:
            return
        self._looked_s = now_s
        progress: Mapping[str, Any] | None = self.query.lastProgress
        if progress is None or progress["batchId"] == self._batch:
            # While nothing comes Spark waits in the source, a second at a time; where nothing falls
            # due, inside of a batch that is over.
            status = self.query.status
            is_busy = status["isTriggerActive"] and status["isDataAvailable"]
            self.is_turning = self.settling.is_waiting or not is_busy
            return
        self.is_turning = True
        if not self.has_progressed:
            self._stages.done("first batch")
        self._batch = progress["batchId"]
        self.has_progressed = True
        took_ms = progress["durationMs"].get("triggerExecution", 0)
        _log.debug("batch", extra={"batch": self._batch, "took_ms": took_ms})

    def is_topology_due(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._counted_s < _TOPOLOGY_S:
            return False
        self._counted_s = now_s
        return True

    def end(self) -> None:
        """Stop what runs; total."""
        self.settling.close()  # or a batch would wait
        try:
            self.query.stop()
        except Exception:  # noqa: BLE001 - py4j raises anything when the JVM is gone
            _log.info("the query could not be stopped, the JVM may be gone")
        self.keeper.close()
        self.reader.close()


def pause_s(tries: int) -> float:
    """Return the pause before the next start: 0.25 s, then twice as long each time, up to the
    bound.
    """
    return min(_MAX_PAUSE_S, 0.25 * 2.0 ** min(tries, 10))
