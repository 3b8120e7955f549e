"""A seeded simulation of a whole namespace: senders, workers, trackers, and what goes wrong.

The processes run what ships: the same `Service`, `Consumer`, `Producer` and `LocalTracker`, on a
Kafka in memory. Each seed draws its own limits and fault rates. Then the faults stop, and all must
settle. The verdict comes from the logs alone (`kafkamq.testing.checker`), and from what users
were told::

    simulation = simulate(seed=7)
    simulation.verdict().require_ok(simulation.label)
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from kafkamq.config import ServiceConfig
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.testing.checker import Problem, Verdict, check_logs
from kafkamq.testing.history import Ending, LogRecord, Timeline, read_timelines
from kafkamq.testing.simulation.batches import BatchTracker, Checkpoint
from kafkamq.testing.simulation.cluster import SimulatedKafka
from kafkamq.testing.simulation.limits import Faults, Limits, draw_limits
from kafkamq.testing.simulation.processes import Told, Tracker, Worker, World, send_all
from kafkamq.testing.simulation.scheduler import NS_PER_S, Process, Scheduler, SimulationOver, Task
from kafkamq.testing.simulation.states import of_line, of_logs
from kafkamq.testing.simulation.swapping import swapped
from kafkamq.types import MarkerType, Outcome

__all__ = ["Simulation", "simulate"]

_ENDING = (Outcome.ACK, Outcome.REDELIVERED, Outcome.DEAD_LETTERED)
_SETTLE_S = 400.0  # of simulated time; a poison message needs its deliveries
_LOOK_S = 2.0
_NOWHERE = ("", 0, 0)
_MAX_LINES = 200  # of the log, for a failure


@dataclass
class Simulation:
    """A run: the logs, and what happened."""

    seed: int
    limits: Limits
    messages: list[LogRecord] = field(default_factory=list)
    markers: list[LogRecord] = field(default_factory=list)
    dead_letters: list[LogRecord] = field(default_factory=list)
    told: Told = field(default_factory=Told)
    failures: list[str] = field(default_factory=list)  # threads that ended by an exception
    started: Counter[str] = field(default_factory=Counter)  # processes
    reached: Counter[str] = field(default_factory=Counter)
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_MAX_LINES))
    deaths: int = 0
    turns: int = 0
    settled_s: float = -1.0  # simulated time; -1: it did not settle

    @property
    def label(self) -> str:
        """For error texts."""
        return f"seed {self.seed} (simulate({self.seed}).verdict() shows it again): "

    def verdict(self) -> Verdict:
        """What the logs say, and whether users were told the truth."""
        verdict = check_logs(
            messages=self.messages,
            markers=self.markers,
            dead_letters=self.dead_letters,
            confirmed=self.told.confirmed,
            max_deliveries=self.limits.worker.max_deliveries,
            max_lease_ms=self.limits.worker.max_lease_ms,
        )
        first = [Problem("failed", _NOWHERE, each) for each in self.failures]
        if self.settled_s < 0:
            first.append(Problem("stalled", _NOWHERE, "it never settled"))
        verdict.problems[:0] = [*first, *self._untrue()]
        return verdict

    def _untrue(self) -> Iterator[Problem]:
        """Acks that users were told are done, and in time, and that the log has otherwise (R9)."""
        acks: dict[tuple[int, int], list[bool]] = {}  # by message: whether it came in time
        for timeline in read_timelines(self.markers).values():
            for life in timeline.lives():
                if life.of_schedule:
                    continue
                place = (life.message_id.partition, life.message_id.offset)
                own = timeline.of_message[False, life.message_id]
                starts = sum(_type_at(timeline, at) is MarkerType.START for at in own)
                is_excused = starts > 1 or self.limits.faults.clock_steps > 0
                if life.ending is Ending.ACKED:
                    acks.setdefault(place, []).append(True)
                acks.setdefault(place, []).extend(is_excused for _ in life.late_at)
        for message_id in self.told.acked:
            place = (message_id.partition, message_id.offset)
            if not any(acks.get(place, ())):
                text = "its ack was told to be done" + (" in time" if place in acks else "")
                yield Problem("untrue", ("messages", *place), text)


def _type_at(timeline: Timeline, at: int) -> MarkerType | None:
    marker = timeline.records[at]
    return None if marker is None else marker.type


class _Run:
    """The stage: starts processes, breaks things, waits for the end."""

    def __init__(self, seed: int, limits: Limits) -> None:
        self.limits = limits
        self.scheduler = scheduler = Scheduler(seed, preempt_every=limits.preempt_every)
        self.kafka = SimulatedKafka(scheduler, f"sim-{seed}", limits)
        self.world = World(scheduler, limits, self.kafka.servers)
        self.simulation = Simulation(seed, limits, told=self.world.told)
        self.rng = self.world.rng
        self.workers: dict[Process, Worker] = {}
        self.trackers: dict[Process, Tracker | BatchTracker] = {}
        self.checkpoint = Checkpoint()
        self.stage = Process(scheduler, "stage", 0)
        self._progress = _Progress()
        self._is_over = False

    def direct(self) -> None:
        """The first thread of all."""
        limits, world, rng = self.limits, self.world, self.rng
        self.kafka.open()
        self.kafka.create_topics(world.namespace)
        self._set_alarm()
        world.start("sender", lambda _: send_all(world), lambda: None)
        self._at(0.0, self._start_tracker)
        for _ in range(limits.trackers - 1):
            self._at(rng.uniform(0, 2), self._start_tracker)
        for _ in range(limits.workers):
            self._at(rng.uniform(0, 2), self._start_worker)
        chaos_s = limits.chaos_ms / 1000
        for _ in range(limits.tracker_starts - 1):
            self._at(rng.uniform(0, chaos_s), self._change_trackers)
        for _ in range(round(limits.workers * limits.close_share)):
            self._at(rng.uniform(0, chaos_s), self._close_worker)
        self.kafka.begin_faults(self._at)
        world.sleep(chaos_s)
        self._end_chaos()
        deadline_s = world.now_s() + _SETTLE_S
        while world.now_s() < deadline_s:
            world.sleep(_LOOK_S)
            if world.is_sent and self._is_settled():
                self.simulation.settled_s = world.now_s()
                # What comes back from the dead now would be seen, too.
                world.sleep(2 * limits.worker.redelivery_timeout_ms / 1000)
                if self._is_settled():
                    break
                self.simulation.settled_s = -1.0
        self._is_over = True
        if self.simulation.settled_s < 0:
            self.simulation.lines.append(self.scheduler.stacks())

    # ---- processes

    def _at(self, after_s: float, call: Callable[[], None]) -> None:
        """Do something later."""

        def wait() -> None:
            self.scheduler.sleep(after_s)
            if not self._is_over:
                call()

        self.scheduler.spawn(self.stage, "later", wait)

    def _start_worker(self) -> None:
        name = f"w{self.simulation.started['worker']}"
        self.simulation.started["worker"] += 1
        worker = Worker(self.world)
        process = self.world.start(name, worker.main, lambda: self._worker_ended(process))
        self.workers[process] = worker

    def _worker_ended(self, process: Process) -> None:
        self.workers.pop(process, None)
        self.kafka.changed(process)
        self._at(self.rng.uniform(0, self.limits.restart_ms / 1000), self._start_worker)

    def _close_worker(self) -> None:
        if self.workers:
            self.rng.choice(list(self.workers.values())).is_closing = True

    def _start_tracker(self) -> None:
        name = f"t{self.simulation.started['tracker']}"
        self.simulation.started["tracker"] += 1
        tracker: Tracker | BatchTracker = Tracker(self.world)
        if self.rng.random() < self.limits.tracker.batch_share:
            for process, each in list(self.trackers.items()):
                if isinstance(each, BatchTracker):  # one query on one checkpoint
                    self.trackers.pop(process)
                    process.on_death.clear()  # this one takes its place
                    process.kill()
                    self.kafka.changed(process)
            tracker = BatchTracker(self.world, self.checkpoint)
        process = self.world.start(name, tracker.main, lambda: self._tracker_ended(process))
        self.trackers[process] = tracker

    def _tracker_ended(self, process: Process) -> None:
        self.kafka.changed(process)
        self.trackers.pop(process, None)
        if len(self.trackers) < self.limits.trackers:
            self._at(self.rng.uniform(0, self.limits.restart_ms / 1000), self._start_tracker)

    def _change_trackers(self) -> None:
        if self.trackers and self.rng.random() < 0.5:
            self.rng.choice(list(self.trackers.values())).is_closing = True
        else:
            self._start_tracker()

    def keep_logs(self) -> None:
        """For the verdict."""
        simulation, config = self.simulation, self.world.config
        simulation.messages = self.kafka.all_records(config.message_topic)
        simulation.markers = self.kafka.all_records(config.marker_topic)
        simulation.failures += [*self.world.failures, *self.scheduler.failures]
        simulation.turns = self.scheduler.turns
        simulation.dead_letters = self.kafka.all_records(config.dead_letter_topic)
        simulation.reached += of_logs(simulation.markers, simulation.dead_letters)

    # ---- faults

    def _set_alarm(self) -> None:
        faults = self.limits.faults
        every = [each for each in (faults.kill_every, faults.freeze_every) if each]
        if every:
            gap = self.rng.expovariate(sum(1 / each for each in every))
            self.scheduler.set_alarm(1 + int(gap), self._alarm)

    def _alarm(self, task: Task) -> None:
        """Between two turns; ``task`` would be next."""
        process, faults = task.process, self.limits.faults
        if not (faults.kill_every or faults.freeze_every):
            return  # they have ended
        if process in self.workers or process in self.trackers:
            weights = [each and 1 / each for each in (faults.kill_every, faults.freeze_every)]
            if self.rng.random() * sum(weights) < weights[0]:
                self.simulation.deaths += 1
                process.kill()
            elif not process.is_frozen:
                process.freeze()
                self.kafka.changed(process)
                self._at(
                    self.rng.uniform(0, faults.max_freeze_ms / 1000), partial(self._thaw, process)
                )
        self._set_alarm()

    def _thaw(self, process: Process) -> None:
        process.thaw()
        self.kafka.changed(process)

    def _end_chaos(self) -> None:
        """No new faults; what they left behind still happens."""
        latency_ms = self.limits.faults.latency_ms
        self.limits = replace(self.limits, faults=Faults(latency_ms=latency_ms), restart_ms=500)
        self.kafka.end_faults()

    def _is_settled(self) -> bool:
        return self._progress.is_settled(self.kafka, self.world.config)


class _Progress:
    """Reads along what was ended, to know when nothing is left to do."""

    def __init__(self) -> None:
        self._open: set[tuple[bool, int, int]] = set()
        self._ended: set[tuple[bool, int, int]] = set()

    def is_settled(self, kafka: SimulatedKafka, config: ServiceConfig) -> bool:
        """Whether every message and every SCHEDULE has ended."""
        for record in kafka.news(config.message_topic):
            self._open.add((False, record.partition, record.offset))
        for record in kafka.news(config.marker_topic):
            marker = decode_marker(record.value)
            if marker.type is MarkerType.SCHEDULE and not marker.carried_forward:
                self._open.add((True, record.partition, record.offset))
            message_id = marker.message_id
            is_end = marker.type is MarkerType.END and marker.outcome in _ENDING
            if is_end and message_id is not None:
                place = (marker.of_schedule, message_id.partition, message_id.offset)
                self._ended.add(place)
        self._open -= self._ended
        return not self._open


@contextlib.contextmanager
def _quiet(run: _Run) -> Iterator[None]:
    """What the shells log is kept with the simulation, and goes nowhere else."""
    logger = logging.getLogger("kafkamq")
    before = logger.level, logger.propagate
    handler = _Lines(run)
    logger.addHandler(handler)
    unraisable, sys.unraisablehook = sys.unraisablehook, _told_unless_over
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield
    finally:
        sys.unraisablehook = unraisable
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def _told_unless_over(failure: sys.UnraisableHookArgs) -> None:
    """Generators that a leftover thread holds end when it does."""
    if not issubclass(failure.exc_type, SimulationOver):
        sys.__unraisablehook__(failure)


class _Lines(logging.Handler):
    def __init__(self, run: _Run) -> None:
        super().__init__()
        self._scheduler = run.scheduler
        self._lines = run.simulation.lines
        self._reached = run.simulation.reached

    def emit(self, record: logging.LogRecord) -> None:
        task = self._scheduler.current
        extra = {name: value for name, value in vars(record).items() if name not in _OF_EVERY_LINE}
        self._reached.update(of_line(str(record.msg), extra))
        if record.levelno < logging.INFO:
            return
        at_s = self._scheduler.now_ns / NS_PER_S
        name = record.name.removeprefix("kafkamq.")
        text = f"{record.getMessage()} {extra or ''}"
        if record.exc_info is not None and record.exc_info[0] is not None:
            text += "\n" + "".join(traceback.format_exception(*record.exc_info))
        self._lines.append(f"{at_s:.3f} {task!r} {name}: {text}")


_OF_EVERY_LINE = frozenset(vars(logging.makeLogRecord({})))


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """A collection would run finalizers in whatever thread is there, at a time of its own."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def simulate(seed: int, limits: Limits | None = None) -> Simulation:
    """Run one seed, with its own limits or with yours."""
    run = _Run(seed, draw_limits(seed) if limits is None else limits)
    simulation = run.simulation
    with swapped(run.scheduler, run.kafka.factories()), _quiet(run), _no_collections():
        try:
            run.scheduler.run("stage", run.direct)
            run.keep_logs()
        finally:
            run.scheduler.close()
    return simulation
