"""What handlers and hooks say of a record, in the one form that the retry policy knows.

Whatever they say, it is about this record: what cannot be understood is a failure of its handler.
"""

from __future__ import annotations

import inspect
import math
from datetime import timedelta
from typing import TypeAlias

from kafkamq.errors import ConfigError
from kafkamq.queue.json_values import BodyError
from kafkamq.queue.wire.headers import clean, reason_of
from kafkamq.runtime.work_queue import HandlerFaultError
from kafkamq.types import Ack, Nack, Reject

VERDICTS = (Ack, Nack, Reject)
Verdict: TypeAlias = Ack | Nack | Reject


def is_verdict(outcome: object) -> bool:
    """Whether it says what becomes of the record: an error, a verdict, or the class of one."""
    return isinstance(outcome, (BaseException, *VERDICTS)) or _is_class_of_verdict(outcome)


def understood(
    outcome: object, retry_on: tuple[type[BaseException], ...] | None = None
) -> tuple[Verdict, BaseException | None]:
    """The verdict that an outcome means, its parts checked; and the error, if it is a failure."""
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
        except ConfigError as error:
            return Nack(), error
        return Nack(delay_s, _text(outcome.reason)), None
    if not isinstance(outcome, Ack):
        outcome = awaited(outcome)
        if isinstance(outcome, ConfigError):
            return Nack(), outcome
    return Ack(), None


def awaited(outcome: object) -> object:
    """The outcome; an error instead of an awaitable, which nobody would await."""
    if outcome is None or not inspect.isawaitable(outcome):
        return outcome
    if inspect.iscoroutine(outcome):
        outcome.close()
    return ConfigError(
        "the handler returned something that it should have awaited: declare it with async def"
    )


def seconds(delay: object) -> float:
    """A delay in s."""
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
