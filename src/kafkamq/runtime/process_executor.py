"""Handlers in processes: for work that needs the CPU, or more threads than one interpreter bears.

Each process has a thread here, its port, which is one slot of the queue: it takes runs for all of
the process's handlers, a little ahead of them, and gives back what the process answers. So the
records of a key are in one process at a time. A process that dies takes an attempt of each record
that its handlers were at with it, and is replaced; what they were not at has lost nothing.

Ports write to pipes, which a process that hangs lets fill up, and settle outcomes, which may wait.
So time-outs are enforced by a thread of their own, the watch: it reads memory that the processes
share, kills, and does nothing else. The port then finds the end of its pipe.
"""

from __future__ import annotations

import logging
import multiprocessing
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kafkamq.errors import ConfigError, KafkaMQError
from kafkamq.runtime.child import (
    CELLS,
    Answer,
    RemoteCall,
    Step,
    progress_of,
    serve,
    start_child,
    unpacked,
)
from kafkamq.runtime.rules.hanging import Call, Slots
from kafkamq.runtime.rules.pace import RunAhead, Totals
from kafkamq.runtime.work_queue import HandlerTimeoutError, Slot, WorkerDiedError, WorkQueue, enter

_JOIN_S = 5.0
_START_S = 600.0
_SLICE_S = 0.1
PAUSE_S = 1.0
_GRACE_S = 1.0
_MAX_BARREN = 10
_WATCH_S = 0.05
_TURN_S = 1.0
_LATE_S = 5.0
_log = logging.getLogger(__name__)
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Processes:
    call: RemoteCall
    count: int
    pack: Callable[[Any], Any]
    place: Callable[[Any], tuple[str, int, int]]
    # A call that takes longer has failed; 0: never.
    timeout_ms: int = 0
    owner: object = None
    is_ahead: bool = True

    @property
    def kill_after_s(self) -> float:
        """A process is ended when a call takes so long; 0: never."""
        # Several handlers are not ended for one that takes too long, if that can be helped.
        late_s = _LATE_S if self.call.own_timeout_ms else 0.0
        return self.timeout_ms / 1000 + late_s


