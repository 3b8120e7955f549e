"""The queue API for asyncio: the same names, what waits is a coroutine.

Each consumer has one thread that owns it, so nothing here blocks the event loop. Cancelling is
safe: a message that a cancelled ``receive`` would have returned is returned by the next one.

    async with Service("localhost:9092") as service:
        async with service.queue("mail").consumer() as consumer:
            async for message in consumer:
                async with message:
                    await handle(message.payload)
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

from kafkamq import kafka as sync
from kafkamq.config import Backoff, QueueConfig, ServiceConfig
from kafkamq.errors import BrokerError, DeadlineExceededError, StateError
from kafkamq.kafka.service import DEFAULT_BACKOFF
from kafkamq.types import Headers, MessageId, OutgoingMessage, ScheduleToken, SentMessage

__all__ = ["Consumer", "Delivery", "Message", "Producer", "Queue", "Service"]

_PAUSE_S = 0.25
_log = logging.getLogger(__name__)
T = TypeVar("T")
OnLeaseLost = Callable[["Message"], "Awaitable[None] | None"]


async def _in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    return await asyncio.to_thread(function, *args, **kwargs)


class Service:
    """One namespace on one cluster; the arguments are those of ``kafkamq.Service``."""

    def __init__(
        self,
        bootstrap_servers: str,
        namespace: str = "kafkamq",
        *,
        kafka: Mapping[str, str] | None = None,
        **topic_names: str,
    ) -> None:
        self._sync = sync.Service(bootstrap_servers, namespace, kafka=kafka, **topic_names)
        self._consumers: list[Consumer] = []

    async def __aenter__(self) -> Service:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return repr(self._sync)

    @property
    def config(self) -> ServiceConfig:
        """Where it is and what its topics are called."""
        return self._sync.config

    async def create_topics(
        self, *, partitions: int = 8, marker_partitions: int = 8, replication_factor: int = -1
    ) -> None:
        """See ``kafkamq.Service.create_topics``."""
        await _in_thread(
            self._sync.create_topics,
            partitions=partitions,
            marker_partitions=marker_partitions,
            replication_factor=replication_factor,
        )

    def queue(
        self,
        queue_id: str,
        *,
        redelivery_timeout: float | timedelta = 10.0,
        max_deliveries: int = 5,
        max_lease: float | timedelta = 43_200.0,
        backoff: Backoff = DEFAULT_BACKOFF,
        max_in_flight: int = 1000,
        exactly_once: bool = False,
        receive_buffer: int = 100,
        next_message_timeout: float | timedelta = 1.0,
        max_messages_per_commit: int = 1000,
        on_data_loss: str = "raise",
    ) -> Queue:
        """See ``kafkamq.Service.queue``."""
        queue = self._sync.queue(
            queue_id,
            redelivery_timeout=redelivery_timeout,
            max_deliveries=max_deliveries,
            max_lease=max_lease,
            backoff=backoff,
            max_in_flight=max_in_flight,
            exactly_once=exactly_once,
            receive_buffer=receive_buffer,
            next_message_timeout=next_message_timeout,
            max_messages_per_commit=max_messages_per_commit,
            on_data_loss=on_data_loss,
        )
        return Queue(self, queue)

    async def close(self, timeout: float = 30.0) -> None:
        """See ``kafkamq.Service.close``."""
        consumers, self._consumers = self._consumers, []
        for consumer in consumers:
            await consumer.close(timeout)
        await _in_thread(self._sync.close, timeout)


class Queue:
    """One logical queue; ``Service.queue`` makes it."""

    def __init__(self, service: Service, queue: sync.Queue) -> None:
        self._service = service
        self._sync = queue

    def __repr__(self) -> str:
        return repr(self._sync)

    @property
    def queue_id(self) -> str:
        """Its name."""
        return self._sync.queue_id

    @property
    def config(self) -> QueueConfig:
        """How it is worked on."""
        return self._sync.config

    def producer(self) -> Producer:
        """A producer. It connects at its first use, or when it is awaited or entered."""
        return Producer(self._sync)

    def consumer(self, *, on_lease_lost: OnLeaseLost | None = None) -> Consumer:
        """A worker. It connects at its first use, or when it is awaited or entered.

        Args:
            on_lease_lost: A function or a coroutine function; runs in the event loop.
        """
        consumer = Consumer(self._sync, on_lease_lost)
        self._service._consumers = [each for each in self._service._consumers if not each.is_closed]
        self._service._consumers.append(consumer)
        return consumer


class Delivery:
    """What becomes of one send; awaiting it gives the ``SentMessage``."""

    __slots__ = ("_sync",)

    def __init__(self, delivery: sync.Delivery) -> None:
        self._sync = delivery

    def done(self) -> bool:
        """Whether Kafka has confirmed or failed it."""
        return self._sync.done()

    async def result(self, timeout: float | None = None) -> SentMessage:
        """See ``kafkamq.Delivery.result``."""
        if self._sync.done():
            return self._sync.result(0)
        return await _in_thread(self._sync.result, timeout)

    def __await__(self) -> Generator[Any, None, SentMessage]:
        return self.result().__await__()


class Producer:
    """Sends to one queue; see ``kafkamq.Producer``."""

    def __init__(self, queue: sync.Queue) -> None:
        self._queue = queue
        self._sync: sync.Producer | None = None
        self._connecting = asyncio.Lock()

    async def _connected(self) -> sync.Producer:
        if self._sync is None:
            async with self._connecting:
                if self._sync is None:
                    self._sync = await _in_thread(self._queue.producer)
        return self._sync

    async def __aenter__(self) -> Producer:
        await self._connected()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.flush()

    def __await__(self) -> Generator[Any, None, Producer]:
        return self.__aenter__().__await__()

    @property
    def queue_id(self) -> str:
        """The queue that it sends to."""
        return self._queue.queue_id

    async def send(
        self,
        payload: bytes | None,
        *,
        key: bytes | str | None = None,
        headers: Mapping[str, bytes] | None = None,
        delay: float | timedelta = 0.0,
        ttl: float | timedelta | None = None,
        id: str | None = None,
    ) -> Delivery:
        """Queue one message; see ``kafkamq.Producer.send``. Await the delivery to confirm it."""
        producer = await self._connected()
        while producer.is_full:  # the thread that serves reports makes room
            await asyncio.sleep(0.005)
        return Delivery(
            producer.send(payload, key=key, headers=headers, delay=delay, ttl=ttl, id=id)
        )

    async def send_many(self, messages: Iterable[OutgoingMessage]) -> list[Delivery]:
        """Queue many messages; see ``kafkamq.Producer.send_many``."""
        producer = await self._connected()
        return [Delivery(each) for each in await _in_thread(producer.send_many, messages)]

    async def cancel(self, token: ScheduleToken) -> None:
        """See ``kafkamq.Producer.cancel``."""
        producer = await self._connected()
        await _in_thread(producer.cancel, token)

    async def flush(self, timeout: float = 30.0) -> None:
        """See ``kafkamq.Producer.flush``."""
        producer = await self._connected()
        await _in_thread(producer.flush, timeout)


class Message:
    """A delivery of a message, and the verdicts on it; see ``kafkamq.Message``."""

    __slots__ = ("_sync",)

    def __init__(self, message: sync.Message) -> None:
        self._sync = message

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and other._sync is self._sync

    def __hash__(self) -> int:
        return hash(self._sync)

    def __repr__(self) -> str:
        return repr(self._sync)

    @property
    def payload(self) -> bytes | None:
        """What the sender gave; None is a null payload."""
        return self._sync.payload

    @property
    def key(self) -> bytes | None:
        """The sender's key; None: it gave none."""
        return self._sync.key

    @property
    def headers(self) -> Mapping[str, bytes | None]:
        """The sender's headers; the last of a name counts."""
        return self._sync.headers

    @property
    def raw_headers(self) -> Headers:
        """All headers of the record in their order."""
        return self._sync.raw_headers

    @property
    def id(self) -> str:
        """The label that travels with every copy."""
        return self._sync.id

    @property
    def queue_id(self) -> str:
        """Its queue."""
        return self._sync.queue_id

    @property
    def delivery_count(self) -> int:
        """Deliveries so far, this one included."""
        return self._sync.delivery_count

    @property
    def timestamp_ms(self) -> int:
        """The broker's time when this copy was appended."""
        return self._sync.timestamp_ms

    @property
    def message_id(self) -> MessageId:
        """Where this copy stands."""
        return self._sync.message_id

    @property
    def deadline(self) -> float:
        """When the lease ends unless renewed, in seconds of ``time.monotonic()``."""
        return self._sync.deadline

    async def ack(self, *, wait: bool = False) -> None:
        """See ``kafkamq.Message.ack``."""
        await self._verdict(wait, self._sync.ack)

    async def nack(
        self, *, delay: float | timedelta | None = None, reason: str = "", wait: bool = False
    ) -> None:
        """See ``kafkamq.Message.nack``."""
        await self._verdict(wait, self._sync.nack, delay=delay, reason=reason)

    async def reject(self, reason: str, *, wait: bool = False) -> None:
        """See ``kafkamq.Message.reject``."""
        await self._verdict(wait, self._sync.reject, reason)

    async def extend(self, seconds: float | timedelta) -> None:
        """See ``kafkamq.Message.extend``."""
        self._sync.extend(seconds)

    async def _verdict(
        self, wait: bool, function: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        if wait:
            # Shielded: the verdict is written, whether or not its confirmation is waited for.
            await asyncio.shield(_in_thread(function, *args, wait=True, **kwargs))
        else:
            function(*args, **kwargs)  # only queues it

    async def __aenter__(self) -> Message:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._sync.__exit__(kind, error, trace)


class Consumer:
    """Receives the messages of one queue; see ``kafkamq.Consumer``."""

    def __init__(self, queue: sync.Queue, on_lease_lost: OnLeaseLost | None) -> None:
        self._queue = queue
        self._on_lease_lost = on_lease_lost
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sync: sync.Consumer | None = None
        self._closed = threading.Event()
        self._tasks: set[asyncio.Future[None]] = set()
        self._owner = ThreadPoolExecutor(1, f"kafkamq-aio-{queue.queue_id}")

    async def __aenter__(self) -> Consumer:
        await self._owned(self._connected)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __await__(self) -> Generator[Any, None, Consumer]:
        return self.__aenter__().__await__()

    @property
    def queue_id(self) -> str:
        """The queue that it receives from."""
        return self._queue.queue_id

    @property
    def in_flight(self) -> int:
        """Messages held: STARTed ahead, or handed out and without verdict."""
        return 0 if self._sync is None else self._sync.in_flight

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed.is_set()

    async def receive(self, timeout: float = 1.0) -> Message | None:
        """See ``kafkamq.Consumer.receive``; cancelling it loses no message."""

        def call() -> list[sync.Message]:
            message = self._connected().receive(timeout)
            return [] if message is None else [message]

        messages = await self._receive(call)
        return messages[0] if messages else None

    async def receive_many(self, n: int, timeout: float = 1.0) -> list[Message]:
        """See ``kafkamq.Consumer.receive_many``; cancelling it loses no message."""
        return await self._receive(lambda: self._connected().receive_many(n, timeout))

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages until the consumer is closed; passing failures are waited out."""
        timeout_s = self._queue.config.next_message_timeout_ms / 1000
        while not self._closed.is_set():
            try:
                message = await self.receive(timeout_s)
            except (BrokerError, DeadlineExceededError) as error:
                if isinstance(error, BrokerError) and not error.is_retriable:
                    raise
                _log.warning("receiving failed and goes on", extra={"said": str(error)})
                await asyncio.sleep(_PAUSE_S)
                continue
            except StateError:
                if self._closed.is_set():  # by another task meanwhile
                    return
                raise
            if message is not None:
                yield message

    async def flush(self, timeout: float = 30.0) -> None:
        """See ``kafkamq.Consumer.flush``."""
        if self._sync is not None:
            await _in_thread(self._sync.flush, timeout)

    async def close(self, timeout: float = 30.0) -> None:
        """See ``kafkamq.Consumer.close``."""
        self._closed.set()
        if self._sync is not None:
            await asyncio.shield(_in_thread(self._sync.close, timeout))
        self._owner.shutdown(wait=False)

    def _connected(self) -> sync.Consumer:
        """In the owner thread."""
        if self._sync is None:
            told = None if self._on_lease_lost is None else self._lease_lost
            self._sync = self._queue.consumer(on_lease_lost=told)
        return self._sync

    async def _receive(self, call: Callable[[], list[sync.Message]]) -> list[Message]:
        return [Message(message) for message in await self._owned(call, self._put_back)]

    async def _owned(
        self, call: Callable[[], T], on_cancelled: Callable[[Future[T]], None] | None = None
    ) -> T:
        """Run in the owner thread; if this is cancelled, ``on_cancelled`` gets the outcome."""
        if self._closed.is_set():
            raise StateError(f"the consumer of queue {self.queue_id!r} is closed")
        self._loop = asyncio.get_running_loop()
        future = self._owner.submit(call)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            if not future.cancel() and on_cancelled is not None:  # it runs, or is done
                future.add_done_callback(on_cancelled)
            raise

    def _put_back(self, future: Future[list[sync.Message]]) -> None:
        """A cancelled receive got messages: the next one returns them."""
        error = future.exception()
        if error is not None:
            _log.warning("a cancelled receive failed", extra={"said": str(error)})
        elif self._sync is not None:
            self._sync._put_back(future.result())

    def _lease_lost(self, message: sync.Message) -> None:
        """From the consumer's own thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell, Message(message))

    def _tell(self, message: Message) -> None:
        """In the event loop."""
        if self._on_lease_lost is None:
            return
        try:
            told = self._on_lease_lost(message)
        except Exception:  # noqa: BLE001 - the user's code must not stop the loop's callback
            _log.exception("on_lease_lost failed")
            return
        if inspect.isawaitable(told):
            task = asyncio.ensure_future(told)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
