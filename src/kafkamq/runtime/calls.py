"""From a message to its verdict: middleware, the handler, and what its outcome means."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from kafkamq.errors import ConfigError, KafkaMQError, LeaseLostError, StateError
from kafkamq.queue.arguments import BodyError
from kafkamq.queue.handler import HandlerSpec
from kafkamq.queue.message import Message
from kafkamq.queue.rules.capabilities import Feature, has
from kafkamq.queue.rules.retry import backoff_delay_ms
from kafkamq.queue.wire.headers import clean, reason_of
from kafkamq.runtime.batches import bound, outcomes_of
from kafkamq.runtime.middleware import Middleware, surrounded
from kafkamq.runtime.telemetry import Telemetry
from kafkamq.runtime.verdicts import is_verdict, understood
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
                self._acknowledge(message, outcome)
        except LeaseLostError as error:
            _log.warning("a verdict came too late", extra={"error": str(error)})
        except StateError as error:  # the handler has given it itself, or the consumer is closed
            _log.debug("a message has its verdict already", extra={"error": str(error)})
        except Exception:  # noqa: BLE001 - a thread that ends here would take no more messages
            _log.exception("a verdict could not be given", extra={"queue": message.queue_id})
            self._give_back(message)

    def _is_last(self, message: Message) -> bool:
        spec = self.spec
        return message.delivery_count >= min(
            spec.queue.max_deliveries, spec.max_attempts or spec.queue.max_deliveries
        )

    def _give_back(self, message: Message) -> None:
        """What its handler returned is no verdict that can be given: without one it is stuck."""
        try:
            message.nack(reason="the handler's verdict could not be given: see the log")
        except KafkaMQError as error:  # it has its verdict, or its lease has ended
            _log.debug("a message is not given back", extra={"error": str(error)})

    def _acknowledge(self, message: Message, outcome: object) -> None:
        verdict, error = understood(outcome, self.spec.retry_on)
        if self.spec.queue.is_at_most_once and not isinstance(verdict, Ack):
            _log.error(
                "%s failed, and does not come again (at most once)",
                self._what(message),
                exc_info=error,
            )
            message.ack()
        elif isinstance(verdict, Reject):
            self._reject(message, verdict.reason or "rejected by its handler", error)
        elif isinstance(error, HandlerFaultError):
            self._nack(message, None, clean(str(error)))
        elif error is not None:
            if error is not outcome:
                _log.error(str(error), extra={"queue": message.queue_id})
            self._nack(message, None, reason_of(error), error)
        elif isinstance(verdict, Nack):
            self._nack(message, verdict.delay, verdict.reason)
        else:
            if not is_verdict(outcome):
                _log.error(
                    "a handler returned something that is no verdict; its message counts as done",
                    extra={"queue": message.queue_id, "type": type(outcome).__name__},
                )
            message.ack()

    def _reject(self, message: Message, reason: str, error: BaseException | None = None) -> None:
        message.reject(reason)
        _log.warning(
            "%s was rejected: it becomes a dead letter", self._what(message), exc_info=error
        )

    def _nack(
        self,
        message: Message,
        delay_s: float | None,
        reason: str,
        error: BaseException | None = None,
    ) -> None:
        queue, reason = self.spec.queue, clean(reason)
        most = self.spec.max_attempts
        if most is not None and most <= message.delivery_count < queue.max_deliveries:
            self._reject(message, reason or f"attempt {most} of {most} failed", error)
            return
        if delay_s is None and has(queue.backend, Feature.RETRY_DELAY):
            retry = self.spec.retry or queue.backoff
            delay_s = backoff_delay_ms(retry, message.delivery_count, random.random()) / 1000
        self._say_again(message, delay_s, error)
        try:
            message.nack(delay=delay_s, reason=reason)
        except ConfigError as error:  # a delay that its backend does not have
            _log.error("a nack goes without its delay", extra={"error": str(error)})
            message.nack(reason=reason)

    def _what(self, message: Message) -> str:
        """Names a message for a line of log; never its payload."""
        place = message.message_id
        return (
            f"message {message.id or '(no id)'} at {place.partition}/{place.offset} of queue "
            f"{message.queue_id}, delivery {message.delivery_count} of "
            f"{self.spec.queue.max_deliveries},"
        )

    def _say_again(
        self, message: Message, delay_s: float | None, error: BaseException | None
    ) -> None:
        what = "a handler failed" if error is not None else "a handler gave it back"
        if message.delivery_count >= self.spec.queue.max_deliveries:
            _log.error(
                "%s: %s was the last one: it becomes a dead letter",
                what,
                self._what(message),
                exc_info=error,
            )
        elif error is not None:
            when = "soon" if delay_s is None else f"in {delay_s:.1f} s"
            _log.warning("%s: %s comes again %s", what, self._what(message), when, exc_info=error)


def kind_of(outcome: object) -> str:
    if isinstance(outcome, Nack):
        return "nack"
    if isinstance(outcome, Reject | BodyError):
        return "reject"
    return "error" if understood(outcome)[1] is not None else "ack"
