"""Workers for handlers that need the CPU: processes.

The threads that call them are as many as the processes, and each owns one. What is in order stays
so, as a run of one key is in one worker's hands. A process that dies takes an attempt of the record
that it was at with it, and is replaced; one that was at none takes nothing. What a process has not
answered for is not done, unless its mark says so; a mark counts for the batch that it names.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import threading
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import replace

from kafkamq.errors import ConfigError, KafkaMQError
from kafkamq.parallel.child import READY, Piece, Step, serve, step_of, unpacked
from kafkamq.parallel.config import ParallelConfig
from kafkamq.parallel.handling import UNTRIED, Handling
from kafkamq.parallel.record import ParallelRecord, PlainRecord
from kafkamq.parallel.rules.shards import NullKeys, Ordering
from kafkamq.parallel.threads import ThreadPool
from kafkamq.parallel.work_queue import MAX_TAKE
from kafkamq.runtime.children import start_child
from kafkamq.runtime.rules.hanging import Call, Slots

__all__ = ["WorkerDiedError", "process_pool"]

_JOIN_S = 5.0
_PAUSE_S = 1.0  # before another process, where one could not begin
_GRACE_S = 1.0  # for one that ends by itself, to do so
_MAX_BARREN = 10  # processes in a row that are killed before any could begin
_log = logging.getLogger(__name__)
_local = threading.local()
Handler = Callable[[PlainRecord], object]
Shard = Callable[[ParallelRecord], object]
Place = tuple[str, int, int]


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

    def slots(self) -> Slots:
        """As ``ThreadPool.slots``; a process that goes on in its list does not hang."""
        at = self._remote.progress()
        calls = super().slots().calls
        return Slots(len(self._workers), [at.get(call.place, call) for call in calls])

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
        self._barren = 0
        self._ended = threading.Event()

    def __call__(self, records: Sequence[ParallelRecord]) -> list[object]:
        process: _Process | None = getattr(_local, "process", None)
        if process is None:
            try:
                process = _local.process = self._make()
            except OSError as error:  # no room for another one, which is no record's fault
                _log.error(
                    "the process of a handler cannot start; it is tried again",
                    extra={"said": str(error)},
                )
                self._ended.wait(_PAUSE_S)
                return [UNTRIED] * len(records)
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

    def progress(self) -> dict[Place, Call]:
        """What processes are at, by the first record of the list of each."""
        with self._lock:
            found = [process.progress() for process in self._processes]
        return dict([each for each in found if each is not None])

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
        process.end(_GRACE_S)
        if self._ended.is_set():
            return
        code = process.exit_code
        _log.error("the process of a handler has died", extra={"exit_code": code})
        if process.was_ready:
            return
        self._barren += 1
        is_killed = code is not None and code < 0
        if not self._has_worked and (not is_killed or self._barren >= _MAX_BARREN):
            self._fail(
                ConfigError(
                    "the process of the handler ended before it could begin: see what it wrote to"
                    f" its standard error (is the handler's module importable there?); code {code}"
                )
            )
        else:
            self._ended.wait(_PAUSE_S)

    def end(self) -> None:
        """End all processes; idempotent."""
        self._ended.set()
        with self._lock:
            processes, self._processes = self._processes, []
        for process in processes:
            process.end()


class _Process:
    """One process and the pipe to it; one thread calls it."""

    def __init__(self, handler: Handler, *, wants_results: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._marks: MutableSequence[int] = context.RawArray("q", MAX_TAKE + 1)
        self._process, self._pipe = start_child(
            serve, self._marks, handler, wants_results, name="kafkamq-worker"
        )
        self._batch = 0
        self._pieces: Sequence[Piece] = ()
        self._lock = threading.Lock()
        self.was_ready = False
        self.exit_code: int | None = None

    def is_ready(self) -> bool:
        """Wait until it has begun; False: it has ended before."""
        if not self.was_ready:
            try:
                self.was_ready = self._pipe.recv() == READY
            except (EOFError, OSError):
                return False
        return True

    def call(self, pieces: Sequence[Piece]) -> tuple[list[object], bool]:
        """The outcome of each, and whether the process has died over them."""
        self._batch += 1
        self._pieces = pieces
        told: dict[int, object] = {}  # by number
        has_died = False
        try:
            self._pipe.send((self._batch, pieces))
            self._listen(told)
        except (EOFError, OSError):
            has_died = True
            self._add_marked(told, len(pieces))
        finally:
            self._pieces = ()
        return _in_order(pieces, told), has_died

    def progress(self) -> tuple[Place, Call] | None:
        """The first record of its list, and the one that it is at; None: it has begun none."""
        places = [(each.topic, each.partition, each.offset) for _, each in self._pieces]
        marks = zip(places, self._marks, strict=False)
        begun = [at for at, mark in marks if step_of(mark, self._batch) is not Step.WAITING]
        return (places[0], Call(self._marks[-1] / 1e9, begun[-1])) if begun else None

    def _listen(self, told: dict[int, object]) -> None:
        """To what is said of this batch, up to its end."""
        while True:
            batch, *answer = self._pipe.recv()
            if batch != self._batch:
                continue
            if len(answer) == 1:
                told.update(dict.fromkeys(answer[0]))
                return
            number, data, said = answer
            told[number] = unpacked(data, said)

    def _add_marked(self, told: dict[int, object], count: int) -> None:
        """What became of those that it cannot answer for any more."""
        for number in range(count):
            step = step_of(self._marks[number], self._batch)
            if number in told or step is Step.WAITING:
                continue
            is_done = step is Step.DONE
            told[number] = None if is_done else WorkerDiedError("the process of the handler died")

    def end(self, grace_s: float = 0.0) -> None:
        """End it, also in the middle of its work; idempotent, from any thread.

        Args:
            grace_s: How long to wait for it to end by itself.
        """
        with self._lock:
            if grace_s:
                self._process.join(grace_s)
            self._process.kill()
            self._process.join(_JOIN_S)
            self.exit_code = self._process.exitcode


def _in_order(pieces: Sequence[Piece], told: dict[int, object]) -> list[object]:
    """The outcome of each; nothing counts behind a failure in its order."""
    outcomes: list[object] = []
    failed: set[object] = set()
    for number, (shard, _) in enumerate(pieces):
        outcome = UNTRIED if shard in failed else told.get(number, UNTRIED)
        if shard is not None and isinstance(outcome, BaseException):
            failed.add(shard)
        outcomes.append(outcome)
    return outcomes
