"""What all kinds of runs have in common: processes that come and go and break, and the end.

A kind of run says who there is (``direct``), when all is done (``is_settled``), and what is kept
for its verdict (``keep``). The draw of what goes wrong, and of when, is here and in ``cluster``.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import sys
import traceback
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import ClassVar, Generic, TypeVar

from harness.simulation.cluster import SimulatedKafka
from harness.simulation.executors import Queues
from harness.simulation.limits import Faults, Situation
from harness.simulation.primitives import Threading
from harness.simulation.scheduler import NS_PER_S, Process, Scheduler, SimulationOver, Task
from harness.simulation.swapping import swapped
from kafkamq.errors import KafkaMQError

SWAPPED = "a client is replaced while another thread writes"

_LOOK_S = 2.0
_MAX_LINES = 200  # of the log, for a failure
_log = logging.getLogger(__name__)
Actor = TypeVar("Actor")


@dataclass(kw_only=True)
class Report(ABC):
    """What happened in a run, whatever its kind."""

    seed: int
    failures: list[str] = field(default_factory=list)  # threads that ended by an exception
    started: Counter[str] = field(default_factory=Counter)  # processes
    reached: Counter[str] = field(default_factory=Counter)
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_MAX_LINES))
    deaths: int = 0
    turns: int = 0
    settled_s: float = -1.0  # simulated time; -1: it did not settle

    kind: ClassVar[str]

    @property
    def label(self) -> str:
        again = f'make sim SEEDS={self.seed}..{self.seed} ARGS="--kind {self.kind}"'
        return f"seed {self.seed} of {self.kind} ({again}): "

    @abstractmethod
    def require_ok(self) -> None:
        """Raise what is wrong.

        Raises:
            CheckFailedError: It names the seed.
        """

    def troubles(self) -> list[tuple[str, str]]:
        """Return what must not be, whatever was done: a kind and a text each."""
        found = [("failed", each) for each in self.failures]
        if self.settled_s < 0:
            found.append(("stalled", "it never settled"))
        return found


class World:
    """What all processes of a run share, as if each had its own."""

    def __init__(self, scheduler: Scheduler, servers: str) -> None:
        self.scheduler = scheduler
        self.servers = servers
        self.failures: list[str] = []  # what no user can live with
        self.is_sent = False  # all that will be written is
        self.rng = random.Random(scheduler.rng.random())
        self.threading = Threading(scheduler)
        self.queues = Queues(self.threading)

    def sleep(self, seconds: float) -> None:
        self.scheduler.sleep(seconds)

    def now_s(self) -> float:
        """Monotonic."""
        return self.scheduler.now_s()

    def wall_s(self) -> float:
        return (self.scheduler.now_ns + self.scheduler.wall_offset_ns) / NS_PER_S

    def start(
        self, name: str, main: Callable[[Process], None], on_end: Callable[[], None]
    ) -> Process:
        """Return a process whose first thread runs ``main``; its other threads end with it."""
        process = self.scheduler.process(name)

        def run() -> None:
            try:
                main(process)
                for call, args in reversed(process.exit_calls):
                    call(*args)
            except KafkaMQError as error:  # it is started again
                _log.info("a process ended", extra={"error": str(error)})
            except SimulationOver:
                return
            except Exception:  # noqa: BLE001 - the verdict names it
                self.failures.append(f"{name}: {traceback.format_exc()}")
            process.kill()

        process.on_death.append(on_end)
        self.scheduler.spawn(process, "main", run)
        return process


class Stage(ABC, Generic[Actor]):
    """Starts processes, breaks things, waits for the end.

    Attributes:
        actors: What runs in the processes that may be killed and frozen.
    """

    def __init__(self, report: Report, situation: Situation, name: str, draw: object) -> None:
        """``name`` is the cluster's, ``draw`` decides the order of threads."""
        self.report = report
        self.scheduler = Scheduler(draw, preempt_every=situation.preempt_every)
        self.kafka = SimulatedKafka(self.scheduler, name, situation)
        self.faults = situation.faults
        self.chaos_s = situation.chaos_ms / 1000
        self.restart_s = situation.restart_ms / 1000
        self.actors: dict[Process, Actor] = {}
        self.is_chaos = True
        self._process = Process(self.scheduler, "stage", 0)
        self._is_over = False

    @property
    @abstractmethod
    def world(self) -> World:
        """Return what its processes share."""

    @abstractmethod
    def states_of(self, message: str, extra: Mapping[str, object]) -> Iterable[str]:
        """Return which states a line of log tells of."""

    @abstractmethod
    def prepare(self) -> None:
        """Make topics, and start or plan to start all processes."""

    @abstractmethod
    def is_settled(self) -> bool:
        """Return whether nothing is left to do."""

    @abstractmethod
    def keep(self) -> None:
        """Take what the verdict needs."""

    def play(self) -> None:
        """All of it; the report is complete then."""
        with swapped(self.scheduler, self.kafka.factories()), self._quiet(), _no_collections():
            try:
                self.scheduler.run("stage", self._direct)
                self.report.failures += [*self.world.failures, *self.scheduler.failures]
                self.report.turns = self.scheduler.turns
                self.keep()
            finally:
                self.scheduler.close()
                self.kafka.close()

    def _direct(self) -> None:
        """The first thread of all."""
        world, report = self.world, self.report
        self.kafka.open()
        self.prepare()
        self.kafka.begin_faults(self.at)
        world.sleep(self.chaos_s)
        self._end_chaos()
        deadline_s = world.now_s() + self.settle_s
        while world.now_s() < deadline_s and report.settled_s < 0:
            world.sleep(_LOOK_S)
            if world.is_sent and self.is_settled():
                report.settled_s = world.now_s()
                world.sleep(self.grace_s)  # what comes back from the dead now is seen, too
                if not self.is_settled():
                    report.settled_s = -1.0
        self._is_over = True
        if report.settled_s < 0:
            report.lines.append(self.scheduler.stacks())

    grace_s = 10.0
    settle_s = 400.0  # of simulated time; a poison message needs its deliveries

    def at(self, after_s: float, call: Callable[[], None]) -> None:
        """Do something later."""

        def wait() -> None:
            self.scheduler.sleep(after_s)
            if not self._is_over:
                call()

        self.scheduler.spawn(self._process, "later", wait)

    def later(self, call: Callable[[], None]) -> None:
        """Start something again, after a while that is drawn."""
        self.at(self.world.rng.uniform(0, self.restart_s), call)

    # ---- faults of processes

    def set_alarm(self) -> None:
        """Kill or freeze somebody after some turns, and again."""
        faults = self.faults
        every = [each for each in _alarms(faults) if each]
        if every:
            gap = self.world.rng.expovariate(sum(1 / each for each in every))
            self.scheduler.set_alarm(1 + int(gap), self._alarm)

    def _alarm(self, task: Task) -> None:
        """Ring between two turns; ``task`` would be next."""
        process, faults, rng = task.process, self.faults, self.world.rng
        if not any(_alarms(faults)):
            return  # they have ended
        if process in self.actors:
            weights = [each and 1 / each for each in _alarms(faults)]
            at = rng.random() * sum(weights)
            if at < weights[0]:
                self.report.deaths += 1
                process.kill()
            elif at >= weights[0] + weights[1]:
                self.interrupt(process)
            elif not process.is_frozen:
                process.freeze()
                self.kafka.changed(process)
                self.at(rng.uniform(0, faults.max_freeze_ms / 1000), partial(self._thaw, process))
        self.set_alarm()

    def interrupt(self, process: Process) -> None:
        """Raise an exception in its application, as a signal does; nothing where none is."""

    def _thaw(self, process: Process) -> None:
        process.thaw()
        self.kafka.changed(process)

    def _end_chaos(self) -> None:
        """No new faults; what they left behind still happens."""
        self.is_chaos = False
        self.faults = Faults()
        self.restart_s = 0.5
        self.kafka.end_faults()

    # ---- what is logged

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """What the shells log is kept with the report, and goes nowhere else."""
        loggers = [logging.getLogger(name) for name in ("kafkamq", "harness")]
        before = [(each.level, each.propagate) for each in loggers]
        handler = _Lines(self)
        unraisable, sys.unraisablehook = sys.unraisablehook, _told_unless_over
        for each in loggers:
            each.addHandler(handler)
            each.setLevel(logging.DEBUG)
            each.propagate = False
        try:
            yield
        finally:
            sys.unraisablehook = unraisable
            for each, (level, propagate) in zip(loggers, before, strict=True):
                each.removeHandler(handler)
                each.setLevel(level)
                each.propagate = propagate


