"""Receives the messages of one queue for the pool of its handler."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kafkamq.errors import BrokerError, DeadlineExceededError, KafkaMQError, StateError
from kafkamq.metrics.health import Handlers, health
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.handler import HandlerSpec
from kafkamq.queue.message import Message
from kafkamq.runtime.calls import Calls
from kafkamq.runtime.messages import MessageQueue
from kafkamq.runtime.rules.pace import RateLimit
from kafkamq.runtime.rules.run_ahead import RunAhead
from kafkamq.runtime.telemetry import Telemetry
from kafkamq.runtime.work_queue import Executor
from kafkamq.transport.errors import is_retriable
from kafkamq.types import Reject

_RECEIVE_S = 0.25
_ROOM_S = 0.05
_PAUSE_S = 0.25
_JOIN_S = 0.1  # a hurry is noticed so soon
_MAX_TURN_S = 120.0  # each wait of a turn is bounded; who takes longer hangs in the client
_SPENT = Reject("its worker ended over the last of its attempts")
_log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Feeder:
    """One handler at work."""

    spec: HandlerSpec
    consumer: Consumer
    calls: Calls
    queue: MessageQueue
    executor: Executor
    room: threading.Event
    ahead: RunAhead
    faults: list[BaseException]
    telemetry: Telemetry | None
    hung_after_ms: int | None

    def __post_init__(self) -> None:
        spec = self.spec
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
            f"handlers of {spec.queue.queue_id}", longest_ms / 1000, self.executor.slots
        )
        health.watch(self._handlers)

    @property
    def failure(self) -> BaseException | None:
        return self.faults[0] if self.faults else None

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

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
            if self._thread.ident is not None:  # else another queue could not start
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
        except KafkaMQError:
            raise
        if messages:
            self._tell(len(messages), began_ns)
            self._hand_on(messages)

    def _hand_on(self, messages: Sequence[Message]) -> None:
        """To the handlers; a message whose attempts are spent is not tried again."""
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
