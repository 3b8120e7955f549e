"""A worker that handles many messages at a time on one event loop, until it has had enough.

python examples/async_worker.py localhost:9092 100
"""

from __future__ import annotations

import asyncio
import sys

from kafkamq.aio import Message, Service

MAX_AT_ONCE = 50


async def handle(message: Message, slots: asyncio.Semaphore) -> None:
    """Handles one message; a slow one is kept alive while it lasts."""
    try:
        async with message:  # leaving acknowledges, an exception gives it back
            await asyncio.sleep(0.05)  # a call to somebody else's service
            print("handled", message.id, flush=True)
    finally:
        slots.release()


async def main(servers: str, count: int) -> None:
    """Receives ``count`` messages of the queue ``mails``."""
    slots = asyncio.Semaphore(MAX_AT_ONCE)
    tasks = []
    async with Service(servers) as service, service.queue("mails").consumer() as consumer:
        for _ in range(count):
            await slots.acquire()
            message = await consumer.receive(timeout=30.0)
            if message is None:
                break
            tasks.append(asyncio.create_task(handle(message, slots)))
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