def _alarms(faults: Faults) -> tuple[int, int, int]:
    return faults.kill_every, faults.freeze_every, faults.interrupt_every


def _told_unless_over(failure: sys.UnraisableHookArgs) -> None:
    """Generators that a leftover thread holds end when it does."""
    if not issubclass(failure.exc_type, SimulationOver):
        sys.__unraisablehook__(failure)


class _Lines(logging.Handler):
    def __init__(self, stage: Stage[Actor]) -> None:
        super().__init__()
        self._scheduler = stage.scheduler
        self._lines = stage.report.lines
        self._reached = stage.report.reached
        self._states_of = stage.states_of

    def emit(self, record: logging.LogRecord) -> None:
        if self._scheduler.is_over:
            return  # threads that are ended
        task = self._scheduler.current
        extra = {name: value for name, value in vars(record).items() if name not in _OF_EVERY_LINE}
        self._reached.update(self._states_of(str(record.msg), extra))
        if record.funcName == "_renew" and task is not None and _writes_beside(task):
            self._reached[SWAPPED] += 1
        if record.levelno < logging.INFO:
            return
        at_s = self._scheduler.now_ns / NS_PER_S
        name = record.name.removeprefix("kafkamq.")
        text = f"{record.getMessage()} {extra or ''}"
        if record.exc_info is not None and record.exc_info[0] is not None:
            text += "\n" + "".join(traceback.format_exception(*record.exc_info))
        self._lines.append(f"{at_s:.3f} {task!r} {name}: {text}")


def _writes_beside(task: Task) -> bool:
    """Return whether another thread is inside of the producer whose client this one replaces."""
    renewing = next(each for each in _frames(sys._getframe()) if each.f_code.co_name == "_renew")
    producer = renewing.f_locals["self"]
    others = [each.greenlet.gr_frame for each in task.process.tasks if each is not task]
    return any(
        frame.f_code.co_name in _WRITING and frame.f_locals.get("self") is producer
        for other in others
        for frame in _frames(other)
    )


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


_WRITING = ("produce", "produce_many", "wait_for", "confirm", "flush")
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
