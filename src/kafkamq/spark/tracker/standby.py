"""A tracker on Spark that stands by: it folds along, and owns nothing until it takes over (R36).

Its query runs like that of an active one, on a checkpoint of its own, and is not live (R17): no
TICK of its start is in the log, so the fold plans nothing, and the sink touches no ledger. Taking
over is what any start does behind its checks: claim the ledgers, append the TICKs. The query goes
on, and has everything in its state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.errors import ConfigError, FencedError, KafkaMQError
from kafkamq.markers.tracker.ledger import (
    Claim,
    LedgerKey,
    claim,
    is_later_start,
    read_ledgers,
)
from kafkamq.markers.tracker.records import Ticker
from kafkamq.markers.tracker.succession import SIGN_MS, Succession
from kafkamq.markers.tracker.takeover import require_unbroken
from kafkamq.spark.checkpoint import CheckpointNote, drop_folder, read_note, write_note
from kafkamq.spark.parallelism import cores, tracker_tasks
from kafkamq.spark.running import Run
from kafkamq.spark.tracker.query import QueryPlan
from kafkamq.spark.tracker.tracker import SparkTracker
from kafkamq.transport.admin import Admin

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["StandbyTracker", "run_spark_tracker"]

_SHARED_S = 2.5 * SIGN_MS / 1000  # as long as signs of a tracker on the same checkpoint may take
_log = logging.getLogger(__name__)


class StandbyTracker(SparkTracker):
    """A Spark tracker that waits while another one is active, and when it is fenced.

    Args:
        config: As for ``SparkTracker``, and so are the others.
        tracker: How it tracks.
        checkpoint: A folder that no other tracker uses. What is in it is made anew whenever the
            tracker begins to stand by: folded from the positions in the ledgers.
        **others: The other arguments of ``SparkTracker``.
    """

    def __init__(
        self,
        config: ServiceConfig,
        tracker: TrackerConfig | None = None,
        *,
        checkpoint: str,
        **others: Any,
    ) -> None:
        super().__init__(config, tracker, checkpoint=checkpoint, **others)
        self._succession = Succession(config, stands_by=True)
        self._is_passive = True
        self._is_warm = False  # its query has done a batch

    @property
    def stands_by(self) -> bool:
        """Whether it waits for its turn; False: it is active, or about to be."""
        return self._is_passive

    # ---- beside an active one

    def _begin(self, *, takeover: bool) -> None:
        if not self._is_passive:
            super()._begin(takeover=takeover)
            return
        assert self._spark is not None, "start() made the session"
        self._is_warm = False
        plan = self._plan_beside(self._spark)
        self._start_run(self._spark, plan)
        with closing(Ticker(self.config)) as ticker:  # on a silent log, too, it has a first batch
            ticker.tick_all(range(self._partitions), engine=plan.note.engine, epoch=0)

    def _plan_beside(self, spark: SparkSession) -> QueryPlan:
        """What folds from the ledgers' positions on, without a claim."""
        config, topic = self.config, self.config.marker_topic
        with Admin(config) as admin:
            info = admin.require_topic(topic)
            keys = [LedgerKey.of_markers(config, number) for number in range(info.partitions)]
            there, known = cores(spark), read_ledgers(admin, keys, stable=False)
        self._partitions = info.partitions
        wanted = self._tasks or tracker_tasks(info.partitions, there)
        note = read_note(spark, self._checkpoint, topic=topic)
        if note is not None:
            self._require_alone(note)
        self._stages.done("checkpoint")
        require_unbroken(config, info.partitions)
        begun = Claim(positions={key.partition: position for key, position in known.items()})
        starting = self._first_offsets(begun, is_lost=False)
        old, note = (
            note,
            (
                CheckpointNote.new("spark", topic=topic, tasks=wanted)
                if note is None
                else note.moved(wanted, starting)
            ),
        )
        note = replace(note, starting=starting)
        write_note(spark, self._checkpoint, note)
        if old is not None:
            drop_folder(spark, self._checkpoint, old)
        self._settles(note.engine)
        return self._query_plan(note, 0, info)

    def _require_alone(self, note: CheckpointNote) -> None:
        """Refuse a folder that a tracker uses which lives.

        Raises:
            ConfigError: It gives signs of life.
        """
        while not self._succession.is_caught_up and not self._stopping.wait(0.1):
            pass
        deadline_s = time.monotonic() + _SHARED_S
        while time.monotonic() < deadline_s and not self._stopping.is_set():
            if self._succession.hears(note.engine):
                raise ConfigError(
                    f"checkpoint {self._checkpoint} is that of a tracker that runs: with --standby "
                    "each tracker needs a folder of its own"
                )
            self._stopping.wait(0.1)

    # ---- while it runs

    def _step(self, run: Run) -> KafkaMQError | None:
        if self._is_passive:
            try:
                self._stand_by(run)
            except KafkaMQError as error:
                return error
        elif self._succession.is_succeeded:
            return FencedError("a later start of a tracker gives signs of life", code="LATER_START")
        return super()._step(run)

    def _stand_by(self, run: Run) -> None:
        """Wait for its turn; behind its first batch, which takes long as processes start."""
        if self._succession.is_chosen and self._is_warm:
            self._take_over(run)
        elif run.has_progressed and not self._is_warm:
            self._is_warm = True
            self._succession.stand_by(run.plan.note.engine)

    def _take_over(self, run: Run) -> None:
        """Claim, and append the TICKs behind which the query is live (R17, R22)."""
        began_s = time.monotonic()
        engine = run.plan.note.engine
        self._succession.take_over(engine)
        with Admin(self.config) as admin:
            partitions = admin.require_topic(self.config.marker_topic).partitions
        claimed = claim(
            self.config,
            engine=engine,
            partitions=partitions,
            begun=Claim(above=self._succession.seen_epoch),
            kept=run.settling.kept,
        )
        self._partitions = partitions
        run.plan = replace(run.plan, epoch=claimed.epoch)
        run.settling.own(claimed)
        run.keeper.begin(range(partitions), epoch=claimed.epoch)
        self._is_passive = False
        self._succession.active(claimed.epoch)
        _log.info(
            "took over",
            extra={
                "topic": self.config.marker_topic,
                "engine": engine,
                "epoch": claimed.epoch,
                "took_s": round(time.monotonic() - began_s, 3),
            },
        )

    def _is_final(self, error: KafkaMQError) -> bool:
        if not is_later_start(error):
            return super()._is_final(error)
        if not self._is_passive:
            _log.warning("standing by again: %s", error)
        self._is_passive = True
        return False

    def _relaunch(self) -> bool:
        self._is_passive = self._is_passive or self._succession.is_succeeded
        if not self._is_passive:
            return super()._relaunch()  # where a later start exists it stands by from then on
        try:
            self._launch(takeover=False)
        except KafkaMQError as error:
            if super()._is_final(error):
                raise
            _log.warning("not standing by yet: %s", error)
            return False
        return True

    def _add_partitions(self, run: Run) -> None:
        if not self._is_passive:  # else the claim will find them
            super()._add_partitions(run)

    def _is_ready(self) -> bool:
        return self._is_warm if self._is_passive else super()._is_ready()


def run_spark_tracker(
    config: ServiceConfig,
    tracker: TrackerConfig | None = None,
    *,
    checkpoint: str,
    master: str = "local[2]",
    trigger_s: float = 1.0,
    tasks: int | None = None,
    settings: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
    standby: bool = False,
) -> None:
    """Run a tracker until ``stop`` is set; for the command line.

    Raises:
        KafkaMQError: Why it could not start, or ended.
    """
    stop = stop or threading.Event()
    kind = StandbyTracker if standby else SparkTracker
    with kind(
        config,
        tracker,
        checkpoint=checkpoint,
        master=master,
        trigger_s=trigger_s,
        tasks=tasks,
        settings=settings,
    ) as running:
        while not stop.is_set() and not running.wait(0.2):
            pass
