"""Workers for handlers that need the CPU: processes.

The threads that call them are as many as the processes, and each owns one. What is in order stays
so, as a run of one key is in one worker's hands. A process that dies takes an attempt of the record
that it was at with it, and is replaced: how far it came stands in memory that both see.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from dataclasses import replace
from enum import IntEnum
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from kafkamq.core.shards import NullKeys, Ordering
from kafkamq.errors import ConfigError, KafkaMQError
from kafkamq.kafka.parallel.config import ParallelConfig
from kafkamq.kafka.parallel.desk import MAX_TAKE
from kafkamq.kafka.parallel.handling import UNTRIED, Handling
from kafkamq.kafka.parallel.record import ParallelRecord, PlainRecord
from kafkamq.kafka.parallel.threads import ThreadPool
from kafkamq.types import Ack, Nack, Reject

__all__ = ["WorkerDiedError", "process_pool"]

_JOIN_S = 5.0
_PAUSE_S = 1.0  # before another process, where one could not begin
_READY = "ready"
_log = logging.getLogger(__name__)
_local = threading.local()
Handler = Callable[[PlainRecord], object]
Shard = Callable[[ParallelRecord], object]
_VERDICTS = (BaseException, Ack, Nack, Reject)


class _Step(IntEnum):
    """How far the process is with a record."""

    WAITING = 0
    BEGUN = 1
    DONE = 2  # or there is no need to know
    FAILED = 3  # or it has a verdict


class WorkerDiedError(KafkaMQError):
    """The process of a handler ended in the middle of its work."""


def process_pool(handling: Handling, config: ParallelConfig, *, is_async: bool) -> ThreadPool:
    """Threads whose handler calls the user's in a process of each.

    Raises:
        ConfigError: The handler cannot be called in another process.
    """
    if is_async:
        raise ConfigError("processes= is for def handlers; an async def needs no processes")
    if config.batch_size:
        raise ConfigError("processes= takes records in pieces of its own; leave batch_size out")
    try:
        pickle.dumps(handling.handler)
    except Exception as error:
        raise ConfigError(
            f"processes= needs a handler that can be imported, as a module's function ({error})"
        ) from error
    return _ProcessPool(handling, config)


class _ProcessPool(ThreadPool):
    """Threads with a process each."""

    def __init__(self, handling: Handling, config: ParallelConfig) -> None:
        wants_results = handling.publisher is not None
        self._remote = _Remote(
            handling.handler, _shards(config), handling.settler.fail, wants_results=wants_results
        )
        super().__init__(
            replace(handling, handler=self._remote, takes_lists=True), config.processes
        )

    def join(self, timeout_s: float) -> bool:
        """As ``ThreadPool.join``; then the processes end."""
        has_ended = super().join(timeout_s)
        if has_ended:
            self._remote.end()
        return has_ended

    def cancel(self) -> None:
        """End the processes, whatever they are at; it does not count."""
        self._remote.end()


def _shards(config: ParallelConfig) -> Shard:
    """What a record is in order with; None: with nothing."""
    if config.ordering is Ordering.UNORDERED:
        return lambda record: None
    if config.ordering is Ordering.PARTITION:
        return lambda record: (record.topic, record.partition)
    if config.null_keys is NullKeys.PARALLEL:
        return lambda record: (
            None if record.key is None else (record.topic, record.partition, record.key)
        )
    return lambda record: (record.topic, record.partition, record.key)


class _Remote:
    """Called by a thread with the records that it took."""

    def __init__(
        self,
        handler: Handler,
        shard: Shard,
        fail: Callable[[BaseException], None],
        *,
        wants_results: bool,
    ) -> None:
        self._handler = handler
        self._shard = shard
        self._fail = fail
        self._wants_results = wants_results
        self._lock = threading.Lock()
        self._processes: list[_Process] = []
        self._has_worked = False
        self._ended = threading.Event()

    def __call__(self, records: Sequence[ParallelRecord]) -> list[object]:
        process: _Process | None = getattr(_local, "process", None)
        if process is None:
            process = _local.process = self._make()
        if process.is_ready():
            self._has_worked = True
            pieces = [(self._shard(record), record.plain()) for record in records]
            outcomes, has_died = process.call(pieces)
        else:
            outcomes, has_died = [UNTRIED] * len(records), True
        if has_died:
            _local.process = None
            self._replace(process)
            if self._ended.is_set():  # ended by us: nobody is to blame
                outcomes = [UNTRIED if isinstance(o, WorkerDiedError) else o for o in outcomes]
        return outcomes

    def _make(self) -> _Process:
        process = _Process(self._handler, wants_results=self._wants_results)
        with self._lock:
            self._processes.append(process)
            is_late = self._ended.is_set()
        if is_late:
            process.end()
        return process

    def _replace(self, process: _Process) -> None:
        """It is gone: the next call makes another."""
        with self._lock:
            if process in self._processes:
                self._processes.remove(process)
        process.end()
        if self._ended.is_set():
            return
        _log.error("the process of a handler has died", extra={"exit_code": process.exit_code})
        if not self._has_worked:
            self._fail(
                ConfigError(
                    "the process of the handler ended before it could begin: see what it wrote to"
                    " its standard error (is the handler's module importable there?)"
                )
            )
        elif not process.was_ready:
            self._ended.wait(_PAUSE_S)

    def end(self) -> None:
        """End all processes; idempotent."""
        self._ended.set()
        with self._lock:
            processes, self._processes = self._processes, []
        for process in processes:
            process.end()


class _Process:
    """One process and the pipe to it."""

    def __init__(self, handler: Handler, *, wants_results: bool) -> None:
        context = multiprocessing.get_context("spawn")  # librdkafka does not survive a fork
        self._pipe, theirs = context.Pipe()
        self._steps: MutableSequence[int] = context.RawArray("b", MAX_TAKE)
        self._process: BaseProcess = context.Process(
            target=_serve,
            args=(theirs, self._steps, handler, wants_results),
            name="kafkamq-worker",
            daemon=True,
        )
        self._process.start()
        theirs.close()
        self._lock = threading.Lock()
        self.was_ready = False
        self.exit_code: int | None = None

    def is_ready(self) -> bool:
        """Wait until it has begun; False: it has ended before."""
        if not self.was_ready:
            try:
                self.was_ready = self._pipe.recv() == _READY
            except (EOFError, OSError):
                return False
        return True

    def call(self, pieces: Sequence[tuple[object, PlainRecord]]) -> tuple[list[object], bool]:
        """The outcome of each, and whether the process has died over them."""
        outcomes: list[object] = []
        try:
            self._pipe.send(pieces)
            while len(outcomes) < len(pieces):
                for is_tried, outcome in self._pipe.recv():
                    outcomes.append(outcome if is_tried else UNTRIED)
        except (EOFError, OSError):
            return [*outcomes, *self._lost(len(outcomes), len(pieces))], True
        return outcomes, False

    def _lost(self, start: int, end: int) -> Iterator[object]:
        """What became of those of which the process could not tell."""
        for step in self._steps[start:end]:
            if step == _Step.DONE:
                yield None
            elif step == _Step.WAITING:
                yield UNTRIED
            else:
                yield WorkerDiedError("the process of the handler has died")

    def end(self) -> None:
        """End it, also in the middle of its work; idempotent, from any thread."""
        with self._lock:
            self._process.terminate()
            self._process.join(_JOIN_S)
            if self._process.is_alive():
                self._process.kill()
                self._process.join(_JOIN_S)
            self.exit_code = self._process.exitcode


def _serve(
    pipe: Connection, steps: MutableSequence[int], handler: Handler, wants_results: bool
) -> None:
    """The process: answers until the pipe ends."""
    try:
        pipe.send(_READY)
        while True:
            pieces = pipe.recv()
            steps[: len(pieces)] = [_Step.WAITING] * len(pieces)
            outcomes = _outcomes(handler, pieces, steps, wants_results)
            if wants_results:  # one by one: what is lost with the process would be lost for good
                for outcome in outcomes:
                    pipe.send([outcome])
            else:
                pipe.send(list(outcomes))
    except (EOFError, OSError, KeyboardInterrupt):
        return


def _outcomes(
    handler: Handler,
    pieces: Sequence[tuple[object, PlainRecord]],
    steps: MutableSequence[int],
    wants_results: bool,
) -> Iterator[tuple[bool, object]]:
    failed: set[object] = set()
    for number, (shard, record) in enumerate(pieces):
        if shard in failed:  # not before the one in front of it
            yield False, None
            continue
        steps[number] = _Step.BEGUN
        try:
            outcome = handler(record)
        except BaseException as error:  # noqa: BLE001 - the policy decides, in the parent
            outcome = error
        has_verdict = isinstance(outcome, _VERDICTS)
        if not (has_verdict or wants_results):
            outcome = None
        if outcome is not None:
            outcome = _sendable(outcome)
        if shard is not None and isinstance(outcome, BaseException | Nack):
            failed.add(shard)
        if not wants_results:
            steps[number] = _Step.FAILED if has_verdict else _Step.DONE
        yield True, outcome


def _sendable(outcome: object) -> object:
    """What can be told of it to another process."""
    try:
        pickle.loads(pickle.dumps(outcome))
    except Exception as failure:  # noqa: BLE001 - whatever pickle or the class says
        if isinstance(outcome, BaseException):
            return RuntimeError(f"{type(outcome).__name__}: {outcome}")
        kind = type(outcome).__name__
        return ConfigError(f"a result of type {kind} cannot leave its process: {failure}")
    return outcome
