"""Runs the threads of simulated processes one at a time, in an order that a seed chooses.

Every thread is a greenlet. It goes on until it waits, or until the seed takes its turn away at one
of the places where that may happen: a lock, an event, a queue, a sleep, a call of a client. The
clock is virtual and moves when nobody can run, and by a few microseconds with every turn, so that
code which only polls comes to its deadline, too.

A process that is killed leaves its threads where they stand: they never run again, not even their
``finally`` blocks, as after SIGKILL.
"""

from __future__ import annotations

import heapq
import random
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from greenlet import greenlet

NS_PER_S = 1_000_000_000
_TURN_NS = 3_000  # what a turn costs
_LOOK_NS = 200  # what a look at the clock costs
_MANY_LOOKS = 1000  # in one turn
_SPIN_NS = 1_000_000
START_NS = 1_700_000_000 * NS_PER_S  # wall clock at the beginning
_MAX_STACKS = 40
_MAX_ENDS = 10
_never_again: list[object] = []  # threads that do not end; collected they would run on


class StuckError(AssertionError):
    """Nothing can run any more, or the bounds of turns or time are reached; tells where each is."""


class SimulationOver(BaseException):
    """The simulation has ended: raised by whatever a leftover thread touches."""


class Process:
    """A process of a simulated operating system: its threads run, stand still and die together."""

    def __init__(self, scheduler: Scheduler, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self.is_alive = True
        self.is_frozen = False
        self.thawed_ns = 0
        self.on_death: list[Callable[[], None]] = []
        self.exit_calls: list[tuple[Callable[..., object], tuple[object, ...]]] = []  # atexit
        self.globals: dict[object, object] = {}  # what is one of in each process
        self.tasks: dict[Task, None] = {}
        self.scheduler = scheduler
        self._held: list[Task] = []

    def __repr__(self) -> str:
        return f"<Process {self.name}>"

    def hold(self, task: Task) -> None:
        """A thread could run, if the process were not frozen."""
        self._held.append(task)

    def kill(self) -> None:
        """SIGKILL. Does not return to a thread of this process."""
        if not self.is_alive:
            return
        self.is_alive = False
        for call in self.on_death:
            call()
        self.scheduler.check_history()

    def freeze(self) -> None:
        """SIGSTOP: no thread runs until ``thaw``; takes effect with the next turn."""
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        self.thawed_ns = self.scheduler.now_ns
        held, self._held = self._held, []
        self.scheduler.ready.extend(held)


class Task:
    __slots__ = (
        "call",
        "greenlet",
        "interrupt",
        "is_over",
        "is_parked",
        "name",
        "number",
        "process",
        "thread",
        "token",
    )

    greenlet: greenlet

    def __init__(
        self, process: Process, name: str, number: int, call: Callable[[], object]
    ) -> None:
        self.number = number
        self.process = process
        self.name = name
        self.call = call
        self.is_over = False
        self.is_parked = False
        self.token = 0  # of its present wait: older timers mean nothing
        self.interrupt: BaseException | None = None  # raised where it goes on
        self.thread: object = None  # what current_thread() gives

    def __repr__(self) -> str:
        return f"<Task {self.process.name}/{self.name}>"


class Scheduler:
    """One simulated world's threads and clock.

    Args:
        seed: Decides everything.
        preempt_every: Turns are taken away at one in so many places that need not wait; 0: never.
        max_turns: Bound of a run, against code that spins.
    """

    def __init__(
        self, seed: object, *, preempt_every: int = 30, max_turns: int = 3_000_000
    ) -> None:
        self.rng = random.Random(f"scheduler {seed}")
        self.now_ns = NS_PER_S  # since the machine was booted
        self.wall_offset_ns = START_NS
        self.ready: list[Task] = []
        self.current: Task | None = None
        self.turns = 0
        self.is_over = False
        self.atomic_depth = 0  # > 0: inside of what no thread may see half done
        self.failures: list[str] = []  # threads that an exception ended
        self.processes: list[Process] = []
        self._alarm: Callable[[Task], None] | None = None
        self._alarm_turn = 1 << 60
        self._is_between_turns = False
        self._preempt_every = preempt_every
        self._left = self._next_gap()
        self._ends = 0  # raised in the thread that is being ended
        self._looks = 0  # at the clock, in this turn
        self._max_turns = max_turns
        self._timers: list[tuple[int, int, Task, int]] = []
        self._count = 0
        self._stop: BaseException | None = None
        self._thread = threading.current_thread()  # the real one of all of them
        self._hub: greenlet | None = None

    # ---- what simulated code does

    def now_s(self) -> float:
        """Return the monotonic clock; looking takes a moment, and more in a loop that does only
        that.
        """
        self._looks += 1
        self.now_ns += _LOOK_NS
        if self._looks > _MANY_LOOKS:
            self.now_ns += _SPIN_NS
            if self._looks == 2 * _MANY_LOOKS:
                stack = "".join(traceback.format_stack(limit=8))
                self.failures.append(f"{self.current!r} spins:\n{stack}")
        return self.now_ns / NS_PER_S

    def touch(self) -> None:
        """A place where another thread may run, and seldom does."""
        self._left -= 1
        if self._left <= 0:
            self._left = self._next_gap()
            self.give_way()
        elif self.is_over:
            self._end_thread()

    def give_way(self) -> None:
        """Another thread may run now."""
        if self.is_over:
            self._end_thread()
        if self.current is not None and not self.atomic_depth:
            self.ready.append(self.current)
            self._switch()

    def park(self, timeout_s: float | None = None) -> bool:
        """Wait until ``wake``, or the time is over; whether it was woken."""
        if self.is_over:
            self._end_thread()
        task = self.current
        assert task is not None, "only simulated threads wait"
        assert not self.atomic_depth, "a wait inside of what must not be seen half done"
        task.token += 1
        task.is_parked = True
        if timeout_s is not None:
            self._count += 1
            at_ns = self.now_ns + int(max(0.0, timeout_s) * NS_PER_S)
            heapq.heappush(self._timers, (at_ns, self._count, task, task.token))
        token = task.token
        self._switch()
        return task.token != token

    def wake(self, task: Task) -> None:
        """End a thread's wait; nothing if it does not wait any more."""
        if task.is_parked:
            task.is_parked = False
            task.token += 1
            self.ready.append(task)

    def interrupt(self, task: Task, error: BaseException) -> None:
        """Raise that in a thread where it waits, or where its turn was taken away."""
        task.interrupt = error
        self.wake(task)

    def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            self.give_way()
        else:
            self.park(seconds)

    def check_history(self) -> None:
        """Does not return if the present thread's process is dead."""
        task = self.current
        if self._is_between_turns or self.atomic_depth:
            return  # it ends with its turn, or with what must not be seen half done
        if task is not None and not task.process.is_alive:
            self._switch()
            raise AssertionError("a dead process runs")

    def require_own(self, doing: str) -> None:
        """Tell of a real thread that somebody has left behind, and that comes upon this world.

        Tests note in ``left_by`` who that was.
        """
        thread = threading.current_thread()
        if thread is not self._thread:
            left_by = getattr(thread, "left_by", "nobody knows whom")
            text = f"only simulated threads {doing}, not {thread.name}, left by {left_by}"
            raise AssertionError(text)

    # ---- processes and threads

    def process(self, name: str) -> Process:
        """Return a new process; ``spawn`` its first thread."""
        process = Process(self, name, 1000 + len(self.processes))
        self.processes.append(process)
        return process

    def spawn(self, process: Process, name: str, call: Callable[[], object]) -> Task:
        if self.is_over:
            self._end_thread()
        from greenlet import greenlet

        self._count += 1
        task = Task(process, name, self._count, call)
        task.greenlet = greenlet(lambda: self._run_task(task), parent=self._hub)
        process.tasks[task] = None
        self.ready.append(task)
        return task

    def _run_task(self, task: Task) -> None:
        try:
            task.call()
        except SimulationOver:
            pass
        except BaseException:  # noqa: BLE001 - told at the end, as threading.excepthook would
            self.failures.append(f"{task!r} ended:\n{traceback.format_exc()}")
        task.is_over = True
        task.process.tasks.pop(task, None)

    def set_alarm(self, turns: int, call: Callable[[Task], None]) -> None:
        """Call this so many turns from now, once, with the thread that would be next.

        It runs between two turns, so it may kill and freeze and spawn, but not wait.
        """
        self._alarm, self._alarm_turn = call, self.turns + turns

    # ---- the hub

    def run(self, name: str, call: Callable[[], object]) -> None:
        """Run ``call`` as the first thread until it returns, and raise what it raises."""
        from greenlet import getcurrent

        self._hub = getcurrent()
        failure: list[BaseException] = []

        def first() -> None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - raised below
                failure.append(error)

        main = self.spawn(self.process(name), name, first)
        while not main.is_over:
            task = self._choose()
            if task is not None:
                self.current = task
                task.greenlet.switch()
            self.current = None
            if self._stop is not None:
                raise self._stop
        if failure:
            raise failure[0]

    def close(self) -> None:
        """End what still stands; nothing of the simulated code has an effect any more."""
        self.is_over = True
        self.current = None
        for process in self.processes:
            for task in list(process.tasks):
                if task.greenlet:  # begun and not over
                    self._ends = 0
                    task.greenlet.throw(SimulationOver)
                    if task.greenlet:
                        _never_again.append(task.greenlet)
            process.tasks.clear()
        self.ready.clear()
        self._timers.clear()

    def _end_thread(self) -> NoReturn:
        """Raise, or leave a thread for good that goes on whatever is raised."""
        from greenlet import getcurrent

        self._ends += 1
        if self._ends > _MAX_ENDS and getcurrent() is not self._hub:
            assert self._hub is not None
            self._hub.switch()
        raise SimulationOver

    def stacks(self) -> str:
        """Return where each thread stands."""
        lines = []
        tasks = [task for each in self.processes if each.is_alive for task in each.tasks]
        for task in tasks[:_MAX_STACKS]:
            lines.append(f"{task!r}{' (frozen)' if task.process.is_frozen else ''}")
            frame = task.greenlet.gr_frame
            if frame is not None:
                own = [each for each in traceback.extract_stack(frame) if each.filename != __file__]
                lines += [f"    {each.filename}:{each.lineno} {each.name}" for each in own[-6:]]
        return "\n".join(lines)

    def _next_gap(self) -> int:
        every = self._preempt_every
        return 1 << 60 if every <= 0 else 1 + int(self.rng.random() * 2 * every)

    def _switch(self) -> None:
        me, task = self.current, self._choose()
        if task is not me:
            self.current = task
            if task is None:
                assert self._hub is not None
                self._hub.switch()
            else:
                task.greenlet.switch()
            if self.is_over:
                self._end_thread()
        if me is not None and me.interrupt is not None:
            error, me.interrupt = me.interrupt, None
            raise error

    def _choose(self) -> Task | None:
        """Return whose turn it is; None: nobody's, ``run`` says why."""
        self.turns += 1
        self._looks = 0
        self.now_ns += _TURN_NS
        ready, timers = self.ready, self._timers
        while True:
            while timers and timers[0][0] <= self.now_ns:
                self._ring()
            if not ready:
                if not timers:
                    self._give_up("nobody can run, and nobody waits for a time")
                    return None
                self.now_ns = max(self.now_ns, timers[0][0])
                continue
            if self.turns > self._max_turns:
                self._give_up(f"{self.turns} turns were not enough")
                return None
            count = len(ready)
            if count == 1:
                task = ready.pop()
            else:
                at = int(self.rng.random() * count)
                task = ready[at]
                ready[at] = ready[-1]
                ready.pop()
            process = task.process
            if self.turns >= self._alarm_turn and self._alarm is not None:
                call, self._alarm = self._alarm, None
                self._is_between_turns = True
                call(task)
                self._is_between_turns = False
            if process.is_alive:
                if not process.is_frozen:
                    return task
                process.hold(task)

    def _ring(self) -> None:
        _, _, task, token = heapq.heappop(self._timers)
        if task.is_parked and task.token == token:
            task.is_parked = False
            self.ready.append(task)

    def _give_up(self, why: str) -> None:
        self._stop = StuckError(f"{why}, at {self.now_ns / NS_PER_S:.3f} s\n{self.stacks()}")
