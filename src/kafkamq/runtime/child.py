"""The child's side of a process of handlers: its main function, its inbox, and what it answers.

It runs an executor of threads or of coroutines on the runs that the parent sends, and answers with
the ends of runs and the outcomes that the parent must act on. Plain successes are told with the end
of their run, and ends that fall into the same moment go together. A process that dies tells nothing
more: how far it came with each run stands in memory that both see, in a cell with the number of the
run, and beside it when its last call began.

A terminal's Ctrl-C and a supervisor's SIGTERM reach every process of a group. A child pays no heed
to them: its parent decides, lets it end what it is at, and ends it by ``kill``; what is left when
the interpreter exits is ended here, as ``multiprocessing`` would ask it to end, and wait.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from io import BytesIO
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias, cast
from weakref import WeakSet

from kafkamq.errors import ConfigError
from kafkamq.queue.wire.headers import reason_of
from kafkamq.runtime.loop_executor import LoopExecutor
from kafkamq.runtime.signals import STOPS
from kafkamq.runtime.thread_executor import ThreadExecutor
from kafkamq.runtime.verdicts import awaited, is_verdict
from kafkamq.runtime.work_queue import Executor, HandlerCall, Inbox, Slot
from kafkamq.types import Ack

_log = logging.getLogger(__name__)
CELLS = 4096
_INDEX_BITS, _STEP_BITS = 14, 2
_GATHER_S = 0.004
_SOON_S = 0.0005

SentRun: TypeAlias = tuple[int, int, bool, list[Any]]
"""Its number, its cell, whether it is in order, and its records as they are sent."""

Answer: TypeAlias = tuple[list[int], list[tuple[int, int, bytes, str]]]
"""Ends of runs: number, records tried, microseconds, and so on; and outcomes: a run's number, the
record's place in it, what it is, pickled, and the text of an error."""

_lock = threading.Lock()
_started: WeakSet[BaseProcess] = WeakSet()
_pipes: WeakSet[Connection] = WeakSet()
_ended = threading.Event()


class Step(IntEnum):
    WAITING = 0
    BEGUN = 1
    DONE = 2
    HELD = 3


# Plain numbers are quicker than members of an Enum.
_BEGUN, _DONE, _HELD = map(int, (Step.BEGUN, Step.DONE, Step.HELD))


def progress_of(cell: int, number: int) -> tuple[int, Step]:
    """Get the last record of that run that was begun, and how far it is; (0, WAITING): none was."""
    if cell >> (_INDEX_BITS + _STEP_BITS) != number:
        return 0, Step.WAITING
    return (cell >> _STEP_BITS) & ((1 << _INDEX_BITS) - 1), Step(cell & ((1 << _STEP_BITS) - 1))


@dataclass(frozen=True, kw_only=True)
class RemoteCall:
    function: bytes
    # Makes of that what takes a record as it is sent; importable.
    prepare: Callable[[Any], Callable[[Any], Any]]
    is_async: bool
    slots: int
    wants_all: bool
    # A call that takes longer has failed; 0: never.
    timeout_ms: int

    @property
    def own_timeout_ms(self) -> int:
        """Return the same, but 0 where the parent sees to it: a process of one ``def`` is ended."""
        return self.timeout_ms if self.is_async or self.slots > 1 else 0


def pickled(what: object) -> bytes:
    """Return a handler and what goes with it for another process.

    Raises:
        ConfigError: They cannot be told to one.
    """
    try:
        return pickle.dumps(what)
    except Exception as error:
        raise ConfigError(
            "processes= needs a handler that can be imported, as a module's function, and such a"
            f" deserializer and middleware ({error})"
        ) from error


def start_child(
    target: Callable[..., None], *args: object, name: str
) -> tuple[BaseProcess, Connection]:
    """Return a process that calls ``target`` with its end of a pipe and ``args``; and our end.

    The target calls ``leave_signals_to_parent`` first.
    """
    # librdkafka does not survive a fork.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), name=name, daemon=True)
    # Its start would let signals through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        with _lock:
            if _ended.is_set():
                raise OSError("the interpreter exits: no process begins any more")
            process.start()
            _started.add(process)
            keep_from_forks(ours)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return process, ours


def keep_from_forks(pipe: Connection) -> None:
    """A fork of this process closes its copy, or the other end would not see this process die."""
    _pipes.add(pipe)


def leave_signals_to_parent() -> None:
    """Ignore, in the process, the signals that end a program."""
    # They are not SIG_IGN, which programs that the handler starts would inherit.
    for number in STOPS:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def _end_all() -> None:
    with _lock:
        _ended.set()
        for process in _started:
            process.kill()


