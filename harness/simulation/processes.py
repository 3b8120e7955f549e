"""The processes of a simulated namespace: senders, workers and trackers, as their users write them.

Everything here is user code on the public interface of kafkamq; what runs below it is what ships.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, cast

from harness.markers import encode_start
from harness.simulation.limits import Behaviour, Limits
from harness.simulation.scheduler import Process, Scheduler
from harness.simulation.settlers import Reported, say
from harness.simulation.stage import World
from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.errors import (
    BrokerError,
    DeadlineExceededError,
    KafkaMQError,
    LeaseLostError,
    StateError,
)
from kafkamq.markers.message import MarkersMessage
from kafkamq.markers.tracker.local import LocalTracker, run_standing_by
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.message import Message
from kafkamq.queue.service import Service
from kafkamq.transport.producer import IdempotentProducer
from kafkamq.transport.settings import producer_settings
from kafkamq.types import MessageId, Outcome, RecordId

if TYPE_CHECKING:
    import threading

    from kafkamq.queue.producer import Producer
    from kafkamq.queue.service import Queue

QUEUE = "queue"
LATER = "later"  # reason of a NACK with a delay
_LARGE = b" " * 65_536  # more than a START holds


@dataclass
class Told:
    """What users were told, which must be so in the logs."""

    confirmed: list[RecordId] = field(default_factory=list)  # sends
    cancelled: list[RecordId] = field(default_factory=list)
    acked: list[MessageId] = field(default_factory=list)  # and in time
    reported: list[Reported] = field(default_factory=list)  # of messages whose tokens were passed


class QueueWorld(World):
    """A namespace, and one queue in it."""

    def __init__(self, scheduler: Scheduler, limits: Limits, servers: str) -> None:
        super().__init__(scheduler, servers)
        self.limits = limits
        self.namespace = "sim"
        self.told = Told()
        self.tokens: list[tuple[MessageId, str]] = []  # passed on by workers, on a way of their own

    @property
    def config(self) -> ServiceConfig:
        return ServiceConfig(bootstrap_servers=self.servers, namespace=self.namespace)


# ---- sending


def send_all(world: QueueWorld) -> None:
    """Send what the limits say, and see to it that each is confirmed or failed."""
    limits, rng = world.limits, world.rng
    pause_s = max(0.001, limits.chaos_ms / 2000 / max(1, limits.messages))
    service = Service(world.servers, world.namespace)
    producer = None
    for number in range(limits.messages):
        world.sleep(rng.uniform(0, 2 * pause_s))
        try:
            if producer is None:
                producer = open_queue(world, service, is_batched=False).producer()
            _send(world, producer, number)
        except KafkaMQError:
            continue  # the sender does not know; what is in the log counts
    world.is_sent = True
    service.close()


def _send(world: QueueWorld, producer: Producer, number: int) -> None:
    limits, rng = world.limits, world.rng
    is_delayed = rng.random() < limits.delayed_share
    delivery = producer.send(
        _behaviour(world).payload(number) + _LARGE * (rng.random() < limits.large_share),
        id=f"m{number}",
        headers={"n": b"%d" % number},
        delay=_delay_s(world) if is_delayed else 0.0,
        ttl=20.0 if rng.random() < limits.ttl_share else None,
    )
    sent = delivery.result(60.0)
    world.told.confirmed.append((sent.topic, sent.partition, sent.offset))
    if sent.schedule is not None and rng.random() < limits.cancelled_share:
        world.sleep(rng.uniform(0, 5))
        producer.cancel(sent.schedule)
        world.told.cancelled.append((sent.topic, sent.partition, sent.offset))


def _delay_s(world: QueueWorld) -> float:
    chaos_s = world.limits.chaos_ms / 1000
    if world.limits.is_due_together:
        return max(0.001, 0.6 * chaos_s - world.now_s())
    return world.rng.uniform(0.001, chaos_s)


def _behaviour(world: QueueWorld) -> Behaviour:
    behaviours = [behaviour for behaviour, _ in world.limits.behaviours]
    weights = [weight for _, weight in world.limits.behaviours]
    return world.rng.choices(behaviours, weights)[0]


def open_queue(world: QueueWorld, service: Service, *, is_batched: bool) -> Queue:
    settings = world.limits.worker
    return service.queue(
        QUEUE,
        redelivery_timeout=settings.redelivery_timeout_ms / 1000,
        max_deliveries=settings.max_deliveries,
        max_lease=settings.max_lease_ms / 1000,
        backoff=settings.backoff,
        max_in_flight=settings.max_in_flight,
        exactly_once=settings.exactly_once,
        batch_markers=is_batched,
        receive_buffer=settings.receive_buffer,
    )


# ---- what somebody writes who means harm

INVENTED = "invented"  # the consumer id of such a START
FIRST_INVENTED = 1 << 40  # no log has such an offset


def write_inventions(world: QueueWorld) -> None:
    """STARTs by reference of messages that do not exist, for as long as the run lasts."""
    config, rng = world.config, world.rng
    producer = IdempotentProducer(config, producer_settings(config))
    for number in itertools.count(FIRST_INVENTED):
        world.sleep(world.limits.invented_every_ms / 1000)
        partition, topic_id, topic = rng.choice(
            ((99, b"", ""), (0, b"", ""), (0, b"another topic!!!", ""), (0, b"", "nowhere"))
        )
        start = encode_start(
            MessageId(partition, number, topic_id),
            QUEUE.encode(),
            None,
            redeliver_after_ms=1,
            consumer_id=INVENTED,
            by_reference=True,
            message_topic=topic,
        )
        to = rng.randrange(world.limits.marker_partitions)
        with contextlib.suppress(KafkaMQError):
            producer.produce(config.marker_topic, start, b"invented", to, None, lambda *_: None)
            producer.serve(0.0)


# ---- working


class Worker:
    """A process that receives in its first thread and handles in some others.

    Attributes:
        acked: Said, and not known yet.
        asked_ns: When it last came back from a call that receives.
        is_called: Whether its first thread is inside of a call of the consumer.
    """

    def __init__(self, world: QueueWorld) -> None:
        self.is_closing = False
        self.asked_ns = 0
        self.is_called = False
        self._consumer: Consumer | None = None
        self._got = self._settled = 0  # messages
        settings = world.limits.worker
        is_single = settings.single_share > 0 and world.rng.random() < settings.single_share
        self.is_batched = settings.batch_markers and not is_single
        self._world = world
        self._limits = world.limits
        self._messages = world.queues.Queue(max(1, world.limits.worker.handlers))
        self.acked: dict[MessageId, None] = {}
        self._process: Process | None = None

    def main(self, process: Process) -> None:
        """Run until it is told to close, or what it meets is none that passes."""
        self._process = process
        settings, threading = self._limits.worker, self._world.threading
        kafka = {"max.poll.interval.ms": str(settings.max_idle_ms)}
        service = Service(self._world.servers, self._world.namespace, kafka=kafka)
        consumer = open_queue(self._world, service, is_batched=self.is_batched).consumer()
        self._consumer = consumer
        handlers = [
            threading.Thread(target=self._handle_all, name=f"handler-{number}")
            for number in range(settings.handlers)
        ]
        for thread in handlers:
            thread.start()
        try:
            self._receive_all(consumer)
        finally:
            for _ in handlers:
                self._messages.put(None)
            for thread in handlers:
                thread.join(30.0)
            self._flush(consumer)
            service.close()

    def _receive_all(self, consumer: Consumer) -> None:
        settings, rng = self._limits.worker, self._world.rng
        while not self.is_closing:
            try:
                messages = self._receive(consumer)
            except InterruptedError:
                continue
            except (BrokerError, DeadlineExceededError) as error:
                if isinstance(error, BrokerError) and not error.is_retriable:
                    raise
                self._world.sleep(0.5)
                continue
            self._got += len(messages)
            for message in self._left(messages):
                self._messages.put(message)
            if rng.random() < 0.05:
                self._flush(consumer)
            is_chaos = self._world.now_s() < self._limits.chaos_ms / 1000
            if settings.idle_share and is_chaos and rng.random() < settings.idle_share:
                self._world.sleep(rng.uniform(0.5, 1) * settings.idle_ms / 1000)

    def _receive(self, consumer: Consumer) -> Sequence[Message]:
        count = self._limits.worker.receive_many
        with self._called():
            try:
                if count > 1:
                    return consumer.receive_many(count)
                message = consumer.receive(1.0)
                return [] if message is None else [message]
            finally:
                self.asked_ns = self._world.scheduler.now_ns

    @contextlib.contextmanager
    def _called(self) -> Iterator[None]:
        """Run the block where a signal may come; the application knows what to do."""
        self.is_called = True
        try:
            yield
        finally:
            self.is_called = False

    def interrupt(self) -> None:
        """A signal: its handler raises in the first thread, while that is in a call."""
        if self.is_called and self._process is not None:
            first = next(iter(self._process.tasks))
            self._world.scheduler.interrupt(first, InterruptedError("a signal"))

    @property
    def kept(self) -> int:
        """Return messages that its consumer holds, and that nobody has."""
        held = 0 if self._consumer is None else self._consumer.in_flight
        return held - (self._got - self._settled)

    def _left(self, messages: Sequence[Message]) -> list[Message]:
        """With batches, of half of what came together verdicts are given together."""
        if not self.is_batched or self._world.rng.random() >= 0.5:
            return list(messages)
        left: list[Message] = []
        delay_s = self._world.rng.uniform(0, 2)
        for message in messages:
            behaviour = Behaviour.of(message.payload)
            with contextlib.suppress(LeaseLostError, BrokerError, DeadlineExceededError):
                if behaviour is Behaviour.QUICK:
                    self._say(message.ack)
                    self.acked[message.message_id] = None
                elif behaviour is Behaviour.DELAYS and message.delivery_count == 1:
                    self._say(partial(message.nack, delay=delay_s, reason=LATER))
                else:
                    left.append(message)
                    if behaviour is Behaviour.EXTENDS:
                        message.extend(3 * self._limits.worker.redelivery_timeout_ms / 1000)
        deadly_share = self._limits.worker.deadly_share
        if len(left) < len(messages) and self._world.rng.random() < deadly_share:
            assert self._process is not None
            self._process.kill()
        return left

    def _say(self, verdict: Callable[[], None]) -> None:
        """Give a verdict; after an interrupt once more, if it was not given."""
        try:
            with self._called():
                verdict()
        except InterruptedError:
            with contextlib.suppress(StateError):
                verdict()
        self._settled += 1

    def _flush(self, consumer: Consumer) -> None:
        """What was acked before it, and is not named by its error, is done."""
        acked = list(self.acked)
        try:
            consumer.flush(10.0)
        except LeaseLostError as error:
            late = set(error.messages)
            for each in [each for each in acked if each in late]:
                self.acked.pop(each)
            acked = [each for each in acked if each not in late]
        except KafkaMQError:
            return
        for each in acked:
            self.acked.pop(each, None)
        self._world.told.acked += acked

    def _handle_all(self) -> None:
        while True:
            message = self._messages.get()
            if message is None:
                return
            try:
                self._handle(message)
            except (LeaseLostError, BrokerError, DeadlineExceededError):
                continue
            except StateError:
                if not self.is_closing:
                    raise

    def _handle(self, message: MarkersMessage) -> None:
        world, rng = self._world, self._world.rng
        timeout_s = self._limits.worker.redelivery_timeout_ms / 1000
        behaviour = Behaviour.of(message.payload)
        if behaviour is Behaviour.HANGS and message.delivery_count == 1:
            world.sleep(rng.uniform(1, 3) * self._limits.worker.max_lease_ms / 1000)
            return
        if self._limits.handed_share and rng.random() < self._limits.handed_share:
            self._hand_over(message, timeout_s)
            return
        if behaviour is Behaviour.EXTENDS:
            message.extend(3 * timeout_s)
        is_slow = behaviour in (Behaviour.SLOW, Behaviour.EXTENDS)
        world.sleep(timeout_s * rng.uniform(1, 2) if is_slow else rng.uniform(0, timeout_s / 4))
        if behaviour is Behaviour.POISON:
            assert self._process is not None
            self._process.kill()
        if behaviour is Behaviour.NACKS:
            message.nack(reason="again")
        elif behaviour is Behaviour.DELAYS and message.delivery_count == 1:
            message.nack(delay=rng.uniform(0, 2), reason=LATER)
        elif behaviour is Behaviour.REJECTS:
            message.reject("no good")
        elif behaviour is Behaviour.FAILS and message.delivery_count < 3:
            with message:
                raise _HandlerError("it does not work yet")
        else:
            self._ack(message)
        self._settled += 1

    def _hand_over(self, message: MarkersMessage, timeout_s: float) -> None:
        """Settlers get its token; the worker lets go of it, or gives a verdict as well, or none."""
        world, rng, message_id = self._world, self._world.rng, message.message_id
        if rng.random() < 0.6:
            world.tokens.append((message_id, message.hold(rng.uniform(0.2, 3) * timeout_s)))
            return
        world.tokens.append((message_id, message.token))
        world.sleep(rng.uniform(0, timeout_s))
        if rng.random() < 0.5:
            say(world.told.reported, message_id, Outcome.ACK, message.ack)

    def _ack(self, message: MarkersMessage) -> None:
        message_id = message.message_id
        if self._world.rng.random() < self._limits.worker.wait_share:
            message.ack(wait=True)
            self._world.told.acked.append(message_id)
        else:
            message.ack()
            self.acked[message_id] = None


class _HandlerError(LeaseLostError):
    """A handler's own; of a kind that the loop above passes."""


# ---- tracking


class Tracker:
    """A process that runs a replica of the tracker."""

    def __init__(self, world: QueueWorld) -> None:
        self.is_closing = False
        self._world = world

    def main(self, _: Process) -> None:
        """Run until it is told to close, or fails."""
        settings = self._world.limits.tracker
        config = TrackerConfig(
            max_silence_ms=settings.max_silence_ms,
            max_offsets_per_commit=settings.max_actions,
            position_interval_ms=settings.position_interval_ms,
            max_deliveries=self._world.limits.worker.max_deliveries,
            max_lease_ms=self._world.limits.worker.max_lease_ms,
        )
        if self._world.limits.stand_by:
            run_standing_by(self._world.config, config, cast("threading.Event", self))
            return
        tracker = LocalTracker(self._world.config, config)
        while not self.is_closing:
            tracker.run_once(settings.poll_ms / 1000)
        tracker.close()

    def is_set(self) -> bool:
        """Return whether it is told to close: what is asked of the event that ends one."""
        return self.is_closing
