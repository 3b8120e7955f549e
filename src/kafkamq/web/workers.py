"""What workers say of their handlers, where the operator has named their metrics ports.

A loop of its own asks each of these addresses, and no other, again and again; pages show what was
answered last. What answers is not trusted: it is read up to a limit of bytes and time, no redirect
is followed, and what has another form is no answer.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta, Struct
from msgspec.json import Decoder

from kafkamq.runtime.loop_executor import LoopThread

ASK_S = 2.0
PATIENCE_S = 2.0
MAX_ANSWER_BYTES = 1 << 18
_STOP_S = 5.0
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
        while True:
            pools, error_text = Pools(), ""
            try:
                said = await asyncio.wait_for(_read(url), PATIENCE_S)
                pools = self._decoder.decode(said)
            except asyncio.TimeoutError:
                error_text = f"nothing within {PATIENCE_S:g} s"
            except (ValueError, RecursionError):
                error_text = "what answers there is no worker"
            except OSError as error:
                error_text = str(error)[:200]
            self.answers[url] = pools, error_text
            await asyncio.sleep(ASK_S)


async def _read(url: str) -> bytes:
    parts = urlsplit(url)
    is_secret = parts.scheme == "https"
    port = parts.port or (443 if is_secret else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=is_secret or None)
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
