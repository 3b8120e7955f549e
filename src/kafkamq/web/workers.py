"""What workers say of their handlers, where the operator has named their metrics ports.

A loop of its own asks each of these addresses, and no other, again and again; pages show what was
answered last. What answers is not trusted: it is read up to a limit of bytes and time, no redirect
is followed, and what has another form is no answer.
"""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

from msgspec import Meta, Struct
from msgspec.json import Decoder

from kafkamq.runtime.loop_executor import LoopThread
from kafkamq.web.options import MAX_WORKERS

ASK_S = 2.0
PATIENCE_S = 2.0
MAX_ANSWER_BYTES = 1 << 18
_STOP_S = 5.0
_Found = list[tuple[Any, ...]]
_Text = Annotated[str, Meta(max_length=1024)]
_Number = Annotated[int, Meta(ge=0, le=1 << 53)]


class Call(Struct, frozen=True):
    """A handler is at a message, or at the list that begins with it."""

    topic: _Text
    partition: _Number
    offset: _Number
    for_ms: _Number
    runs_in: _Text
    stack: list[_Text]


class Pool(Struct, frozen=True):
    """A queue's handlers in one process, and what the oldest calls of them are at."""

    queue: _Text
    handler: _Text
    consumer: _Text
    slots: _Number
    busy: _Number
    calls: list[Call]


class Pools(Struct, frozen=True):
    """It is what a process answers."""

    pools: list[Pool] = []


class Workers:
    """It knows what each worker has answered last; ``start`` and ``close`` are its owner's."""

    def __init__(self, urls: Iterable[str]) -> None:
        self.answers: dict[str, tuple[Pools, str]] = {
            url: (Pools(), "it was not asked yet") for url in urls
        }
        """By address: its pools, or why there are none."""
        self._decoder = Decoder(Pools)
        self._loop = LoopThread()
        # One thread for each, as a name that is dead holds one for as long as the resolver likes.
        self._names = ThreadPoolExecutor(MAX_WORKERS, "kafkamq-web-names")
        self._stopping = asyncio.Event()
        self._asking: Future[None] | None = None

    def start(self) -> None:
        if self.answers:
            self._asking = asyncio.run_coroutine_threadsafe(self._ask_all(), self._loop.loop())

    def close(self) -> None:
        if self._asking is not None:
            self._loop.loop().call_soon_threadsafe(self._stopping.set)
            self._asking.result(_STOP_S)
            self._loop.stop()
        self._names.shutdown(wait=False)

    def slots(self) -> dict[str, tuple[int, int]]:
        found: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for answer, _ in list(self.answers.values()):
            for pool in answer.pools:
                busy, slots = found[pool.queue]
                found[pool.queue] = busy + pool.busy, slots + pool.slots
        return found

    async def _ask_all(self) -> None:
        asking = [asyncio.ensure_future(self._ask(url)) for url in self.answers]
        await self._stopping.wait()
        for each in asking:
            each.cancel()
        await asyncio.wait(asking)

    async def _ask(self, url: str) -> None:
        parts, run = urlsplit(url), asyncio.get_running_loop().run_in_executor
        port = parts.port or (443 if parts.scheme == "https" else 80)
        lookup: asyncio.Future[_Found] | None = None
        while True:
            pools, error_text = Pools(), ""
            lookup = lookup or run(self._names, _find, parts.hostname, port)
            try:
                said = await asyncio.wait_for(_read(parts, lookup), PATIENCE_S)
                pools = self._decoder.decode(said)
            except asyncio.TimeoutError:
                error_text = f"nothing within {PATIENCE_S:g} s"
            except (ValueError, RecursionError):
                error_text = "what answers there is no worker"
            except OSError as error:
                error_text = str(error)[:200]
            self.answers[url] = pools, error_text
            if lookup.done():
                lookup = None
            await asyncio.sleep(ASK_S)


def _find(name: str | None, port: int) -> _Found:
    return socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)


async def _connected(
    parts: SplitResult, found: _Found
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    name = parts.hostname if parts.scheme == "https" else None
    connect = partial(asyncio.open_connection, ssl=True if name else None, server_hostname=name)
    addresses = [address[:2] for *_, address in found]
    for host, port in addresses[:-1]:
        with suppress(OSError):
            return await connect(host, port)
    return await connect(*addresses[-1])


async def _read(parts: SplitResult, lookup: asyncio.Future[_Found]) -> bytes:
    reader, writer = await _connected(parts, await asyncio.shield(lookup))
    try:
        address = f"{parts.path.rstrip('/')}/handlers"
        writer.write(f"GET {address} HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n".encode())
        await reader.readexactly(MAX_ANSWER_BYTES + 1)
    except asyncio.IncompleteReadError as error:
        head, _, body = error.partial.partition(b"\r\n\r\n")
    else:
        raise ValueError("it is too long")
    finally:
        writer.close()
    if head[:7] != b"HTTP/1." or head[8:13] != b" 200 ":
        raise ValueError("it has refused")
    return body
