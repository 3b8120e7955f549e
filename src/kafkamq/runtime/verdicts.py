"""What handlers and hooks say of a record, or of a list, gets the one form that policies know.

Whatever they say, it is about this record: what cannot be understood is a failure of its handler.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import AsyncGenerator, Generator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeAlias

from kafkamq.errors import ConfigError
from kafkamq.queue.json_values import BodyError
from kafkamq.queue.rules.retry import RetryOn
from kafkamq.queue.wire.headers import clean, reason_of
from kafkamq.runtime.work_queue import HandlerFaultError
from kafkamq.types import Ack, Nack, Reject

VERDICTS = (Ack, Nack, Reject)
Verdict: TypeAlias = Ack | Nack | Reject


# What does its work when somebody iterates over it or enters it. Not every iterator and context
# manager is that: a database's cursor and an HTTP client's response are what is left of work.
_LAZY = (
    Generator,
    AsyncGenerator,
    map,
    filter,
    itertools.starmap,
    contextlib._GeneratorContextManager,
    contextlib._AsyncGeneratorContextManager,
)


def is_verdict(outcome: object) -> bool:
    """Say whether it says what becomes of the record: an error, a verdict, or the class of one."""
    return isinstance(outcome, (BaseException, *VERDICTS)) or _is_class_of_verdict(outcome)


def understood(
    outcome: object, retry_on: RetryOn | None = None
) -> tuple[Verdict, BaseException | None]:
    """Return the verdict that an outcome means, its parts checked, and the error of a failure."""
    if outcome is None:
        return Ack(), None
    if isinstance(outcome, BodyError):
        return Reject(clean(f"the body cannot be read: {outcome}")), None
    if isinstance(outcome, BaseException):
        is_retried = retry_on is None or isinstance(outcome, (HandlerFaultError, *retry_on))
        return Nack() if is_retried else Reject(reason_of(outcome)), outcome
    if _is_class_of_verdict(outcome):
        name = getattr(outcome, "__name__", "")
        return Nack(), ConfigError(
            f"the handler returned the class {name}, which it should have called: return {name}()"
        )
    if isinstance(outcome, Reject):
        return Reject(_text(outcome.reason)), None
    if isinstance(outcome, Nack):
        try:
            delay_s = None if outcome.delay is None else seconds(outcome.delay)
        except ConfigError as refusal:
            return Nack(), refusal
        return Nack(delay_s, _text(outcome.reason)), None
    error = None if isinstance(outcome, Ack) else unfinished(outcome)
    return (Ack(), None) if error is None else (Nack(), error)


def awaited(outcome: object) -> object:
    """Return the outcome; an error in place of work that nobody would do (``unfinished``)."""
    return outcome if outcome is None else unfinished(outcome) or outcome


def unfinished(outcome: object) -> ConfigError | None:
    """Return the error of a handler that returned work which it should have done; None: it did not.

    What it returned ends at some other time, or never: a coroutine or a generator has not even
    begun.
    """
    kind = type(outcome).__name__
    if inspect.isawaitable(outcome):
        if inspect.iscoroutine(outcome):
            outcome.close()
        return ConfigError(
            f"the handler returned a {kind}, which it should have awaited: declare it with async "
            "def, and await it there"
        )
    if isinstance(outcome, list | tuple) and any(map(inspect.iscoroutine, outcome)):
        for each in filter(inspect.iscoroutine, outcome):
            each.close()
        return ConfigError(
            f"the handler returned a {kind} with coroutines, which it should have awaited: declare "
            "it with async def, and await them there, for example by asyncio.gather"
        )
    if isinstance(outcome, _LAZY):
        return ConfigError(
            f"the handler returned a {kind}, which nobody runs: let it do its work, and return "
            "what comes of it (several things as a list), without yield"
        )
    if isinstance(outcome, Future):
        return ConfigError(
            f"the handler returned a {kind}, whose work has perhaps not ended: return its result()"
        )
    return None


def seconds(delay: object) -> float:
    if isinstance(delay, timedelta):
        return delay.total_seconds()
    try:
        found = float(delay)  # type: ignore[arg-type]  # whatever it is, that is the question
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise ConfigError(f"a delay of type {type(delay).__name__} is no finite number of seconds")
    return found


def _text(reason: object) -> str:
    if isinstance(reason, BaseException):
        return reason_of(reason)
    try:
        return clean(reason)
    except Exception:  # noqa: BLE001 - of the user's own __repr__: the verdict matters more
        return type(reason).__name__


def _is_class_of_verdict(outcome: object) -> bool:
    return isinstance(outcome, type) and issubclass(outcome, VERDICTS)


def outcomes_of(result: object, count: int) -> Sequence[object]:
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