def _forget_all() -> None:
    """Forget all in the child of a fork: they are its parent's."""
    global _lock, _started
    _lock, _started = threading.Lock(), WeakSet()
    for pipe in list(_pipes):
        pipe.close()


# It is registered later than multiprocessing's own, which hence runs after it.
atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)


class _Run:
    """A run of the parent's, whose records come with their places."""

    __slots__ = ("cell", "is_over", "is_serial", "mark", "number", "records")
    is_stale = False
    failed = None

    def __init__(self, number: int, cell: int, is_serial: bool, records: list[Any]) -> None:
        self.number = number
        self.cell = cell
        self.mark = number << (_INDEX_BITS + _STEP_BITS)
        self.is_serial = is_serial
        self.records = [(self, index, record) for index, record in enumerate(records)]
        self.is_over = False


_Item: TypeAlias = tuple[_Run, int, Any]


class _Inbox(Inbox[_Run, _Item]):
    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self._pipe = pipe
        self._ends: list[int] = []
        self._outcomes: list[tuple[int, int, bytes, str]] = []
        self._sending = threading.Lock()
        self._is_due = threading.Event()

    # What the parent says.

    def add(self, sent: Sequence[SentRun]) -> None:
        runs = [_Run(*each) for each in sent]
        with self.lock:
            self.ready.extend(runs)
            self.parked.wake(len(runs))

    def give_back(self) -> None:
        with self.lock:
            while self.ready:
                self._end(self.ready.popleft(), 0, 0)
            for slot in self.slots:
                if slot.current is not None and not slot.current[0].is_over:
                    run, records = slot.current
                    rest = len(list(records))
                    del run.records[len(run.records) - rest :]

    # What slots ask.

    def take(self, slot: Slot[_Item], limit: int = 0) -> list[_Run]:
        del limit
        now_s = time.monotonic()
        with self.lock:
            if slot.finished:
                spent_us = int((now_s - slot.began_s) * 1e6)
                for run in slot.finished:
                    self._end(run, len(run.records), spent_us)
                slot.finished = []
            slot.began_s = now_s
            if not self.ready or self.parked.is_over:
                self.parked.park(slot)
                slot.forget()
                return []
            runs = [self.ready.popleft()]
            slot.pending = iter(runs)
            return runs

    def acknowledge(self, slot: Slot[_Item], run: _Run, item: _Item, outcome: object) -> bool:
        _, index, _ = item
        outcome, data = _packed(outcome)
        is_failing = is_verdict(outcome) and not isinstance(outcome, Ack)
        with self.lock:
            self._outcomes.append((run.number, index, data, _error_text(outcome)))
        if is_failing or index < len(run.records) - 1:
            self.flush()
        return not (is_failing and run.is_serial)

    def done(self, slot: Slot[_Item], run: _Run, processed: int | None = None) -> None:
        with self.lock:
            spent_us = int((time.monotonic() - slot.began_s) * 1e6)
            self._end(run, len(run.records) if processed is None else processed, spent_us)

    def fail(self, error: BaseException) -> None:
        """Nothing goes on here: the parent sees that the process has ended."""
        _log.error("a process of handlers cannot go on: %s", reason_of(error))
        # A thread that reads from the pipe holds it open.
        os._exit(1)

    # What the parent is told.

    def _end(self, run: _Run, tried: int, spent_us: int) -> None:
        run.is_over = True
        self._ends += (run.number, tried, spent_us)
        if not self._is_due.is_set():
            self._is_due.set()

    def flush(self) -> None:
        with self._sending:
            with self.lock:
                ends, self._ends = self._ends, []
                outcomes, self._outcomes = self._outcomes, []
            if ends or outcomes:
                self._pipe.send((ends, outcomes))

    def report(self) -> None:
        """A thread: sends ends, those of one moment together."""
        with contextlib.suppress(EOFError, OSError):
            # The parent has gone.
            while True:
                self._is_due.wait()
                self._is_due.clear()
                self.flush()
                time.sleep(_GATHER_S if len(self.ready) > len(self.slots) else _SOON_S)


