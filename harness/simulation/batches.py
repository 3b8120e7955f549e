"""The tracker on Spark, without Spark: its shipped parts in the order in which Spark runs them.

The driver claims the ledgers, appends TICKs and plans where batches end (`StreamReader`); for each
batch and marker partition a task reads the range and folds it over the state of the batch before;
the driver takes what was folded, and the batch is committed while it settles what is due. Plans and
states are kept on the checkpoint, so a batch that was begun is repeated by the next start.

One that stands by (R36) has a checkpoint of its own, and runs beside others: it folds from the
ledgers' positions on, and claims when it is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.simulation.processes import QueueWorld
from harness.simulation.scheduler import Process
from kafkamq.config import TrackerConfig
from kafkamq.errors import KafkaMQError, WireError
from kafkamq.markers.tracker.ledger import Claim, LedgerKey, claim, read_ledgers
from kafkamq.markers.tracker.records import Ticker
from kafkamq.markers.tracker.succession import Succession
from kafkamq.markers.wire.markers import decode_slim
from kafkamq.markers.wire.records import Position
from kafkamq.spark.blocks import encode_block
from kafkamq.spark.options import SourceOptions
from kafkamq.spark.tracker.folding import FOLDED_COLUMNS, FoldSettings, PartitionFold
from kafkamq.spark.tracker.settling import RowSettling, TickKeeper, take_turn
from kafkamq.transport.log_reader import LogRange, log_reader

if TYPE_CHECKING:
    from pyspark.sql.datasource import InputPartition

    from kafkamq.spark.source.streaming import StreamReader

_ATTEMPTS = 4  # spark.task.maxFailures
_STEP_S = 0.05
_LOOK_S = 5.0  # for added partitions
_Offsets = Mapping[str, Mapping[str, "int | str"]]


@dataclass
class _State:
    """The state of one marker partition after a batch, as Spark's state store has it."""

    index: tuple[Any, ...] | None = None
    chunks: dict[tuple[Any, ...], tuple[Any, ...]] = field(default_factory=dict)

    def copy(self) -> _State:
        return _State(self.index, dict(self.chunks))

    def get(self) -> tuple[Any, ...] | None:
        return self.index

    def update(self, newValue: tuple[Any, ...]) -> None:  # noqa: N803 - Spark's names
        self.index = newValue

    def getValue(self, key: tuple[Any, ...]) -> tuple[Any, ...] | None:  # noqa: N802
        return self.chunks.get(key)

    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> None:  # noqa: N802
        self.chunks[key] = value

    def removeKey(self, key: tuple[Any, ...]) -> None:  # noqa: N802
        self.chunks.pop(key, None)


@dataclass
class Checkpoint:
    """What the tracker keeps on its disk."""

    engine: str = "spark-simulated"
    starting: dict[int, int] = field(default_factory=dict)  # first offsets
    ends: dict[int, _Offsets] = field(default_factory=dict)  # by batch: where it ends
    states: dict[int, dict[int, _State]] = field(default_factory=dict)  # by batch and partition
    committed: int = -1


class _TaskLostError(KafkaMQError):
    """An executor went away with a task."""


