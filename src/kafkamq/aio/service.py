"""Here asyncio enters: a namespace, its queues, and sending to them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Generator, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import kafkamq as sync
from kafkamq.aio.consumer import Consumer, OnLeaseLost
from kafkamq.aio.threads import Entered, Twin, in_thread, same, shown, twin
from kafkamq.config import wait_seconds
from kafkamq.queue.handler import HandlerOptions
from kafkamq.types import OutgoingMessage, SentMessage

if TYPE_CHECKING:
    from typing_extensions import Unpack

Function = TypeVar("Function", bound=Callable[..., Any])
P = ParamSpec("P")
# Sends after which the thread that serves reports gets the interpreter.
_TURN_COUNT = 500
_TURN_S = 0.0003


def _with_queue(
    method: Callable[Concatenate[sync.Service, P], sync.Queue],
) -> Callable[Concatenate[Service, P], Queue]:
    @functools.wraps(method)
    def queue(self: Service, /, *args: P.args, **kwargs: P.kwargs) -> Queue:
        return Queue(self, method(self._sync, *args, **kwargs))

    return queue


class Service(Twin[sync.Service]):
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

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def sync_service(self) -> sync.Service:
        return self._sync

    config = shown(sync.Service.config)
    create_topics = twin(sync.Service.create_topics)
    queue = _with_queue(sync.Service.queue)

    async def close(self, timeout: float | timedelta = 30.0) -> None:
        timeout_s = wait_seconds(timeout, may_be_endless=True)
        consumers, self._consumers = self._consumers, []
        for consumer in consumers:
            await consumer.close(timeout_s)
        await in_thread(self._sync.close, timeout_s)


class Queue(Twin[sync.Queue]):
    """One logical queue; ``Service.queue`` makes it."""

    def __init__(self, service: Service, queue: sync.Queue) -> None:
        self._service = service
        self._sync = queue

    queue_id = shown(sync.Queue.queue_id)
    config = shown(sync.Queue.config)

    def handler(self, **options: Unpack[HandlerOptions]) -> Callable[[Function], Function]:
        """Register a handler, whose parameter of type ``kafkamq.aio.Message`` gets the message."""
        return self._sync.handler(**options)

    def producer(self) -> Producer:
        """Return a producer. It connects at its first use, or when it is awaited or entered."""
        return Producer(self._sync)

    create_topics = twin(sync.Queue.create_topics)
    ack = twin(sync.Queue.ack)
    nack = twin(sync.Queue.nack)
    reject = twin(sync.Queue.reject)
    extend = twin(sync.Queue.extend)

    def consumer(
        self, *, on_lease_lost: OnLeaseLost | None = None, ordering: str | None = None
    ) -> Consumer:
        """Return a worker. It connects at its first use, or when it is awaited or entered.

        Args:
            on_lease_lost: A function or a coroutine function; runs in the event loop.
            ordering: See ``kafkamq.Queue.consumer``.
        """
        consumer = Consumer(self._sync, on_lease_lost, ordering)
        self._service._consumers = [each for each in self._service._consumers if not each.is_closed]
        self._service._consumers.append(consumer)
        return consumer


class Delivery:
    """What becomes of one send; awaiting it gives the ``SentMessage``."""

    __slots__ = ("_sync",)

    def __init__(self, delivery: sync.Delivery) -> None:
        self._sync = delivery

    done = same(sync.Delivery.done)

    async def result(self, timeout: float | timedelta | None = None) -> SentMessage:
        if self._sync.done():
            return self._sync.result(0)
        return await in_thread(self._sync.result, timeout)

    def __await__(self) -> Generator[Any, None, SentMessage]:
        return self.result().__await__()


class Producer(Entered):
    def __init__(self, queue: sync.Queue) -> None:
        self._queue = queue
        self._sync: sync.Producer | None = None
        self._connecting = asyncio.Lock()
        self._sent = 0

    async def _connected(self) -> sync.Producer:
        if self._sync is None:
            async with self._connecting:
                if self._sync is None:
                    self._sync = await in_thread(self._queue.producer)
        return self._sync

    async def _begin(self) -> None:
        await self._connected()

    async def __aexit__(self, *_: object) -> None:
        await self.flush()

    @property
    def queue_id(self) -> str:
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
        # Nothing is awaited behind the send: a task that is cancelled here has sent nothing.
        self._sent += 1
        if self._sent % _TURN_COUNT == 0:
            await asyncio.sleep(_TURN_S)
        while producer.is_full:
            await asyncio.sleep(0.005)
        delivery = producer.send(payload, key=key, headers=headers, delay=delay, ttl=ttl, id=id)
        return Delivery(delivery)

    async def send_many(self, messages: Iterable[OutgoingMessage]) -> list[Delivery]:
        producer = await self._connected()
        return [Delivery(each) for each in await in_thread(producer.send_many, messages)]

    cancel = twin(sync.Producer.cancel)
    flush = twin(sync.Producer.flush)
