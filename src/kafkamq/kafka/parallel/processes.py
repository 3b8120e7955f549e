"""Workers for handlers that need the CPU: processes.

The threads that call them are as many as the processes, and each owns one. What is in order stays
so, as a run of one key is in one worker's hands. A process that dies takes an attempt of what it
was given with it, and is replaced.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from kafkamq.core.shards import NullKeys, Ordering
from kafkamq.errors import ConfigError, KafkaMQError
from kafkamq.kafka.parallel.config import ParallelConfig
from kafkamq.kafka.parallel.handling import UNTRIED, Handling
from kafkamq.kafka.parallel.record import ParallelRecord, PlainRecord
from kafkamq.kafka.parallel.threads import ThreadPool
from kafkamq.types import Ack, Nack, Reject

__all__ = ["WorkerDiedError", "process_pool"]

_JOIN_S = 5.0
_log = logging.getLogger(__name__)
_local = threading.local()
Handler = Callable[[PlainRecord], object]
Shard = Callable[[ParallelRecord], object]
_SENT = (BaseException, Ack, Nack, Reject)


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
    remote = replace(handling, handler=_Remote(handling.handler, config), takes_lists=True)
    return ThreadPool(remote, config.processes)


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

    def __init__(self, handler: Handler, config: ParallelConfig) -> None:
        self._handler = handler
        self._shard = _shards(config)

    def __call__(self, records: Sequence[ParallelRecord]) -> list[object]:
        process: _Process | None = getattr(_local, "process", None)
        if process is None:
            process = _local.process = _Process(self._handler, self._shard)
        try:
            return process.call(records)
        except (EOFError, OSError) as error:
            _local.process = None
            process.end()
            _log.exception("the process of a handler has died")
            # Which of them it was is not known: the first that was not answered is to blame.
            died = WorkerDiedError("the process of the handler has died")
            died.__cause__ = error
            return [died, *[UNTRIED] * (len(records) - 1)]


class _Process:
    """One process and the pipe to it."""

    def __init__(self, handler: Handler, shard: Shard) -> None:
        self._shard = shard
        context = multiprocessing.get_context("spawn")  # librdkafka does not survive a fork
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_serve, args=(theirs, handler), name="kafkamq-worker", daemon=True
        )
        self._process.start()
        theirs.close()

    def call(self, records: Sequence[ParallelRecord]) -> list[object]:
        self._pipe.send([(self._shard(record), record.plain()) for record in records])
        found: list[tuple[bool, object]] = self._pipe.recv()
        outcomes: list[object] = []
        for is_tried, outcome in found:
            outcomes.append(outcome if is_tried else UNTRIED)
        return outcomes

    def end(self) -> None:
        self._pipe.close()
        self._process.join(_JOIN_S)


def _serve(pipe: Connection, handler: Handler) -> None:
    """The process: answers until the pipe ends."""
    while True:
        try:
            pieces = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        pipe.send(_outcomes(handler, pieces))


def _outcomes(
    handler: Handler, pieces: Sequence[tuple[object, PlainRecord]]
) -> list[tuple[bool, object]]:
    failed: set[object] = set()
    outcomes: list[tuple[bool, object]] = []
    for shard, record in pieces:
        if shard in failed:  # not before the one in front of it
            outcomes.append((False, None))
            continue
        try:
            outcome = handler(record)
        except BaseException as error:  # noqa: BLE001 - the policy decides, in the parent
            outcome = _sendable(error)
        if shard is not None and isinstance(outcome, BaseException | Nack):
            failed.add(shard)
        outcomes.append((True, outcome if isinstance(outcome, _SENT) else None))
    return outcomes


def _sendable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - some errors cannot be pickled
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
