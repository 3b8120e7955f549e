"""Handlers that take lists: what is in one, and the outcome of each of its records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kafkamq.errors import ConfigError
from kafkamq.queue.arguments import Binder, BodyError
from kafkamq.runtime.verdicts import is_verdict
from kafkamq.runtime.work_queue import Slot

__all__ = ["Prepared", "outcomes_of", "prepare", "take_list"]

R = TypeVar("R")


def take_list(slot: Slot[R]) -> tuple[list[Any], list[R]]:
    """All that the slot has taken, as one list; nobody relieves it of that any more."""
    runs = list(slot.pending)
    return runs, [record for run in runs for record in run.records]


def outcomes_of(result: object, count: int) -> Sequence[object]:
    """The outcome of each of ``count`` records of a list."""
    if result is None or is_verdict(result):
        return [result] * count
    if isinstance(result, Sequence) and not isinstance(result, str | bytes):
        if len(result) == count:
            return result
        error = ConfigError(f"the handler got {count} records and returned {len(result)} verdicts")
        return [error] * count
    error = ConfigError(
        f"the handler returned {type(result).__name__}: a list handler returns None, a verdict for"
        " all, or a list with one for each record"
    )
    return [error] * count


@dataclass(slots=True)
class Prepared:
    """What a handler is called with."""

    arguments: list[Any]  # its own
    is_called: bool = True  # there is something to call it with
    count: int = 0  # messages of the list that it gets
    # By their places in the whole list, those whose bodies cannot be read.
    refused: dict[int, BodyError] = field(default_factory=dict)

    def outcome(self, result: object) -> object:
        """What it returned; of a list also what became of those that it did not get."""
        if not self.refused:
            return result
        given = iter(outcomes_of(result, self.count))
        everyone = range(self.count + len(self.refused))
        return [self.refused[at] if at in self.refused else next(given) for at in everyone]


def prepare(binder: Binder, given: Any) -> Prepared:
    """The arguments for a message, or for a list."""
    if not isinstance(given, list):
        return Prepared(binder.arguments(given))
    rows: list[list[Any]] = []
    refused: dict[int, BodyError] = {}
    for at, message in enumerate(given):
        try:
            rows.append(binder.arguments(message))
        except BodyError as error:  # noqa: PERF203 - it is this message's alone
            refused[at] = error
    columns = [list(column) for column in zip(*rows, strict=True)]
    return Prepared(columns, bool(rows), len(rows), refused)
