"""The redelivery tracker on Spark: starts the query, claims the partitions, keeps it alive.

One engine serves a namespace at a time: the later start wins (R22), and nothing is fired in a
partition before the TICK of this start was read there (R17). The driver also settles what the query
has folded (``settling.py``), and appends the TICKs that silent partitions need (R4).

A tracker that stands by (R36) folds along, and owns nothing until it takes over. Its query runs
like that of an active one, on a checkpoint of its own, and is not live: no TICK of its start is in
the log, so the fold plans nothing, and no ledger is touched. Taking over is what any start does
behind its checks: claim the ledgers, append the TICKs. The query goes on, and has everything in its
state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # no hints
from pyspark.errors import PySparkException

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.errors import (
    ConfigError,
    DataLossError,
    FencedError,
    KafkaMQError,
    StateError,
    WireError,
)
from kafkamq.markers.rules.hold import NEVER
from kafkamq.markers.tracker.ledger import (
    Claim,
    LedgerKey,
    OtherEngineError,
    claim,
    is_later_start,
    read_ledgers,
)
from kafkamq.markers.tracker.metrics import TrackerMetrics
from kafkamq.markers.tracker.records import Ticker
from kafkamq.markers.tracker.succession import SIGN_MS, Succession
from kafkamq.markers.tracker.takeover import require_unbroken
from kafkamq.markers.wire.records import Position, TrackerStatus
from kafkamq.metrics.catalog import STANDBY
from kafkamq.metrics.health import Loop, health
from kafkamq.queue.topics import require_topics
from kafkamq.spark.checkpoint import Checkpoint, CheckpointNote
from kafkamq.spark.failures import SparkGoneError, advised, query_failure, spark_failure
from kafkamq.spark.parallelism import cores, tracker_tasks
from kafkamq.spark.progress import watching
from kafkamq.spark.session import build_session, end_session, has_session
from kafkamq.spark.tracker.folding import FoldSettings, most_actions
from kafkamq.spark.tracker.query import QueryPlan, start_query
from kafkamq.spark.tracker.settling import RowSettling, TickKeeper, take_turn
from kafkamq.transport.admin import Admin, TopicInfo
from kafkamq.transport.log_reader import LogReader, log_reader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_log = logging.getLogger(__name__)

MAX_TASKS = 10_000
_STEP_S = 0.1
MAX_FAILURES = 20
_SHARED_S = 2.5 * SIGN_MS / 1000
_MAX_TURN_S = 90.0
LONG_BATCH_S = 60.0
MAX_BATCH_S = 600.0
_MAX_PAUSE_S = 30.0
_TOPOLOGY_S = 10.0
# What no restart mends, or where a restart would do harm.
_FINAL = (ConfigError, DataLossError, WireError, SparkGoneError, StateError)


class StoppedError(StateError):
    """A tracker was stopped before it had started."""


def _query_label(name: str) -> str:
    """The tracker's own query is always ``tracker``: its name has the engine's id in it."""
    return "tracker" if name.startswith("kafkamq tracker of ") else name


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


@dataclass(eq=False)
class Run:
    """One start of the engine, while it runs; used by the minding thread."""

    plan: QueryPlan
    keeper: TickKeeper
    settling: RowSettling
    query: StreamingQuery
    stages: Stages
    has_progressed: bool = False
    is_turning: bool = True

    def __post_init__(self) -> None:
        self.reader = LogReader(self.plan.config)
        self._batch = -1
        self._looked_s = self.counted_s = time.monotonic()

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
            self.stages.done("first batch")
        self._batch = progress["batchId"]
        self.has_progressed = True
        took_ms = progress["durationMs"].get("triggerExecution", 0)
        _log.debug("batch", extra={"batch": self._batch, "took_ms": took_ms})

    def end(self) -> None:
        # Otherwise a batch would wait.
        self.settling.close()
        try:
            self.query.stop()
        except Exception:  # noqa: BLE001 - py4j raises anything when the JVM is gone
            _log.info("the query could not be stopped, the JVM may be gone")
        self.keeper.close()
        self.reader.close()


class SparkTracker:
    """The tracker of one namespace as a Spark job; context manager.

    Args:
        config: The namespace, and Kafka's properties for every client, in the workers too.
        tracker: How it tracks; the same settings as for the in-process tracker.
        checkpoint: Folder for Spark's state, on any file system that all workers reach. Losing it
            loses no message: the next start folds again from the positions in the ledger.
        master: Where Spark runs, when there is no session yet.
        trigger_s: Shortest time between two batches where nothing falls due; a batch runs only
            when there are markers.
        max_markers_per_batch: Back-pressure after an outage.
        tasks: Tasks of a batch. None: those of the checkpoint; of a new one as many as there are
            cores, and never more than marker partitions. Another number than the checkpoint's
            folds again from the positions in Kafka.
        spark: A session to run in; None: one of its own.
        settings: Spark properties for its own session.
        stop: Ends it, and a start that has not claimed yet.
    """

    _is_passive = False
    _spark: SparkSession
    _loop: Loop
    _batches: Loop

    def __init__(
        self,
        config: ServiceConfig,
        tracker: TrackerConfig | None = None,
        *,
        checkpoint: str,
        master: str = "local[2]",
        trigger_s: float = 1.0,
        max_markers_per_batch: int = 200_000,
        tasks: int | None = None,
        spark: SparkSession | None = None,
        settings: Mapping[str, str] | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        if not checkpoint:
            raise ConfigError("checkpoint is empty: name a folder for Spark's state")
        if not 0.0 <= trigger_s <= 60.0:
            raise ConfigError(f"trigger_s is {trigger_s!r}: it must be from 0 to 60 s")
        if max_markers_per_batch < 1:
            raise ConfigError(f"max_markers_per_batch is {max_markers_per_batch}: it must be >= 1")
        if tasks is not None and not 1 <= tasks <= MAX_TASKS:
            raise ConfigError(f"tasks is {tasks}: it must be from 1 to {MAX_TASKS:,}")
        self.config = config
        self.tracker = tracker or TrackerConfig()
        self._tasks = tasks
        self._checkpoint = checkpoint
        self._master = master
        self._trigger_ms = round(trigger_s * 1000)
        self._max_markers = max_markers_per_batch
        self._given_session = spark
        self._settings = settings
        self._run: Run | None = None
        self._partitions = 0
        self._claimed = Claim()
        # A checkpoint that is lost takes the engine's id along.
        self._former: set[str] = set()
        self._settling: RowSettling | None = None
        self._stopping = threading.Event()
        self._stopped_by_caller = stop or threading.Event()
        self._thread = threading.Thread(target=self._mind, name="kafkamq-tracker", daemon=True)
        self._error: BaseException | None = None
        self._ending = ExitStack()
        self._succession = Succession(config, stands_by=self._is_passive)
        self._stages = Stages()

    def start(self) -> SparkTracker:
        """Check, claim and start; returns when the query runs.

        Raises:
            ConfigError: Topics, checkpoint or environment cannot work (R23).
            StateError: The checkpoint is older than its ledger, or ``stop`` is set; FencedError: a
                later start exists.
            QueryFailedError: Spark cannot read the checkpoint, or write there.
            BrokerError, DeadlineExceededError: The brokers do not answer.
        """
        self._stages = Stages()
        for finding in require_topics(self.config, max_lease_ms=self.tracker.max_lease_ms):
            _log.warning("topic check: %s", finding)
        self._stages.done("topics")
        try:
            self._open_session()
            self._launch(takeover=self.tracker.takeover)
            self._show()
            self._thread.start()
        except BaseException:
            self.stop()
            raise
        return self

    def _open_session(self) -> None:
        spark = self._given_session
        is_ours = spark is None and not has_session()
        if spark is None:
            spark = build_session(
                app_name=f"kafkamq tracker {self.config.namespace}",
                master=self._master,
                settings=self._settings,
            )
        self._stages.done("session")
        self._spark = spark
        if is_ours:
            topic = self.config.marker_topic
            self._ending.callback(_log.info, "tracker stopped", extra={"topic": topic})
            self._ending.callback(end_session, spark)
        self._ending.enter_context(watching(spark, _query_label))
        self._ending.enter_context(self._succession)
        self._ending.callback(STANDBY.watch(lambda: {("tracker",): float(self.stands_by)}))

    def _show(self) -> None:
        self._ending.callback(TrackerMetrics(self.config, lambda: self.statuses().values()).close)
        name = f"tracker of {self.config.namespace}"
        self._batches = health.add(f"batches of the {name}", max_age_s=MAX_BATCH_S)
        self._ending.callback(health.remove, self._batches)
        self._loop = health.add(name, max_age_s=_MAX_TURN_S, is_ready=self._is_ready)
        self._ending.callback(health.remove, self._loop)

    def _launch(self, *, takeover: bool) -> None:
        try:
            self._begin(takeover=takeover)
        except (Py4JError, PySparkException, OSError) as error:
            raise advised(spark_failure(error), self._checkpoint) from error
        finally:
            settling, self._settling = self._settling, None
            if settling is not None and self._run is None:
                self._claimed.ledgers.clear()
                settling.close()

    def _begin(self, *, takeover: bool) -> None:
        plan = self._plan(self._spark, takeover=takeover)
        self._start_run(self._spark, plan)
        self._succession.active(plan.fold.epoch)

    def _start_run(self, spark: SparkSession, plan: QueryPlan) -> None:
        settling = self._settling
        assert settling is not None, "made with the plan"
        keeper = TickKeeper(self.config, self.tracker, token=plan.fold.token)
        try:
            if plan.fold.epoch:
                settling.own(self._claimed)
                keeper.begin(range(self._partitions), epoch=plan.fold.epoch)
            self._stages.done("ticks")
            # The next start has an epoch of its own.
            self._claimed = Claim()
            self._require_wanted()
            query = start_query(spark, plan, settling.run)
            self._stages.done("query")
        except BaseException:
            keeper.close()
            raise
        self._run = Run(plan, keeper, settling, query, self._stages)
        _log.info(
            "tracker started",
            extra={
                "topic": self.config.marker_topic,
                "engine": plan.note.engine,
                "epoch": plan.fold.epoch,
                "partitions": self._partitions,
                "tasks": plan.note.tasks,
                "took_s": dict(self._stages.took_s),
            },
        )

    def _plan(self, spark: SparkSession, *, takeover: bool) -> QueryPlan:
        config, topic = self.config, self.config.marker_topic
        folder = Checkpoint(spark, self._checkpoint)
        info, known, note, wanted = self._look(folder)
        is_new = note is None
        note = note or CheckpointNote.new("spark", topic=topic, tasks=wanted)
        if self._tasks is None and wanted > note.tasks:
            _log.info("more cores than tasks: --tasks %d would use them", wanted)
        wanted = self._tasks or note.tasks
        is_moving = note.tasks != wanted
        # A claim fences the tracker that runs, and writes positions: judge this start before it.
        if is_new or is_moving:
            require_unbroken(config, info.partitions)
        note.require_newest({} if is_moving else known, folder.last_batch(below=note.folder))
        folder.require_writable()
        self._require_wanted()
        self._succession.take_over(note.engine)
        settling = self._settles(note.engine)
        self._former.add(note.engine)
        self._claimed = claimed = claim(
            config,
            engine=note.engine,
            partitions=info.partitions,
            takeover=takeover,
            former=self._former,
            begun=self._claimed,
            kept=settling.kept,
        )
        self._stages.done("claim")
        if is_new:
            starting = self._first_offsets(claimed, is_lost=True)
            note = folder.write(replace(note, starting=starting))
        elif is_moving:
            starting = self._first_offsets(claimed, is_lost=False)
            note = folder.write(note.moved(wanted, starting))
            # The batch of a position is one of the old folder.
            for number, position in claimed.positions.items():
                claimed.positions[number] = replace(position, batch=0)
        else:
            note.require_newest(claimed.positions, folder.last_batch(below=note.folder))
        folder.drop_earlier(note)
        return self._query_plan(note, claimed.epoch, info)

    @property
    def _is_stopped(self) -> bool:
        return self._stopping.is_set() or self._stopped_by_caller.is_set()

    def _require_wanted(self) -> None:
        if self._is_stopped:
            raise StoppedError("the tracker was stopped before it had started")

    def _look(
        self, folder: Checkpoint
    ) -> tuple[TopicInfo, dict[int, Position], CheckpointNote | None, int]:
        """Return the markers' topic, its ledgers, the checkpoint's note, and tasks of a new one."""
        config, topic = self.config, self.config.marker_topic
        with Admin(config) as admin:
            info = admin.require_topic(topic)
            keys = [LedgerKey.of_markers(config, number) for number in range(info.partitions)]
            known = read_ledgers(admin, keys, stable=False)
        self._partitions = info.partitions
        wanted = self._tasks or tracker_tasks(info.partitions, cores(folder.spark))
        note = folder.note(topic)
        self._stages.done("checkpoint")
        return info, {key.partition: each for key, each in known.items()}, note, wanted

    def _settles(self, engine: str) -> RowSettling:
        self._settling = RowSettling(
            self.config, self.tracker, engine=engine, trigger_ms=self._trigger_ms
        )
        return self._settling

    def _query_plan(self, note: CheckpointNote, epoch: int, info: TopicInfo) -> QueryPlan:
        retention_ms = int(info.settings.get("retention.ms", "-1"))
        return QueryPlan(
            config=self.config,
            note=note,
            fold=FoldSettings(
                engine=note.engine,
                epoch=epoch,
                max_lease_ms=self.tracker.max_lease_ms,
                carry_after_ms=NEVER if retention_ms < 0 else retention_ms // 4,
                max_actions=most_actions(self.tracker, info.partitions),
                starting=note.starting,
            ),
            checkpoint=note.place(self._checkpoint),
            max_markers=self._max_markers,
        )

    def _first_offsets(self, claimed: Claim, *, is_lost: bool) -> dict[int, int]:
        """Say where folding begins without state: the ledger's positions, else the logs' starts."""
        starts = log_reader(self.config).log_starts(
            self.config.marker_topic, range(self._partitions)
        )
        found = {number: position.position for number, position in claimed.positions.items()}
        if found and is_lost:
            _log.warning(
                "checkpoint %s holds no state: folding again from the positions in the ledger, "
                "which rebuilds every open message (nothing is lost; a message that ended within "
                "the last minute before the old tracker stopped may be delivered once more)",
                self._checkpoint,
                extra={"positions": found},
            )
        return {**starts, **found}

    # ---- while it runs

    def _mind(self) -> None:
        """The thread beside the query: TICKs, added partitions, restarts."""
        failures = 0
        refusals = 0
        try:
            while not self._is_stopped:
                self._loop.beat()
                self._succession.moves()
                run = self._run
                error = self._step(run) if run is not None else None
                if run is not None and error is None:
                    failures = 0 if run.has_progressed else failures
                    if run.is_turning:
                        self._batches.beat()
                    continue
                self._batches.beat()
                if error is not None:
                    failures += 1
                    if run is not None and not run.has_progressed:
                        error = advised(error, self._checkpoint)
                    self._end_run()
                    self._succession.pause()
                    if self._is_final(error) or failures > MAX_FAILURES:
                        raise error
                    _log.warning(
                        "the query failed and is started again: %s",
                        error,
                        extra={"failures": failures},
                    )
                tries = min(failures + refusals, 10)
                self._stopping.wait(min(_MAX_PAUSE_S, 0.25 * 2.0**tries))
                if not self._is_stopped:
                    refusals = 0 if self._relaunch() else refusals + 1
        except BaseException as error:  # noqa: BLE001 - handed to wait() and stop()
            if self._is_stopped:
                _log.info("the tracker was stopped, and ended: %s", error)
            else:
                self._error = error
                _log.error("the tracker ended: %s", error)
        finally:
            self._end_run()

    def _is_final(self, error: KafkaMQError) -> bool:
        return is_later_start(error) or isinstance(error, _FINAL)

    def _step(self, run: Run) -> KafkaMQError | None:
        """A tenth of a second of minding; returns why the run is over."""
        try:
            if not run.query.isActive:
                failed = run.query.exception()
                if failed is None:
                    return StateError("the Spark query was stopped from outside")
                return query_failure(failed)
            run.note_progress()
            take_turn(run.settling, run.keeper, _STEP_S)
            if not self._is_passive and time.monotonic() - run.counted_s >= _TOPOLOGY_S:
                self._add_partitions(run)
        except KafkaMQError as error:
            return error
        except (Py4JError, OSError) as error:
            return spark_failure(error)
        return None

    def _relaunch(self) -> bool:
        """Start again unless another engine did meanwhile; whether it runs now."""
        self._stages = Stages()
        try:
            self._launch(takeover=False)
            return True
        except OtherEngineError as error:
            why = f"another engine took over: {error}"
            failed: KafkaMQError = FencedError(why, code="LATER_START", is_fatal=True)
            failed.__cause__ = error
        except KafkaMQError as error:
            failed = error
        if self._is_final(failed):
            raise failed
        _log.warning("not started yet: %s", failed)
        return False

    def _add_partitions(self, run: Run) -> None:
        """Claim marker partitions that were added; the source finds them by itself (R26)."""
        run.counted_s = time.monotonic()
        count = run.reader.partition_count(self.config.marker_topic)
        for number in range(self._partitions, count):
            run.settling.adopt(number)
            run.keeper.begin_added(number)
            self._partitions = number + 1
            _log.info("marker partition added", extra={"partition": number})

    def _end_run(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.end()

    # ---- for its owner

    @property
    def stands_by(self) -> bool:
        """Return whether it waits for its turn (R36); False: it is active, or about to be."""
        return self._is_passive

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    @property
    def tasks(self) -> int:
        """Into how many tasks its batches are cut; 0: no query runs just now."""
        run = self._run
        return 0 if run is None else run.plan.note.tasks

    def statuses(self) -> dict[int, TrackerStatus]:
        """Return what this start has published last, by marker partition (R24)."""
        run = self._run
        return {} if run is None else dict(run.keeper.latest)

    def _is_ready(self) -> bool:
        if self._batches.state().age_s > LONG_BATCH_S:
            return False
        statuses = self.statuses()
        return len(statuses) == self._partitions and all(each.is_live for each in statuses.values())

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it ends; True when it has.

        Raises:
            KafkaMQError: Why it ended, when nobody stopped it.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def stop(self) -> None:
        """End the query, and the session that it made; idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(60.0)
        self._end_run()
        self._ending.close()

    def __enter__(self) -> SparkTracker:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class StandbyTracker(SparkTracker):
    """A Spark tracker that waits while another one is active, and when it is fenced.

    Its checkpoint is a folder that no other tracker uses. What is in it is made anew whenever the
    tracker begins to stand by: folded from the positions in the ledgers.
    """

    _is_passive = True
    _is_warm = False

    # ---- beside an active one

    def _begin(self, *, takeover: bool) -> None:
        if not self._is_passive:
            super()._begin(takeover=takeover)
            return
        self._is_warm = False
        plan = self._plan_beside(self._spark)
        self._start_run(self._spark, plan)
        with closing(Ticker(self.config)) as ticker:
            # On a silent log, too, it has a first batch.
            ticker.tick_all(range(self._partitions), engine=plan.note.engine, epoch=0)

    def _plan_beside(self, spark: SparkSession) -> QueryPlan:
        """Return what folds from the ledgers' positions on, without a claim."""
        folder = Checkpoint(spark, self._checkpoint)
        info, known, old, wanted = self._look(folder)
        if old is not None:
            self._require_alone(old)
        require_unbroken(self.config, info.partitions)
        starting = self._first_offsets(Claim(positions=known), is_lost=False)
        if old is None:
            note = CheckpointNote.new("spark", topic=self.config.marker_topic, tasks=wanted)
            note = folder.write(replace(note, starting=starting))
        else:
            note = folder.write(old.moved(wanted, starting))
            folder.drop_earlier(note)
        self._settles(note.engine)
        return self._query_plan(note, 0, info)

    def _require_alone(self, note: CheckpointNote) -> None:
        """Refuse a folder that a tracker uses which lives.

        Raises:
            ConfigError: It gives signs of life.
        """
        while not self._succession.is_caught_up and not self._is_stopped:
            self._stopping.wait(0.1)
        deadline_s = time.monotonic() + _SHARED_S
        while time.monotonic() < deadline_s and not self._is_stopped:
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
        return super()._relaunch()

    def _is_ready(self) -> bool:
        return self._is_warm if self._is_passive else super()._is_ready()


def run_spark_tracker(
    config: ServiceConfig,
    tracker: TrackerConfig | None = None,
    *,
    stop: threading.Event | None = None,
    standby: bool = False,
    **others: Any,
) -> None:
    """Run a tracker until ``stop`` is set; ``others`` are arguments of ``SparkTracker``.

    Raises:
        KafkaMQError: Why it could not start, or ended.
    """
    stop = stop or threading.Event()
    kind = StandbyTracker if standby else SparkTracker
    with suppress(StoppedError), kind(config, tracker, stop=stop, **others) as running:
        while not stop.is_set() and not running.wait(0.2):
            pass
