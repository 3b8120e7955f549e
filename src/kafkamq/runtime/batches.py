"""Handlers that take lists: what is in one, and the outcome of each of its records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from kafkamq.errors import ConfigError
from kafkamq.runtime.verdicts import is_verdict
from kafkamq.runtime.work_queue import Slot

__all__ = ["outcomes_of", "take_list"]

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