class BatchTracker:
    """A process of its own; only one at a time runs on a checkpoint."""

    def __init__(
        self,
        world: QueueWorld,
        checkpoint: Checkpoint,
        changed: Callable[[Process], None],
        taken_over: Callable[[], None] | None = None,
    ) -> None:
        """``changed`` is told of executors that are gone; with ``taken_over``, which is told of
        that, it stands by first.
        """
        self.is_closing = False
        self.changed = changed
        self._taken_over = taken_over
        self._is_warm = False
        self._world = world
        self._checkpoint = checkpoint
        self._config = world.config
        limits = world.limits
        self._tracker = TrackerConfig(
            max_silence_ms=limits.tracker.max_silence_ms,
            max_offsets_per_commit=limits.tracker.max_actions,
            position_interval_ms=limits.tracker.position_interval_ms,
            max_deliveries=limits.worker.max_deliveries,
            max_lease_ms=limits.worker.max_lease_ms,
        )
        self._error: KafkaMQError | None = None

    def main(self, process: Process) -> None:
        self.process = process
        config, token = self._config, self._world.rng.randbytes(8).hex()
        trigger_ms = self._world.limits.tracker.trigger_ms
        settling = RowSettling(
            config, self._tracker, engine=self._checkpoint.engine, trigger_ms=trigger_ms
        )
        keeper = TickKeeper(config, self._tracker, token=token)
        with ExitStack() as stack:
            succession = None
            self._count = self._partition_count()
            if self._taken_over is None:
                claimed = self._claim(settling, keeper, Claim())
                self._begin_at(claimed.positions)
            else:
                claimed = Claim()
                succession = stack.enter_context(Succession(config, stands_by=True))
                keys = [LedgerKey.of_markers(config, number) for number in range(self._count)]
                known = read_ledgers(settling.kept[1], keys, stable=False)
                self._begin_at({key.partition: each for key, each in known.items()})
                with closing(Ticker(config)) as ticker:  # behind which it has a first batch
                    ticker.tick_all(range(self._count), engine=self._checkpoint.engine, epoch=0)
            query = self._world.threading.Thread(
                target=self._query, args=(settling, claimed.epoch, token), name="query"
            )
            query.start()
            look_s = 0.0
            while not self.is_closing and self._error is None:
                take_turn(settling, keeper, _STEP_S)
                if succession is not None:
                    self._stand_by(settling, keeper, succession)
                if self._world.wall_s() >= look_s:  # metadata may have been old at the start
                    look_s = self._world.wall_s() + _LOOK_S
                    with suppress(KafkaMQError):
                        self.is_closing |= self._partition_count() > self._count
        settling.close()
        query.join()
        if self._error is not None:
            raise self._error
        keeper.close()

    def _stand_by(self, settling: RowSettling, keeper: TickKeeper, succession: Succession) -> None:
        """What comes of the signs of others, behind the first batch."""
        succession.moves()
        engine = self._checkpoint.engine
        if succession.is_succeeded:
            self.is_closing = True
        elif self._checkpoint.committed >= 0 and not self._is_warm:
            self._is_warm = True
            succession.stand_by(engine)
        elif self._is_warm and succession.is_chosen:
            succession.take_over(engine)
            claimed = self._claim(settling, keeper, Claim(above=succession.seen_epoch))
            succession.active(claimed.epoch)
            assert self._taken_over is not None, "it stood by"
            self._taken_over()

    def _claim(self, settling: RowSettling, keeper: TickKeeper, begun: Claim) -> Claim:
        claimed = claim(
            self._config,
            engine=self._checkpoint.engine,
            partitions=self._count,
            begun=begun,
            kept=settling.kept,
        )
        settling.own(claimed)
        keeper.begin(range(self._count), epoch=claimed.epoch)
        return claimed

    def _begin_at(self, positions: Mapping[int, Position]) -> None:
        """Where folding begins, on an empty checkpoint."""
        if not self._checkpoint.starting:
            log = log_reader(self._config)
            starts = log.log_starts(self._config.marker_topic, range(self._count))
            found = {number: each.position for number, each in positions.items()}
            self._checkpoint.starting = {**starts, **found}

    def _partition_count(self) -> int:
        limits = self._world.limits
        if not limits.new_marker_partitions:
            return limits.marker_partitions
        known = log_reader(self._config).partition_count(self._config.marker_topic)
        return max(limits.marker_partitions, known)

    # ---- the query

    def _query(self, settling: RowSettling, epoch: int, token: str) -> None:
        from kafkamq.spark.source.streaming import StreamReader

        world, config = self._world, self._config
        starting = {str(number): at for number, at in self._checkpoint.starting.items()}
        options = SourceOptions(
            config=config,
            topic=config.marker_topic,
            view="blocks",
            starting={config.marker_topic: starting},
        )
        try:
            reader = StreamReader(options, None)  # type: ignore[arg-type]  # it makes no rows
            executor = _Executor(self, epoch, token)
            while not self.is_closing:
                if not self._batch(reader, executor, settling):
                    world.sleep(_STEP_S)
        except KafkaMQError as error:
            self._error = error

    def _batch(self, reader: StreamReader, executor: _Executor, settling: RowSettling) -> bool:
        """Return whether there was something to read."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable

        checkpoint = self._checkpoint
        number = checkpoint.committed + 1
        start = checkpoint.ends.get(number - 1)
        if start is None:
            start = checkpoint.ends[-1] = reader.initialOffset()
        if number not in checkpoint.ends:
            latest = reader.latestOffset(start, ReadAllAvailable())
            if not list(reader.partitions(start, latest)):
                return False
            checkpoint.ends[number] = latest
        tasks = reader.partitions(start, checkpoint.ends[number])
        frame: Any = _Frame(self._checkpoint, executor, tasks, number)
        settling.run(frame, number)
        checkpoint.committed = number
        checkpoint.states.pop(number - 2, None)
        return True


@dataclass
class _Frame:
    """A batch, as ``foreachBatch`` gives it."""

    checkpoint: Checkpoint
    executor: _Executor
    tasks: Sequence[InputPartition]
    number: int

    def collect(self) -> list[dict[str, object]]:
        """Run its tasks, each until it has not failed, and keep the states."""
        before = self.checkpoint.states.get(self.number - 1, {})
        states = self.checkpoint.states[self.number] = dict(before)
        rows = []
        for task in self.tasks:
            wanted: LogRange = task.wanted  # type: ignore[attr-defined]  # a RangePartition
            state = before.get(wanted.partition, _State())
            for attempt in range(_ATTEMPTS):
                try:
                    done = self.executor.run(wanted, state.copy())
                    break
                except KafkaMQError:
                    if attempt == _ATTEMPTS - 1:
                        raise
            states[wanted.partition], row = done
            rows.append(row)
        return rows


_Done = tuple[_State, dict[str, object]]
"""The state after a task, and what it has folded."""


class _Executor:
    """Runs tasks in a process of its own; behind a failure in another one, which begins again."""

    def __init__(self, tracker: BatchTracker, epoch: int, token: str) -> None:
        self._scheduler = tracker.process.scheduler
        self._tracker = tracker
        self._start = epoch, token
        self._begin()

    def _begin(self) -> None:
        driver = self._tracker.process
        self._worker: _Worker | None = None
        self._process = process = self._scheduler.process(f"{driver.name}-executor")
        process.on_death.append(lambda: self._tracker.changed(process))
        driver.on_death.append(process.kill)

    def run(self, wanted: LogRange, state: _State) -> _Done:
        """Run one task.

        Raises:
            KafkaMQError: It failed, or its process did.
        """
        scheduler, process, driver = self._scheduler, self._process, self._scheduler.current
        assert driver is not None, "the query runs in a thread"
        answers: list[_Done | KafkaMQError] = []

        def call() -> None:
            try:
                if self._worker is None:
                    self._worker = _Worker(self._tracker, *self._start, process)
                answers.append(self._worker.run(wanted, state))
            except KafkaMQError as error:
                answers.append(error)
            scheduler.wake(driver)

        process.on_death.append(lambda: scheduler.wake(driver))
        scheduler.spawn(process, "task", call)
        while not answers and process.is_alive:
            scheduler.park()
        process.on_death.pop()
        answer = answers[0] if answers else _TaskLostError("an executor was lost")
        if isinstance(answer, KafkaMQError):
            process.kill()
            self._begin()
            raise answer
        return answer


class _Worker:
    """What a worker process of Spark has."""

    def __init__(self, tracker: BatchTracker, epoch: int, token: str, process: Process) -> None:
        world, config = tracker._world, tracker._config
        self._world = world
        self._config = config
        self._process = process
        self._fold_settings = FoldSettings(
            engine=tracker._checkpoint.engine,
            epoch=epoch,
            token=token,
            max_lease_ms=tracker._tracker.max_lease_ms,
            carry_after_ms=world.limits.retention_ms // 4,
            max_actions=tracker._tracker.max_offsets_per_commit,
            starting=tracker._checkpoint.starting,
        )

    def run(self, wanted: LogRange, state: _State) -> _Done:
        """Run one task: read, and fold."""
        blocks = []
        for records in log_reader(self._config).read(wanted):
            rows = []
            for record in records:
                try:
                    marker = decode_slim(record.value())
                except WireError:
                    marker = None
                rows.append((record.offset(), record.timestamp()[1], marker))
            blocks.append((rows[0][0], encode_block(rows)))
        place = wanted.topic, wanted.partition, wanted.start, wanted.end
        cells = [(*place, first, block) for first, block in blocks]
        fold = PartitionFold(self._fold_settings, state, state)
        cells = cells or [(*place, wanted.start, encode_block([]))]
        row: dict[str, object] = dict(zip(FOLDED_COLUMNS, fold.fold(cells), strict=True))
        self._maybe_lost()
        return state, row

    def _maybe_lost(self) -> None:
        if self._world.rng.random() < self._world.limits.faults.task_loss_rate:
            self._process.kill()  # does not return
