"""A slow link: a TCP proxy in a thread of its own that holds every byte back for a while.

Give a broker one more `Listener` whose ``advertised`` address is the proxy's, and let clients
begin at the proxy: all that they and the broker say to each other takes the longer way.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

_CHUNK = 65_536
_MAX_WAITING = 1000  # chunks on their way, per direction


class SlowLink:
    """Listens on the loopback and passes on to a target; a context manager."""

    def __init__(self, *, delay_s: float = 0.05) -> None:
        """Opens the door; ``target`` says later where it leads.

        Args:
            delay_s: How long each byte is on its way, in each direction.
        """
        self.delay_s = delay_s
        self.target: tuple[str, int] = ("127.0.0.1", 9)
        self.connections = 0
        self._loop = asyncio.new_event_loop()
        self._port = 0
        self._thread = threading.Thread(target=self._run, name="slow-link", daemon=True)
        self._ready = threading.Event()
        self._thread.start()
        self._ready.wait(10)
        self.port = self._port

    @property
    def address(self) -> str:
        """host:port for clients."""
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        """Close the door and all connections; idempotent."""
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)

    def __enter__(self) -> SlowLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(_cancel_others())
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(*self.target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction: whatever comes goes on, in order, each piece after the delay."""
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_WAITING)
        now: Callable[[], float] = self._loop.time

        async def take() -> None:
            while data := await reader.read(_CHUNK):
                await waiting.put((now() + self.delay_s, data))
            await waiting.put((0.0, b""))

        taker = asyncio.create_task(take())
        with contextlib.suppress(OSError):
            while True:
                due_s, data = await waiting.get()
                if not data:
                    break
                await asyncio.sleep(max(0.0, due_s - now()))
                writer.write(data)
                await writer.drain()
        taker.cancel()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await taker
        writer.close()


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
