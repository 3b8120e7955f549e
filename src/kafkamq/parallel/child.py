"""What runs in the process of a handler, and what it tells its parent.

Each answer names its batch and its record. An outcome that the parent must act on is told at once;
what is simply done is told at the end of the batch. A process that dies tells nothing more: how far
it came with each record stands in memory that both see, with the number of the batch. Behind that
stands when it began the last one, in ns of the clock that both have.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, MutableSequence, Sequence
from enum import IntEnum
from multiprocessing.connection import Connection
from time import monotonic_ns
from typing import TypeAlias

from kafkamq.errors import ConfigError
from kafkamq.parallel.record import PlainRecord
from kafkamq.parallel.verdicts import awaited, is_verdict
from kafkamq.queue.reasons import reason_of
from kafkamq.runtime.children import leave_signals_to_parent
from kafkamq.types import Ack

__all__ = ["READY", "Answer", "End", "Piece", "Step", "serve", "step_of", "unpacked"]

READY = "ready"

Piece: TypeAlias = tuple[object, PlainRecord]
"""What a record is in order with (None: nothing), and the record."""

Answer: TypeAlias = tuple[int, int, bytes, str]
"""Batch, the record's number in it, its pickled outcome, and the text of an error."""

End: TypeAlias = tuple[int, list[int]]
"""Batch, and the numbers of the records in it that are done."""


class Step(IntEnum):
    """How far the process is with a record."""

    WAITING = 0
    BEGUN = 1
    DONE = 2


_STEP_BITS = 2


def step_of(mark: int, batch: int) -> Step:
    """What a mark says of a record of that batch: nothing, if it is of another batch."""
    return Step(mark & ((1 << _STEP_BITS) - 1)) if mark >> _STEP_BITS == batch else Step.WAITING


def _mark(batch: int, step: Step) -> int:
    return batch << _STEP_BITS | step


def serve(
    pipe: Connection,
    marks: MutableSequence[int],
    handler: Callable[[PlainRecord], object],
    wants_results: bool,
) -> None:
    """The process: answers until the pipe ends."""
    leave_signals_to_parent()
    try:
        pipe.send(READY)
        while True:
            batch, pieces = pipe.recv()
            _work(pipe, marks, handler, wants_results, batch, pieces)
    except (EOFError, OSError):  # the parent has gone: it gives nothing any more
        return


def _work(
    pipe: Connection,
    marks: MutableSequence[int],
    handler: Callable[[PlainRecord], object],
    wants_results: bool,
    batch: int,
    pieces: Sequence[Piece],
) -> None:
    done: list[int] = []
    stopped: set[object] = set()
    for number, (shard, record) in enumerate(pieces):
        if shard in stopped:  # not before the one in front of it
            continue
        marks[-1] = monotonic_ns()
        marks[number] = _mark(batch, Step.BEGUN)
        try:
            outcome = awaited(handler(record))
        except BaseException as error:  # noqa: BLE001 - the policy decides, in the parent
            outcome = error
        is_done = isinstance(outcome, Ack)
        if not wants_results and (is_done or not is_verdict(outcome)):
            marks[number] = _mark(batch, Step.DONE)
            done.append(number)
            continue
        outcome, data = _packed(outcome)
        if shard is not None and not is_done and is_verdict(outcome):
            stopped.add(shard)
        pipe.send((batch, number, data, _said(outcome)))
    pipe.send((batch, done))


def _packed(outcome: object) -> tuple[object, bytes]:
    """An outcome for another process: pickled, or an error that says why it cannot be."""
    try:
        return outcome, pickle.dumps(outcome)
    except Exception as failure:  # noqa: BLE001 - whatever pickle or the class says
        told: Exception = RuntimeError(_said(outcome))
        if not isinstance(outcome, BaseException):
            kind = type(outcome).__name__
            told = ConfigError(
                f"a result of type {kind} cannot leave its process: {reason_of(failure)}"
            )
        return told, pickle.dumps(told)


def unpacked(data: bytes, said: str) -> object:
    """In the parent: the outcome. One that cannot be made here is a failure of its record."""
    try:
        return pickle.loads(data)
    except BaseException as failure:  # noqa: BLE001 - whatever its class does when it is made
        if said:
            return RuntimeError(said)
        return ConfigError(f"a result cannot be read outside of its process: {reason_of(failure)}")


def _said(outcome: object) -> str:
    return reason_of(outcome) if isinstance(outcome, BaseException) else ""