class ProcessExecutor(Generic[R]):
    """``Processes.count`` processes, each with its port."""

    def __init__(self, queue: WorkQueue[R], processes: Processes) -> None:
        self.queue = queue
        self.processes = processes
        self.ended = threading.Event()
        self.limit = processes.call.slots
        self._ports = [_Port(self) for _ in range(processes.count)]
        self._lock = threading.Lock()
        self._has_worked = False
        self._barren = 0

    def check(self, is_over: Callable[[], bool]) -> None:
        """Begin the first process, which says whether one can; until ``is_over``."""
        try:
            process = self._ports[0].process = _Process(self.processes.call)
        except OSError as error:
            raise ConfigError(
                f"processes= needs processes, and memory or files that they share ({error}): see "
                "limits of the system, /dev/shm and TMPDIR"
            ) from error
        refusal: str | None = ""
        try:
            refusal = process.begin(is_over)
        finally:
            if refusal is not None:
                process.end()
                self._ports[0].process = None
        if refusal is None:
            self._has_worked = True
        elif not is_over():
            raise ConfigError(f"the handler cannot be loaded in another process: {refusal}")

    def start(self) -> None:
        self.queue.join([port.slot for port in self._ports], self)
        for port in self._ports:
            port.thread.start()
        if self.processes.kill_after_s:
            threading.Thread(target=self._watch, name="kafkamq-timeouts", daemon=True).start()

    def _watch(self) -> None:
        """Ends processes that hang; no lock that others hold, no pipe and no log is touched."""
        while not self.ended.wait(_WATCH_S) and any(port.thread.is_alive() for port in self._ports):
            for port in self._ports:
                port.end_if_hung()

    def wake(self, slots: Sequence[Slot[R]]) -> None:
        for slot in slots:
            slot.gate()

    def join(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        for port in self._ports:
            if port.thread.is_alive() and port.thread is not threading.current_thread():
                port.thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(port.thread.is_alive() for port in self._ports)

    def cancel(self) -> None:
        """End the processes, whatever they are at; it does not count. Idempotent."""
        self.ended.set()
        for port in self._ports:
            port.end()
        self.join(_JOIN_S)

    def slots(self) -> Slots:
        calls = [call for port in self._ports for call in port.calls()]
        return Slots(self.processes.count * self.limit, calls)

    def set_limit(self, limit: int) -> None:
        self.limit = min(limit, self.processes.call.slots)
        for port in self._ports:
            port.wake()

    def totals(self) -> Totals:
        held = [port.held_runs for port in self._ports]
        return Totals(
            sum(port.finished for port in self._ports),
            sum(port.spent_us for port in self._ports) / 1000,
            sum(min(count, self.limit) for count in held) / len(held),
            self.queue.has_backlog or max(held) > self.limit,
        )

    @property
    def pids(self) -> list[int]:
        processes = [port.process for port in self._ports]
        return [process.pid for process in processes if process is not None]

    # Beginning a process.

    def made(self) -> _Process | None:
        """Return another process; None: none can begin now."""
        try:
            process = _Process(self.processes.call)
        except OSError as error:
            # There is no room for another one, which is no record's fault.
            self._pause(str(error))
            return None
        refusal = process.begin(self._is_over)
        if refusal is None:
            self._has_worked = True
            return process
        process.end()
        if self._is_over():
            return None
        with self._lock:
            self._barren += 1
            code = process.exit_code
            was_killed = process.died and code is not None and code < 0
            is_hopeless = not self._has_worked and (not was_killed or self._barren >= _MAX_BARREN)
        if is_hopeless:
            self.queue.fail(
                ConfigError(
                    "the process of the handler ended before it could begin: see what it wrote to"
                    f" its standard error (is the handler's module importable there?); {refusal}"
                )
            )
            self.ended.wait(PAUSE_S)
        else:
            self._pause(refusal)
        return None

    def _is_over(self) -> bool:
        return self.ended.is_set() or self.queue.is_stopped

    def _pause(self, error_text: str) -> None:
        _log.error(
            "the process of a handler cannot start; it is tried again", extra={"error": error_text}
        )
        self.ended.wait(PAUSE_S)


class _Process:
    def __init__(self, call: RemoteCall) -> None:
        context = multiprocessing.get_context("spawn")
        self.marks = context.RawArray("q", CELLS)
        self.times = context.RawArray("q", CELLS)
        self._process, self.pipe = start_child(
            serve, self.marks, self.times, call, name="kafkamq-worker"
        )
        self._lock = threading.Lock()
        self.died = False
        # The run whose handler takes too long, for which this is killed; -1: it is at none.
        self.late: int | None = None
        self.exit_code: int | None = None

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def begin(self, is_over: Callable[[], bool]) -> str | None:
        """Wait until it has begun; else why it cannot. ``is_over`` ends the wait."""
        deadline_s = time.monotonic() + _START_S
        try:
            while not self.pipe.poll(_SLICE_S):
                if is_over():
                    return "it is not needed any more"
                if time.monotonic() > deadline_s:
                    return f"it has not begun within {_START_S:g} s"
            refusal: str | None = self.pipe.recv()
        except (EOFError, OSError):
            self.died = True
            self._process.join(_JOIN_S)
            refusal = f"it has died at its start (exit code {self._process.exitcode})"
        return refusal

    def kill(self, late: int) -> None:
        self.late = late
        self._process.kill()

    def end(self, grace_s: float = 0.0) -> None:
        """End it, also in the middle of its work; idempotent, from any thread."""
        with self._lock:
            if grace_s:
                self._process.join(grace_s)
            self._process.kill()
            self._process.join(_JOIN_S)
            self.exit_code = self._process.exitcode


class _Port(Generic[R]):
    """A process of handlers, as a slot of the queue."""

    def __init__(self, executor: ProcessExecutor[R]) -> None:
        self._executor = executor
        self._queue = executor.queue
        self._processes = executor.processes
        width = self._processes.call.slots
        self.slot: Slot[R] = self._queue.make_slot()
        self.slot.width = width
        self.slot.spent_us = 0.0
        self.slot.gate = self.wake
        self.slot.give_back = self._ask_back
        self._runs: dict[int, Any] = {}
        self._cell_of: dict[int, int] = {}
        self.slot.runs = self._runs.values()
        self._told: dict[int, list[tuple[int, object]]] = {}
        self._cells = list(range(CELLS))
        self._number = 0
        self._held = 0
        self._limit = width
        self.finished = 0
        self.spent_us = 0
        self._ahead = RunAhead(concurrency=width, maximum=CELLS, is_ahead=self._processes.is_ahead)
        self._asks_back = False
        self._has_asked = False
        # True while something else than its process is waited for.
        self._is_settling = False
        self._signs: tuple[int, list[int]] = 0, []
        self._signs_ns = 0
        self._woken, self._waking = socket.socketpair()
        self._waking.setblocking(False)
        self.process: _Process | None = None
        self.thread = threading.Thread(target=self._work, name="kafkamq-port", daemon=True)

    @property
    def held_runs(self) -> int:
        return len(self._runs)

    def wake(self) -> None:
        try:
            self._waking.send(b"x")
        except OSError:
            # It will wake all the same, or has ended.
            return

    def _ask_back(self) -> None:
        self._asks_back = True
        self.wake()

    def end(self) -> None:
        """End the process; any thread."""
        self.wake()
        process = self.process
        if process is not None:
            process.end()

    def calls(self) -> list[Call]:
        process, found = self.process, []
        if process is None:
            return []
        for number, run in list(self._runs.items()):
            cell = self._cell_of.get(number, 0)
            index, step = progress_of(process.marks[cell], number)
            if step is Step.BEGUN and index < len(run.records):
                place = self._processes.place(run.records[index])
                began_s = process.times[cell] / 1e9
                found.append(Call(began_s, place, f"process {process.pid}"))
        return found

    # Its thread.

    def _work(self) -> None:
        enter(self._processes.owner)
        try:
            while self._turn():
                pass
        except BaseException as error:  # noqa: BLE001 - a process less must not go unnoticed
            self._queue.fail(error)
        finally:
            if self.process is not None:
                self.process.end()
            self._woken.close()
            self._waking.close()

    def _turn(self) -> bool:
        if self._executor.ended.is_set() and not self._runs:
            return False
        if self.process is None:
            if self._queue.is_stopped:
                return False
            self._limit = self._processes.call.slots
            self.process = self._executor.made()
            return True
        poll = select.poll()
        pipe = self.process.pipe
        poll.register(pipe.fileno(), select.POLLIN | select.POLLHUP)
        poll.register(self._woken.fileno(), select.POLLIN)
        try:
            while True:
                self._send()
                if self._queue.is_stopped and not self._runs:
                    return False
                self._receive(poll)
        except (EOFError, OSError) as error:
            if isinstance(error, KafkaMQError):
                # Time has run out elsewhere: nobody has died.
                raise
            self._bury(self.process)
        return True

    def _send(self) -> None:
        assert self.process is not None
        if self._limit != self._executor.limit:
            self._limit = self.slot.width = self._ahead.concurrency = self._executor.limit
            self.process.pipe.send(self._limit)
        if self._asks_back:
            self._asks_back = False
            # Where each run has one record and a handler, there is nothing.
            is_ahead = self._held > min(self.slot.width, len(self._runs))
            if (is_ahead or self._queue.is_stopped) and not self._has_asked:
                self._has_asked = True
                self.process.pipe.send(None)
        now_ms = int(time.monotonic() * 1000)
        wanted = self._ahead.wanted(self._held, self.finished, now_ms)
        if wanted <= 0 and not self.slot.finished:
            return
        runs = self._queue.take(self.slot, max(1, wanted))
        if not runs:
            return
        pack, sent = self._processes.pack, []
        for run in runs:
            number, cell = self._number, self._cells.pop()
            self._number += 1
            self._runs[number], self._cell_of[number] = run, cell
            self._held += len(run.records)
            sent.append((number, cell, run.is_serial, [pack(record) for record in run.records]))
        self._has_asked = False
        self.process.pipe.send(sent)

    def _receive(self, poll: select.poll) -> None:
        assert self.process is not None
        ready = poll.poll(_TURN_S * 1000)
        woken, has_ended = self._woken.fileno(), False
        while ready:
            for number, _ in ready:
                if number == woken:
                    self._woken.recv(4096)
                else:
                    answer = self.process.pipe.recv()
                    self._is_settling = has_ended = True
                    self._hear(answer)
                    self._is_settling = False
            ready = poll.poll(0)
        if has_ended:
            self._is_settling = True
            self._queue.publish(self.slot)
            self._is_settling = False

    def _hear(self, answer: Answer) -> None:
        ends, outcomes = answer
        for number, index, data, error_text in outcomes:
            self._told.setdefault(number, []).append((index, unpacked(data, error_text)))
        self.slot.began_s = time.monotonic()
        for at in range(0, len(ends), 3):
            self._end(ends[at], ends[at + 1], ends[at + 2])

    def _end(self, number: int, tried: int, spent_us: int) -> None:
        """A run came back, with so many of its records tried."""
        run = self._runs.pop(number)
        self._cells.append(self._cell_of.pop(number))
        slot, count = self.slot, len(run.records)
        assert slot.spent_us is not None
        slot.spent_us += spent_us
        self._held -= count
        self.finished += tried
        self.spent_us += spent_us
        for index, outcome in self._told.pop(number, ()):
            self._queue.acknowledge(slot, run, run.records[index], outcome)
        if tried == count and run.failed is None:
            slot.finished.append(run)
        else:
            self._queue.done(slot, run, None if tried == count else tried)

    # Processes that die, or hang.

    def end_if_hung(self) -> None:
        """Kill the process if a handler takes too long, or if it does nothing; the watch's.

        A process that is stopped between two calls is at none: it shows no sign of life although
        it has something to do.
        """
        process, cells = self.process, list(self._cell_of.items())
        if process is None or process.late is not None:
            return
        now_ns = time.monotonic_ns()
        begun_ns = now_ns - int(self._processes.kill_after_s * 1e9)
        marks, is_at_work = [], not cells
        for number, cell in cells:
            mark = process.marks[cell]
            marks.append(mark)
            if progress_of(mark, number)[1] is Step.BEGUN:
                is_at_work = True
                if process.times[cell] < begun_ns:
                    process.kill(number)
                    return
        signs = self._number, marks
        if is_at_work or self._is_settling or signs != self._signs:
            self._signs, self._signs_ns = signs, now_ns
        elif self._signs_ns < begun_ns:
            process.kill(-1)

    def _bury(self, process: _Process) -> None:
        try:
            while True:
                self._hear(process.pipe.recv())
        except (EOFError, OSError):
            process.end(0.0 if self._executor.ended.is_set() else _GRACE_S)
        if process.late is not None:
            what = "a handler takes too long" if process.late >= 0 else "it does nothing"
            _log.warning("the process of a handler was ended: %s", what)
        elif not self._executor.ended.is_set():
            _log.error("the process of a handler has died", extra={"exit_code": process.exit_code})
        for number in list(self._runs):
            self._end_with(process, number)
        self.process = None
        self._has_asked = self._is_settling = False
        self._told.clear()
        self._queue.publish(self.slot)

    def _end_with(self, process: _Process, number: int) -> None:
        index, step = progress_of(process.marks[self._cell_of[number]], number)
        told = self._told.setdefault(number, [])
        tried = 0 if step is Step.WAITING else index + 1
        if all(at != index for at, _ in told):
            if step is Step.HELD:
                tried = index
            elif step is Step.BEGUN:
                error = self._blame(process, number)
                if error is not None:
                    told.append((index, error))
                else:
                    tried = index
                    if self._executor.ended.is_set():
                        self._queue.abandon(self.slot, [self._runs[number].records[index]])
        self._end(number, tried, 0)

    def _blame(self, process: _Process, number: int) -> Exception | None:
        """Return what the record that a handler was at has to do with the end; None: nothing."""
        if process.late is not None:
            if number != process.late:
                return None
            timeout_s = self._processes.timeout_ms / 1000
            return HandlerTimeoutError(f"the handler took longer than {timeout_s:g} s")
        if self._executor.ended.is_set():
            # This executor has ended it: no handler is to blame.
            return None
        code = process.exit_code
        return WorkerDiedError(f"the process of the handler has died (exit code {code})")
