"""The queue API for asyncio: the same names, what waits is a coroutine.

Each consumer has one thread that owns it, so nothing here blocks the event loop. Cancelling is
safe: a message that a cancelled ``receive`` would have returned is returned by the next one.

    async with Service("localhost:9092") as service:
        async with service.queue("mail").consumer() as consumer:
            async for message in consumer:
                async with message:
                    await handle(message.payload)
"""

from kafkamq.aio.consumer import Consumer, Message
from kafkamq.aio.parallel import ParallelConsumer
from kafkamq.aio.service import Delivery, Producer, Queue, Service
from kafkamq.aio.worker import Worker

__all__ = [
    "Consumer",
    "Delivery",
    "Message",
    "ParallelConsumer",
    "Producer",
    "Queue",
    "Service",
    "Worker",
]