class _Marked:
    """The handler; says in the cell of its run how far it is."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        marks: MutableSequence[int],
        times: MutableSequence[int],
        *,
        wants_all: bool,
    ) -> None:
        self._function = function
        self._marks = marks
        self._times = times
        self._wants_all = wants_all

    def call(self, item: _Item) -> object:
        run, index, record = item
        mark = self._begin(run, index)
        try:
            outcome = self._function(record)
            if outcome is not None:
                outcome = awaited(outcome)
        except BaseException as error:  # noqa: BLE001 - the parent decides
            outcome = error
        return self._ended(run, mark, outcome)

    async def call_async(self, item: _Item) -> object:
        run, index, record = item
        mark = self._begin(run, index)
        try:
            outcome = await self._function(record)
            if outcome is not None:
                outcome = awaited(outcome)
        except Exception as error:  # noqa: BLE001 - the parent decides
            outcome = error
        return self._ended(run, mark, outcome)

    def _begin(self, run: _Run, index: int) -> int:
        mark = run.mark | index << _STEP_BITS
        self._times[run.cell] = time.monotonic_ns()
        self._marks[run.cell] = mark | _BEGUN
        return mark

    def _ended(self, run: _Run, mark: int, outcome: object) -> object:
        is_plain = not self._wants_all and (
            outcome is None or isinstance(outcome, Ack) or not is_verdict(outcome)
        )
        if self._marks[run.cell] == mark | _BEGUN:
            # Else it was given up, and another one is begun.
            self._marks[run.cell] = mark | (_DONE if is_plain else _HELD)
        return None if is_plain else outcome


def _cells_of(shared: Any) -> MutableSequence[int]:
    """Return the same memory, written faster."""
    view: Any = memoryview(shared).cast("B").cast("q")
    return cast("MutableSequence[int]", view)


def serve(
    pipe: Connection, marks: MutableSequence[int], times: MutableSequence[int], call: RemoteCall
) -> None:
    leave_signals_to_parent()
    keep_from_forks(pipe)
    try:
        function = call.prepare(pickle.loads(call.function))
    except BaseException as error:  # noqa: BLE001 - the parent says so
        pipe.send(reason_of(error))
        return
    inbox = _Inbox(pipe)
    cells = _cells_of(marks), _cells_of(times)
    marked = _Marked(function, *cells, wants_all=call.wants_all)
    how = HandlerCall(
        function=marked.call_async if call.is_async else marked.call,
        wants_all=call.wants_all,
        timeout_ms=call.own_timeout_ms,
    )
    executor: Executor
    if call.is_async:
        executor = LoopExecutor(inbox, how, call.slots)
    else:
        executor = ThreadExecutor(inbox, how, call.slots)
    executor.start()
    threading.Thread(target=inbox.report, name="kafkamq-report", daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        # The parent has gone: it gives nothing any more.
        pipe.send(None)
        while True:
            sent = pipe.recv()
            if sent is None:
                inbox.give_back()
            elif isinstance(sent, int):
                inbox.set_limit(sent)
            else:
                inbox.add(sent)


def _packed(outcome: object) -> tuple[object, bytes]:
    """Return an outcome for another process: pickled, or an error that says why it cannot be."""
    try:
        return outcome, pickle.dumps(outcome)
    except Exception as failure:  # noqa: BLE001 - whatever pickle or the class says
        if isinstance(outcome, BaseException):
            return _packed_bare(outcome)
        kind = type(outcome).__name__
        told = ConfigError(
            f"a result of type {kind} cannot leave its process: {reason_of(failure)}"
        )
        return told, pickle.dumps(told)


def _packed_bare(error: BaseException) -> tuple[BaseException, bytes]:
    """Return an error of the same kind with its text alone: ``retry_on`` asks for the kind."""
    kind, error_text = type(error), _error_text(error)
    try:
        bare = kind.__new__(kind)
        bare.args = (error_text.removeprefix(f"{kind.__name__}: "),)
        return bare, pickle.dumps(bare)
    except Exception:  # noqa: BLE001 - as above
        told = RuntimeError(error_text)
        return told, pickle.dumps(told)


class _BareErrors(pickle.Unpickler):
    """Makes errors without calling their classes, which often take other arguments."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if isinstance(found, type) and issubclass(found, BaseException):
            return partial(found.__new__, found)
        return found


def unpacked(data: bytes, error_text: str) -> object:
    """Return the outcome in the parent. One that cannot be made here is a failure of its record."""
    try:
        return pickle.loads(data)
    except BaseException as failure:  # noqa: BLE001 - whatever its class does when it is made
        if not error_text:
            reason = reason_of(failure)
            return ConfigError(f"a result cannot be read outside of its process: {reason}")
    try:
        return _BareErrors(BytesIO(data)).load()
    except BaseException:  # noqa: BLE001 - as above
        return RuntimeError(error_text)


def _error_text(outcome: object) -> str:
    return reason_of(outcome) if isinstance(outcome, BaseException) else ""
