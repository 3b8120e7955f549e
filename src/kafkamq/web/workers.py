"""What workers say of their handlers, where the operator has named their metrics ports.

Each of these addresses, and no other, has a thread that asks it again and again; pages show what
was answered last. What answers is not trusted: it is read up to a limit of bytes and time, no
redirect is followed, and what has another form is no answer.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from http.client import HTTPConnection, HTTPSConnection
from time import monotonic
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta, Struct
from msgspec.json import Decoder

ASK_S = 2.0
PATIENCE_S = 2.0
MAX_ANSWER_BYTES = 1 << 18
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
    """A process answers with its pools of handlers."""

    pools: list[Pool] = []


class Workers:
    """Knows what each worker has answered last; its owner calls ``start`` and ``close``."""

    def __init__(self, urls: Iterable[str]) -> None:
        self._answers = {url: (Pools(), "it was not asked yet") for url in urls}
        # When those were asked that have not answered.
        self._asked_s: dict[str, float] = {}
        self._closing = threading.Event()

    def start(self) -> None:
        for url in self._answers:
            threading.Thread(
                target=self._ask, args=(url,), name=f"kafkamq-web-{url}", daemon=True
            ).start()

    def close(self) -> None:
        """Ask no more; what is asked ends by itself, or with the process."""
        self._closing.set()

    @property
    def answers(self) -> dict[str, tuple[Pools, str]]:
        """Return the pools of each address, or why there are none."""
        found, late_s = dict(self._answers), monotonic() - PATIENCE_S
        # A thread waits for a resolver as long as that likes.
        for url, asked_s in list(self._asked_s.items()):
            if asked_s < late_s:
                found[url] = _nothing()
        return found

    def slots(self) -> dict[str, tuple[int, int]]:
        found: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for answer, _ in self.answers.values():
            for pool in answer.pools:
                busy, slots = found[pool.queue]
                found[pool.queue] = busy + pool.busy, slots + pool.slots
        return found

    def _ask(self, url: str) -> None:
        decoder = Decoder(Pools)
        while not self._closing.is_set():
            self._asked_s[url] = monotonic()
            try:
                self._answers[url] = decoder.decode(_read(url)), ""
            except TimeoutError:
                self._answers[url] = _nothing()
            except (ValueError, RecursionError):
                self._answers[url] = Pools(), "what answers there is no worker"
            except OSError as error:
                self._answers[url] = Pools(), str(error)[:200]
            del self._asked_s[url]
            self._closing.wait(ASK_S)


def _nothing() -> tuple[Pools, str]:
    return Pools(), f"nothing within {PATIENCE_S:g} s"


def _read(url: str) -> bytearray:
    """Return the body of an answer that ends in time.

    The socket is read here, as ``HTTPResponse`` has a time-out for each read and none for all.
    """
    parts, said = urlsplit(url), bytearray()
    connect = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    with closing(connect(parts.netloc, timeout=PATIENCE_S)) as connection:
        connection.connect()
        end_s = monotonic() + PATIENCE_S
        address = f"{parts.path.rstrip('/')}/handlers"
        connection.sock.sendall(f"GET {address} HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n".encode())
        while len(said) <= MAX_ANSWER_BYTES:
            left_s = end_s - monotonic()
            if left_s <= 0:
                raise TimeoutError
            connection.sock.settimeout(left_s)
            part = connection.sock.recv(MAX_ANSWER_BYTES)
            if not part:
                return _body(said)
            said += part
    raise ValueError("it is too long")


def _body(said: bytearray) -> bytearray:
    head, _, body = said.partition(b"\r\n\r\n")
    if head[:7] != b"HTTP/1." or head[8:13] != b" 200 ":
        raise ValueError("it has refused")
    return body
