"""``Worker``: runs the handlers of a service's queues, each with its own share of the process.

It receives, hands out and stops. What is committed, and what happens when a partition is revoked,
is the business of each queue's backend.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from kafkamq.config import Options, QueueConfig, ServiceConfig, wait_seconds
from kafkamq.errors import BrokerError, ConfigError, DeadlineExceededError, KafkaMQError, StateError
from kafkamq.metrics.health import Handlers, health
from kafkamq.queue.backend import ConsumerPlan
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.handler import HandlerSpec
from kafkamq.queue.message import Message
from kafkamq.queue.rules.capabilities import Feature, require
from kafkamq.runtime.loop_executor import LoopExecutor, LoopThread
from kafkamq.runtime.messages import Calls, MessageQueue, RemoteMessages, processes_for
from kafkamq.runtime.middleware import Middleware
from kafkamq.runtime.process_executor import ProcessExecutor
from kafkamq.runtime.rules.pace import RateLimit, RunAhead
from kafkamq.runtime.signals import apart, stop_on_signals
from kafkamq.runtime.telemetry import Telemetry, is_available
from kafkamq.runtime.thread_executor import ThreadExecutor
from kafkamq.runtime.work_queue import Executor, HandlerCall, is_inside
from kafkamq.transport.errors import is_retriable
from kafkamq.types import Backend, Reject

_SLICE_S = 0.1
_RECEIVE_S = 0.25
_ROOM_S = 0.05
_PAUSE_S = 0.25
_JOIN_S = 0.1
# Each wait of a turn is bounded: a feeder that takes longer hangs in the client.
_MAX_TURN_S = 120.0
_SPENT = Reject("its worker ended over the last of its attempts")
_log = logging.getLogger(__name__)


class HandlerSource(Protocol):
    """A service, on Kafka or in memory, as a worker uses it."""

    @property
    def handlers(self) -> list[HandlerSpec]:
        """Return what was registered on its queues."""

    @property
    def cluster(self) -> ServiceConfig | None:
        """Return where its brokers are; None: it needs none."""

    def open_consumer(self, spec: HandlerSpec, plan: ConsumerPlan) -> Consumer:
        """Return a consumer for a handler."""


class Worker:
    """Runs all handlers that were registered on queues of a service.

    Each queue has a consumer and ``concurrency`` handlers of its own: a full queue takes nothing
    from another one. A context manager: ``with worker:`` runs it in the background.
    """

    def __init__(
        self,
        service: HandlerSource,
        *,
        queues: Iterable[str] | None = None,
        middleware: Sequence[Middleware] = (),
        drain: float | timedelta = Options.drain.default,
        on_lease_lost: Callable[[Message], None] | None = None,
        telemetry: bool | None = None,
        hung_after: float | timedelta | None = None,
    ) -> None:
        """Starts nothing.

        Args:
            service: Whose handlers.
            queues: Only those of these queues.
            middleware: Around every handler, the first one outermost (``runtime.middleware``).
            drain: s that handlers have to end when the worker stops; then they are given back.
            on_lease_lost: As for ``Queue.consumer``.
            telemetry: Spans and metrics through OpenTelemetry; None: when its SDK is installed.
            hung_after: s for which all handlers of a queue may hang: none of them ends, or their
                event loop is blocked. Then the process is not live (``kafkamq health --live``);
                after 5 minutes it is not ready. None: the queue's ``max_lease``.

        Raises:
            ConfigError: ``drain`` is no time, or ``hung_after`` no positive one.
        """
        self._service = service
        self._queues = None if queues is None else frozenset(queues)
        self._middleware = tuple(middleware)
        self._drain_s = wait_seconds(Options.drain.convert(drain) / 1000)
        self._told = on_lease_lost
        self._telemetry = telemetry
        self._hung_after_ms = None if hung_after is None else Options.hung_after.convert(hung_after)
        self._feeders: list[Feeder] = []
        self._stopped: list[Feeder] = []
        self._pools: list[ProcessExecutor[Any]] = []
        self._loop: LoopThread | asyncio.AbstractEventLoop = LoopThread()
        self._stopping = threading.Event()
        self._is_hurried = threading.Event()
        self._lock = threading.RLock()
        self._is_started = False

    def __enter__(self) -> Worker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def handled(self) -> int:
        return sum([feeder.handled for feeder in (*self._feeders, *self._stopped)])

    @property
    def queues(self) -> list[QueueConfig]:
        return [spec.queue for spec in self._chosen()]

    @property
    def service_config(self) -> ServiceConfig | None:
        """Return where its service is; None: in memory."""
        return self._service.cluster

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    @property
    def failure(self) -> BaseException | None:
        found = [feeder.failure for feeder in self._feeders if feeder.failure is not None]
        return found[0] if found else None

    def start(self) -> None:
        """Check all handlers, connect, and begin in the background.

        Raises:
            ConfigError: There is no handler, one cannot work, or a backend lacks what it needs.
            StateError: It was started before.
            BrokerError, DeadlineExceededError: The cluster refused, or does not answer.
        """
        specs = self._chosen()
        with self._lock:
            if self._is_started:
                raise StateError("this Worker was started before; make another one")
            self._is_started = True
            telemetry = None
            if is_available() if self._telemetry is None else self._telemetry:
                telemetry = Telemetry()
            try:
                made = [self._make(spec, telemetry) for spec in specs]
                for feeder in made:
                    feeder.start()
            except BaseException:
                self.stop(0.0)
                raise

    def use_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Await ``async def`` handlers on this loop; before the start."""
        self._loop = loop

    def _chosen(self) -> list[HandlerSpec]:
        specs = [
            spec
            for spec in self._service.handlers
            if self._queues is None or spec.queue.queue_id in self._queues
        ]
        found = [spec.queue.queue_id for spec in specs]
        if not specs:
            raise ConfigError("there is no handler to run: register one with @queue.handler()")
        if self._queues is not None and self._queues - set(found):
            missing = ", ".join(sorted(self._queues - set(found)))
            raise ConfigError(f"there is no handler of {missing}")
        twice = {name for name in found if found.count(name) > 1}
        if twice:
            raise ConfigError(f"queue {min(twice)!r} has several handlers: one each")
        return specs

    def _make(self, spec: HandlerSpec, telemetry: Telemetry | None) -> Feeder:
        faults = list[BaseException]()
        calls = Calls(spec, self._middleware, telemetry)
        of_kind = RemoteMessages if spec.processes else MessageQueue
        queue = of_kind(calls, threading.Event(), faults.append, self._stopping)
        executor = self._executor(spec, calls, queue)
        plan = ConsumerPlan(
            on_lease_lost=self._told,
            ordering=spec.ordering,
            concurrency=spec.concurrency,
            handler_timeout_ms=spec.timeout_ms,
        )
        consumer = self._service.open_consumer(spec, plan)
        feeder = Feeder(consumer, queue, executor, faults, telemetry, self._hung_after_ms)
        self._feeders.append(feeder)
        return feeder

    def _executor(self, spec: HandlerSpec, calls: Calls, queue: MessageQueue) -> Executor:
        """Return who calls the handler; of processes the first has begun, and so can the others."""
        if spec.processes:
            try:
                is_ahead = _may_take_ahead(spec)
                processes = processes_for(spec, self._middleware, self, is_ahead=is_ahead)
                pool: ProcessExecutor[Any] = ProcessExecutor(queue, processes)
                self._pools.append(pool)
                pool.check(self._stopping.is_set)
            except ConfigError as error:
                raise ConfigError(f"handler of queue {spec.queue.queue_id!r}: {error}") from error
            return pool
        call = HandlerCall(
            function=calls.run_async if calls.is_async else calls.run,
            name=f"kafkamq-{spec.queue.queue_id}",
            takes_lists=bool(spec.batch_size),
            wants_all=True,
            timeout_ms=spec.timeout_ms,
            is_claimed=True,
            owner=self,
        )
        if calls.is_async:
            return LoopExecutor(queue, call, spec.concurrency, self._loop)
        return ThreadExecutor(queue, call, spec.concurrency)

    def pause(self, queue_id: str) -> None:
        """Begin no more messages of a queue until ``resume``.

        Raises:
            ConfigError: It has no handler here, or its backend cannot wait.
        """
        feeder = self._feeder(queue_id)
        require(feeder.spec.queue.backend, Feature.PAUSE, f"queue {queue_id!r}: pause")
        feeder.pause()

    def resume(self, queue_id: str) -> None:
        self._feeder(queue_id).resume()

    def _feeder(self, queue_id: str) -> Feeder:
        for feeder in self._feeders:
            if feeder.spec.queue.queue_id == queue_id:
                return feeder
        raise ConfigError(f"queue {queue_id!r} has no handler that runs here")

    def run(self) -> None:
        """Work until SIGTERM, SIGHUP, Ctrl-C or ``request_stop``; then drain.

        A second Ctrl-C ends that at once: what has not ended is given back.

        Raises:
            ConfigError, BrokerError, DeadlineExceededError: As ``start``, and what made it stop.
        """
        restore = self._catch_signals()
        try:
            # Where that is refused, what runs already goes on.
            self.start()
            try:
                self.wait()
            finally:
                self.stop()
        finally:
            restore()

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait until it is asked to stop; False: not in time.

        Raises:
            ConfigError: ``timeout`` is no time.
            KafkaMQError: What ended one of its queues; the others go on until ``stop``.
        """
        deadline_s = math.inf
        if timeout is not None:
            deadline_s = time.monotonic() + wait_seconds(timeout, may_be_endless=True)
        while not self._stopping.wait(_SLICE_S):
            if self.failure is not None:
                raise self.failure
            if time.monotonic() > deadline_s:
                return False
        return True

    def request_stop(self) -> None:
        """Ask for the end of ``run``; for signal handlers and other threads."""
        apart(self._stopping.set)

    def stop(self, timeout: float | timedelta | None = None) -> None:
        """Begin nothing more, give handlers ``timeout`` s (None: ``drain``) to end, and close.

        What was not begun is released; what has not ended by then is nacked. Another stop, or a
        start, that is under way is waited for, but in a handler, which it may wait for.

        Raises:
            ConfigError: ``timeout`` is no time; nothing is stopped.
            KafkaMQError: The first verdicts that could not be confirmed; all is closed.
        """
        drain_s = self._drain_s if timeout is None else wait_seconds(timeout, name="timeout")
        self._stopping.set()
        if not self._lock.acquire(blocking=not is_inside(self)):
            return
        try:
            self._stop(drain_s)
        finally:
            self._lock.release()

    def _stop(self, drain_s: float) -> None:
        feeders, self._feeders = self._feeders, []
        self._stopped += feeders
        deadline_s = time.monotonic() + drain_s
        for feeder in feeders:
            feeder.stop()
        failures: list[KafkaMQError] = []
        for feeder in feeders:
            try:
                feeder.finish(deadline_s, self._is_hurried)
            except KafkaMQError as error:  # noqa: PERF203 - the others are closed as well
                failures.append(error)
        for pool in self._pools:
            pool.cancel()
        if isinstance(self._loop, LoopThread):
            self._loop.stop()
        if failures:
            raise failures[0]

    def _catch_signals(self) -> Callable[[], None]:
        if threading.current_thread() is not threading.main_thread():
            return lambda: None

        def stop() -> None:
            _log.info("a signal came: the worker drains")
            self._stopping.set()

        def stop_at_once() -> None:
            _log.warning("a second Ctrl-C came: handlers are not waited for")
            self._is_hurried.set()

        return stop_on_signals(stop, at_once=stop_at_once)


@dataclass(eq=False, repr=False)
class Feeder:
    """One handler at work: receives the messages of its queue for its executor."""

    consumer: Consumer
    queue: MessageQueue
    executor: Executor
    faults: list[BaseException]
    telemetry: Telemetry | None
    hung_after_ms: int | None

    def __post_init__(self) -> None:
        self.calls, self.room = self.queue.handler_calls, self.queue.room
        self.spec = spec = self.calls.spec
        self.ahead = RunAhead(
            concurrency=spec.concurrency * max(1, spec.batch_size),
            maximum=max(spec.queue.max_in_flight, 1),
            is_ahead=_may_take_ahead(spec),
        )
        self._rate = None if spec.max_rate is None else RateLimit(spec.max_rate)
        self._receive_s = _RECEIVE_S
        if spec.batch_linger_ms:
            self._receive_s = min(_RECEIVE_S, max(0.01, spec.batch_linger_ms / 1000))
        self._submitted = 0
        self._stopping = threading.Event()
        self._paused = threading.Event()
        name = f"kafkamq-feed-{spec.queue.queue_id}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loop = health.add(
            f"receiving of {spec.queue.queue_id}",
            max_age_s=_MAX_TURN_S,
            is_ready=lambda: not self.faults,
        )
        longest_ms = self.hung_after_ms or spec.queue.max_lease_ms
        self._handlers = Handlers(
            f"handlers of {spec.queue.queue_id}",
            longest_ms / 1000,
            self.executor.slots,
            queue=spec.queue.queue_id,
            handler=spec.name,
            consumer=lambda: self.consumer.consumer_id,
        )
        health.watch(self._handlers)

    @property
    def failure(self) -> BaseException | None:
        return self.faults[0] if self.faults else None

    @property
    def handled(self) -> int:
        return self.queue.finished

    def start(self) -> None:
        self.executor.start()
        self._thread.start()

    def pause(self) -> None:
        """Receive nothing more until ``resume``; what is in the queue goes on."""
        self._paused.set()

    def resume(self) -> None:
        self._paused.clear()

    def stop(self) -> None:
        self._stopping.set()
        self.room.set()

    def finish(self, deadline_s: float, is_hurried: threading.Event) -> None:
        """After ``stop``: wait for what was begun until ``deadline_s``, or a hurry, and end.

        What was not begun is released, what has not ended by then is nacked; also released is what
        that would make a dead letter.
        """
        health.remove(self._loop)
        health.remove(self._handlers)
        try:
            if self._thread.ident is not None:
                # Else another queue could not start.
                self._finish_handlers(deadline_s, is_hurried)
        finally:
            self.consumer.close(max(10.0, deadline_s - time.monotonic()))

    def _finish_handlers(self, deadline_s: float, is_hurried: threading.Event) -> None:
        self._thread.join(_RECEIVE_S * 8 + 5.0)
        self.consumer.put_back(self.queue.stop())
        left_s = deadline_s - time.monotonic()
        while not (has_ended := self.executor.join(max(0.0, min(left_s, _JOIN_S)))):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or is_hurried.is_set():
                break
        if not has_ended:
            _log.warning(
                "handlers have not ended in time; their messages are given back",
                extra={"queue": self.spec.queue.queue_id},
            )
        self.executor.cancel()
        self.consumer.put_back(self.calls.spared)

    def _run(self) -> None:
        try:
            while not (self._stopping.is_set() or self.faults):
                self._loop.beat()
                self.queue.tend()
                if self._paused.is_set():
                    self._stopping.wait(_ROOM_S)
                else:
                    self._turn()
        except BaseException as error:  # noqa: BLE001 - the worker raises it
            self.faults.append(error)

    def _turn(self) -> None:
        self.room.clear()
        finished = self.queue.finished
        now_ms = time.monotonic() * 1000
        wanted = self.ahead.wanted(self._submitted - finished, finished, int(now_ms))
        if self._rate is not None:
            wanted = min(wanted, self._rate.available(now_ms))
        if wanted <= 0:
            self.room.wait(_ROOM_S)
            return
        began_ns = time.time_ns()
        try:
            messages = self.consumer.receive_many(wanted, self._receive_s)
        except (BrokerError, DeadlineExceededError) as error:
            if not is_retriable(error) or self.consumer.has_failed:
                raise
            _log.warning("receiving failed and goes on", extra={"error": str(error)})
            self._stopping.wait(_PAUSE_S)
            return
        except StateError:
            if self._stopping.is_set():
                return
            raise
        if not messages:
            return
        self._tell(len(messages), began_ns)
        # A message whose attempts are spent is not tried again.
        fine = [message for message in messages if not self.calls.is_spent(message)]
        if len(fine) < len(messages):
            for message in messages:
                if self.calls.is_spent(message):
                    self.calls.acknowledge(message, _SPENT)
        self._submitted += len(fine)
        self.queue.add(fine)
        if self._rate is not None:
            self._rate.spend(len(fine))

    def _tell(self, count: int, began_ns: int) -> None:
        if self.telemetry is None:
            return
        try:
            self.telemetry.received(self.spec.queue.queue_id, count, began_ns)
        except Exception:  # noqa: BLE001 - of what the application set for telemetry
            _log.exception("a batch could not be recorded")


def _may_take_ahead(spec: HandlerSpec) -> bool:
    """Return whether messages may wait here: not where their lease runs, or they are gone."""
    is_held = spec.queue.backend is not Backend.SHARE and not spec.queue.is_at_most_once
    return is_held and spec.max_rate is None
