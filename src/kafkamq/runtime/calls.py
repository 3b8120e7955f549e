"""From a message to its verdict: middleware, the handler, and what its outcome means."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kafkamq.errors import ConfigError, KafkaMQError, LeaseLostError, StateError
from kafkamq.queue.arguments import BodyError
from kafkamq.queue.handler import HandlerSpec
from kafkamq.queue.message import Message
from kafkamq.queue.reasons import clean, reason_of
from kafkamq.queue.rules.capabilities import Feature, has
from kafkamq.queue.rules.retry import backoff_delay_ms
from kafkamq.runtime.telemetry import Telemetry
from kafkamq.types import Ack, Nack, Reject

__all__ = ["Calls", "Middleware"]

Middleware = Callable[[Message, Callable[[Message], Any]], Any]
"""Gets a message and what calls the handler; returns what that returns, or another verdict."""

_log = logging.getLogger(__name__)
_KINDS = (Ack, Nack, Reject)  # compared by identity: a result's == may be of any kind, or raise
_NOT_CALLED = Nack(reason="the handler was not called: see the log")


class Calls:
    """Calls one handler; thread-safe."""

    def __init__(
        self,
        spec: HandlerSpec,
        middleware: Sequence[Middleware],
        telemetry: Telemetry | None,
        function: Callable[[Message], Any] | None = None,
    ) -> None:
        """``function`` takes the handler's place: it calls it elsewhere."""
        self.spec = spec
        self._telemetry = telemetry
        call = function
        if call is None:
            call = self._call_async if spec.is_async else self._call
        for each in reversed(middleware):
            is_async = inspect.iscoroutinefunction(each)
            if is_async is not spec.is_async:
                kind = "async def" if spec.is_async else "def"
                raise ConfigError(
                    f"middleware {getattr(each, '__qualname__', each)}: handler {spec.name} is "
                    f"{kind}, and so must its middleware be"
                )
            call = _wrapped(each, call)
        self._chain = call

    def _call(self, message: Message) -> Any:
        return self.spec.function(*self.spec.binder.arguments(message))

    async def _call_async(self, message: Message) -> Any:
        return await self.spec.function(*self.spec.binder.arguments(message))

    def run(self, message: Message) -> object:
        """Call a ``def`` handler; what it raises is returned."""
        outcome: object = _NOT_CALLED
        try:
            with self._delivery(message) as told:
                try:
                    outcome = self._chain(message)
                except BaseException as error:  # noqa: BLE001 - an exception is a nack
                    outcome = error
                told[0] = kind_of(outcome)
        except Exception:  # noqa: BLE001 - of what the application set for telemetry
            _log.exception("a delivery could not be recorded", extra={"queue": message.queue_id})
        return outcome

    async def run_async(self, message: Message) -> object:
        """Await an ``async def`` handler; what it raises is returned, but for a cancellation."""
        outcome: object = _NOT_CALLED
        try:
            with self._delivery(message) as told:
                try:
                    outcome = await self._awaitable(message)
                except asyncio.CancelledError:
                    raise
                except BaseException as error:  # noqa: BLE001 - an exception is a nack
                    outcome = error
                told[0] = kind_of(outcome)
        except Exception:  # noqa: BLE001 - of what the application set for telemetry
            _log.exception("a delivery could not be recorded", extra={"queue": message.queue_id})
        return outcome

    def _awaitable(self, message: Message) -> Awaitable[object]:
        found: Awaitable[object] = self._chain(message)
        return found

    def _delivery(self, message: Message) -> AbstractContextManager[list[str]]:
        if self._telemetry is None:
            return nullcontext([""])
        return self._telemetry.delivery(message)

    # Verdicts.

    def settle(self, message: Message, outcome: object) -> None:
        """Give the verdict that an outcome means, or give the message back; never raises."""
        try:
            if outcome is None or isinstance(outcome, Ack):
                message.ack()
            else:
                self._settle(message, outcome)
        except LeaseLostError as error:
            _log.warning("a verdict came too late", extra={"said": str(error)})
        except StateError as error:  # the handler has given it itself, or the consumer is closed
            _log.debug("a message has its verdict already", extra={"said": str(error)})
        except Exception:  # noqa: BLE001 - a thread that ends here would take no more messages
            _log.exception("a verdict could not be given", extra={"queue": message.queue_id})
            self._give_back(message)

    def _give_back(self, message: Message) -> None:
        """What its handler returned is no verdict that can be given: without one it is stuck."""
        try:
            message.nack(reason="the handler's verdict could not be given: see the log")
        except KafkaMQError as error:  # it has its verdict, or its lease has ended
            _log.debug("a message is not given back", extra={"said": str(error)})

    def _settle(self, message: Message, outcome: object) -> None:
        if isinstance(outcome, Nack):
            self._nack(message, outcome.delay, outcome.reason)
        elif isinstance(outcome, Reject):
            self._reject(message, clean(outcome.reason) or "rejected by its handler")
        elif isinstance(outcome, BodyError):
            self._reject(message, clean(f"the body cannot be read: {outcome}"))
        elif isinstance(outcome, BaseException):
            self._nack(message, None, reason_of(outcome), outcome)
        elif inspect.isawaitable(outcome) or any(outcome is kind for kind in _KINDS):
            said = "the handler returned something that it should have awaited or called"
            _log.error(said, extra={"queue": message.queue_id, "type": type(outcome).__name__})
            if inspect.iscoroutine(outcome):
                outcome.close()
            self._nack(message, None, said)
        else:
            _log.error(
                "a handler returned something that is no verdict; its message counts as done",
                extra={"queue": message.queue_id, "type": type(outcome).__name__},
            )
            message.ack()

    def _reject(self, message: Message, reason: str) -> None:
        message.reject(reason)
        _log.warning("%s was rejected: it becomes a dead letter", self._what(message))

    def _nack(
        self,
        message: Message,
        delay_s: float | None,
        reason: str,
        error: BaseException | None = None,
    ) -> None:
        queue, reason = self.spec.queue, clean(reason)
        if delay_s is None and has(queue.backend, Feature.RETRY_DELAY):
            retry = self.spec.retry or queue.backoff
            delay_s = backoff_delay_ms(retry, message.delivery_count, random.random()) / 1000
        self._say_again(message, delay_s, error)
        try:
            message.nack(delay=delay_s, reason=reason)
        except ConfigError as error:  # a delay that its backend does not have
            _log.error("a nack goes without its delay", extra={"said": str(error)})
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


def _wrapped(middleware: Middleware, call: Callable[[Message], Any]) -> Callable[[Message], Any]:
    return lambda message: middleware(message, call)


def kind_of(outcome: object) -> str:
    """The name of an outcome, for metrics."""
    if isinstance(outcome, Nack):
        return "nack"
    if isinstance(outcome, Reject | BodyError):
        return "reject"
    return "error" if isinstance(outcome, BaseException) else "ack"
