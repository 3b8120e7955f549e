"""From a message to its verdict: middleware, the handler, and what its outcome means."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from kafkamq.errors import ConfigError, KafkaMQError, LeaseLostError, StateError
from kafkamq.queue.handler import BodyError, HandlerSpec
from kafkamq.queue.message import Message
from kafkamq.queue.rules.capabilities import Feature, has
from kafkamq.queue.rules.retry import Retry, backoff_delay_ms, backoff_on, judge
from kafkamq.queue.wire.headers import clean, reason_of
from kafkamq.runtime.batches import bound, outcomes_of
from kafkamq.runtime.middleware import Middleware, surrounded
from kafkamq.runtime.telemetry import Telemetry
from kafkamq.runtime.verdicts import Verdict, is_verdict, understood
from kafkamq.runtime.work_queue import HandlerFaultError
from kafkamq.types import Ack, Nack, Reject

__all__ = ["STOPPED", "Calls", "Middleware"]

STOPPED = Nack(reason="the worker was stopped before its handler had ended")
_log = logging.getLogger(__name__)
_NOT_CALLED = Nack(reason="the handler was not called: see the log")


class Calls:
    """Calls one handler, for a message or for a list of them; thread-safe."""

    def __init__(
        self,
        spec: HandlerSpec,
        middleware: Sequence[Middleware],
        telemetry: Telemetry | None,
    ) -> None:
        self.spec = spec
        self.spared: list[Message] = []  # a stop broke off their last attempts: no dead letters
        self.is_async = spec.is_async
        self._telemetry = telemetry
        call = bound(spec.function, spec.binder, is_async=self.is_async)
        self._chain = surrounded(call, middleware, is_async=self.is_async, name=spec.name)

    def run(self, given: Any) -> object:
        outcome: object = _NOT_CALLED
        try:
            with self._delivery(given) as told:
                try:
                    outcome = self._chain(given)
                except BaseException as error:  # noqa: BLE001 - an exception is a nack
                    outcome = error
                told[0] = outcome
        except Exception:  # noqa: BLE001 - of what the application set for telemetry
            self._say_unrecorded()
        return outcome

    async def run_async(self, given: Any) -> object:
        """Await an ``async def`` handler; what it raises is returned, but for its own end."""
        outcome: object = _NOT_CALLED
        try:
            with self._delivery(given) as told:
                try:
                    awaitable: Awaitable[object] = self._chain(given)
                    outcome = await awaitable
                except (asyncio.CancelledError, GeneratorExit):
                    raise
                except BaseException as error:  # noqa: BLE001 - an exception is a nack
                    outcome = error
                told[0] = outcome
        except Exception:  # noqa: BLE001 - of what the application set for telemetry
            self._say_unrecorded()
        return outcome

    def record(self, given: Any, outcome: object, began_s: float) -> None:
        """Record a delivery that ends now, and was handled elsewhere."""
        try:
            with self._delivery(given, began_s) as told:
                told[0] = outcome
        except Exception:  # noqa: BLE001 - of what the application set for telemetry
            self._say_unrecorded()

    def _say_unrecorded(self) -> None:
        queue = self.spec.queue.queue_id
        _log.exception("a delivery could not be recorded", extra={"queue": queue})

    def _delivery(
        self, given: Any, began_s: float | None = None
    ) -> AbstractContextManager[list[object]]:
        """Records the delivery of each message; the caller says what came of the call."""
        if self._telemetry is None:
            return nullcontext([None])
        return self._recorded(self._telemetry, given, began_s)

    @contextmanager
    def _recorded(
        self, telemetry: Telemetry, given: Any, began_s: float | None
    ) -> Iterator[list[object]]:
        told: list[object] = [None]
        messages = given if isinstance(given, list) else [given]
        with ExitStack() as spans:
            kinds = [spans.enter_context(telemetry.delivery(each, began_s)) for each in messages]
            yield told
            outcomes = outcomes_of(told[0], len(kinds)) if given is messages else told
            for kind, outcome in zip(kinds, outcomes, strict=True):
                kind[0] = kind_of(outcome)

    def is_spent(self, message: Message) -> bool:
        """Whether it had its attempts, and its worker died over the last one."""
        most = self.spec.max_attempts
        return most is not None and message.delivery_count > most

    # Verdicts.

    def acknowledge(self, message: Message, outcome: object) -> None:
        """Give the verdict that an outcome means, or give the message back; never raises."""
        try:
            if outcome is None or isinstance(outcome, Ack):
                message.ack()
            elif outcome is STOPPED and self._is_last(message):
                self.spared.append(message)
            else:
                verdict, error = self._verdict_on(message, outcome)
                _give(message, verdict)
                self._tell(message, verdict, error)
        except LeaseLostError as error:
            _log.warning("a verdict came too late", extra={"error": str(error)})
        except StateError as error:  # the handler has given it itself, or the consumer is closed
            _log.debug("a message has its verdict already", extra={"error": str(error)})
        except Exception:  # noqa: BLE001 - a thread that ends here would take no more messages
            _log.exception("a verdict could not be given", extra={"queue": message.queue_id})
            # What its handler returned is no verdict that can be given: without one it is stuck.
            with contextlib.suppress(KafkaMQError):  # it has its verdict, or its lease has ended
                message.nack(reason="the handler's verdict could not be given: see the log")

    def _is_last(self, message: Message) -> bool:
        spec = self.spec
        return message.delivery_count >= min(
            spec.queue.max_deliveries, spec.max_attempts or spec.queue.max_deliveries
        )

    def _verdict_on(
        self, message: Message, outcome: object
    ) -> tuple[Verdict, BaseException | None]:
        """What follows from an outcome by the handler's retry policy, and the handler's error."""
        spec, queue, count = self.spec, self.spec.queue, message.delivery_count
        verdict, error = understood(outcome, spec.retry_on)
        if queue.is_at_most_once and not isinstance(verdict, Ack):
            what = self._what(message)
            _log.error("%s failed, and does not come again (at most once)", what, exc_info=error)
            return Ack(), None
        if isinstance(verdict, Ack):
            if not is_verdict(outcome):
                _log.error(
                    "a handler returned something that is no verdict; its message counts as done",
                    extra={"queue": queue.queue_id, "type": type(outcome).__name__},
                )
            return verdict, None
        if error is not None and error is not outcome:
            _log.error(str(error), extra={"queue": queue.queue_id})
        reason = clean(verdict.reason)
        if isinstance(error, HandlerFaultError):
            error, reason = None, clean(str(error))
        elif error is not None and not reason:
            reason = reason_of(error)
        most = (
            spec.max_attempts if count < queue.max_deliveries else None
        )  # else the queue gives up
        decision = judge(verdict, attempt=count, max_attempts=most)
        if not isinstance(decision, Retry):
            is_asked = isinstance(verdict, Reject)
            why = "rejected by its handler" if is_asked else f"attempt {most} of {most} failed"
            return Reject(reason or why), error
        delay_s = decision.delay_s
        if delay_s is None and has(queue.backend, Feature.RETRY_DELAY):
            backoff = backoff_on(error, spec.retry_on) or spec.retry or queue.backoff
            delay_s = backoff_delay_ms(backoff, count, random.random()) / 1000
        return Nack(delay_s, reason), error

    def _tell(self, message: Message, verdict: Verdict, error: BaseException | None) -> None:
        what = self._what(message)
        if isinstance(verdict, Reject):
            _log.warning("%s was rejected: it becomes a dead letter", what, exc_info=error)
        elif isinstance(verdict, Ack):
            return
        elif message.delivery_count >= self.spec.queue.max_deliveries:
            did = "a handler gave it back" if error is None else "a handler failed"
            text = "%s: %s was the last one: it becomes a dead letter"
            _log.error(text, did, what, exc_info=error)
        elif error is not None:
            when = "soon" if verdict.delay is None else f"in {verdict.delay:.1f} s"
            _log.warning("a handler failed: %s comes again %s", what, when, exc_info=error)

    def _what(self, message: Message) -> str:
        """Names a message for a line of log; never its payload."""
        place = message.message_id
        return (
            f"message {message.id or '(no id)'} at {place.partition}/{place.offset} of queue "
            f"{message.queue_id}, delivery {message.delivery_count} of "
            f"{self.spec.queue.max_deliveries},"
        )


def _give(message: Message, verdict: Verdict) -> None:
    if isinstance(verdict, Ack):
        message.ack()
    elif isinstance(verdict, Reject):
        message.reject(verdict.reason)
    else:
        try:
            message.nack(delay=verdict.delay, reason=verdict.reason)
        except ConfigError as error:  # a delay that its backend does not have
            _log.error("a nack goes without its delay", extra={"error": str(error)})
            message.nack(reason=verdict.reason)


def kind_of(outcome: object) -> str:
    if isinstance(outcome, Nack):
        return "nack"
    if isinstance(outcome, Reject | BodyError):
        return "reject"
    return "error" if understood(outcome)[1] is not None else "ack"
