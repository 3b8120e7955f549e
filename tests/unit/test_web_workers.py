"""The pages ask the workers that their operator names, and outlive what answers there."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from tests.waiting import wait_until, within

from kafkamq.errors import ConfigError
from kafkamq.metrics import serve_metrics
from kafkamq.metrics.health import Handlers, health
from kafkamq.runtime.rules.hanging import Call, Slots
from kafkamq.web import workers
from kafkamq.web.options import MAX_WORKERS, WebOptions
from kafkamq.web.workers import MAX_ANSWER_BYTES, Workers

CALL = {"topic": "t", "partition": 0, "offset": 0, "for_ms": 0, "runs_in": "", "stack": ["x"]}
POOL = {"queue": "q", "handler": "h", "consumer": "c", "slots": 2, "busy": 1, "calls": [CALL]}


def answer(body: object, status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.0 {status}\r\n{more}\r\n".encode() + json.dumps(body).encode()


@contextmanager
def answering(*parts: bytes, ends: bool = True, came: list[object] | None = None) -> Iterator[str]:
    """Whoever comes gets these; then the end, or the last of them for ever."""
    listening = socket.create_server(("127.0.0.1", 0))
    done = threading.Event()

    def serve() -> None:
        while True:
            try:
                peer, _ = listening.accept()
            except OSError:
                return
            if came is not None:
                came.append(peer)
            with peer, suppress(OSError):
                for part in parts:
                    peer.sendall(part)
                while not ends and not done.wait(0.01):
                    peer.sendall(parts[-1])
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(4096):
                    pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        done.set()
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(within(30))


@contextmanager
def asking(*urls: str) -> Iterator[Workers]:
    made = Workers(urls)
    made.start()
    try:
        yield made
    finally:
        made.close()


def said_of(asked: Workers, url: str) -> str:
    return asked.answers[url][1]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "ASK_S", 0.02)


def test_a_worker_says_how_many_handlers_are_at_work() -> None:
    busy = [Call(0.0, ("topic", 3, 7))]
    pools = [
        Handlers("a", 60.0, lambda: Slots(4, busy), queue="q", handler="h", consumer=lambda: "c"),
        Handlers("b", 60.0, lambda: Slots(2, ()), queue="q"),
        Handlers("c", 60.0, lambda: Slots(0, ()), queue="other"),
    ]
    for pool in pools:
        health.watch(pool)
    try:
        with serve_metrics(0, host="127.0.0.1") as server:
            urls = [f"http://127.0.0.1:{server.port}", f"http://localhost:{server.port}/"]
            with asking(*urls) as asked:
                wait_until(lambda: not any(said_of(asked, url) for url in urls))
                assert asked.slots() == {"q": (2, 12), "other": (0, 0)}, "of both together"
                ((first, *_), _) = (each.pools for each, _ in asked.answers.values())
                assert (first.handler, first.consumer, first.calls[0].offset) == ("h", "c", 7)
                busy.clear()
                wait_until(lambda: asked.slots()["q"] == (0, 12), "it is asked again")
        with asking(urls[0]) as asked:
            wait_until(lambda: "connect" in said_of(asked, urls[0]).lower(), "it is gone")
            assert asked.slots() == {}, "nothing is known"
    finally:
        for pool in pools:
            health.remove(pool)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\xff\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 100_000,
        b'HTTP/1.0 200 OK\r\n\r\n{"pools": [{"queue": "\\ud800"}]}',
        answer({"pools": [POOL]}, "404 Not Found"),
        answer([]),
        answer({"pools": [{**POOL, "queue": "x" * 5000}]}),
        answer({"pools": [{**POOL, "slots": -1}]}),
        answer({"pools": [{**POOL, "busy": 1 << 60}]}),
        answer({"pools": [{**POOL, "busy": "1"}]}),
        answer({"pools": [{**POOL, "calls": [{**CALL, "stack": "x"}]}]}),
        answer({"pools": [POOL] * MAX_ANSWER_BYTES}),
        answer({"pools": [POOL]}) + b" " * MAX_ANSWER_BYTES,
    ],
)
def test_what_is_no_workers_answer_is_none(said: bytes) -> None:
    with answering(said) as url, asking(url) as asked:
        wait_until(lambda: "not asked" not in said_of(asked, url))
        assert said_of(asked, url) == "what answers there is no worker"
        assert asked.slots() == {}


@pytest.mark.parametrize("parts", [(b"HTTP/1.0 200 OK\r\n\r\n", b" "), (b"H",)])
def test_one_that_never_ends_is_left_and_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch, parts: tuple[bytes, ...]
) -> None:
    monkeypatch.setattr(workers, "PATIENCE_S", 0.3)
    came: list[object] = []
    with (
        answering(*parts, ends=False, came=came) as endless,
        answering(answer({"pools": [POOL]})) as fine,
        asking(endless, fine) as asked,
    ):
        wait_until(lambda: "nothing within" in said_of(asked, endless))
        wait_until(lambda: asked.slots() == {"q": (1, 2)})
        wait_until(lambda: len(came) > 1, "it is asked again")


def test_names_that_nobody_resolves_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    find, leave = socket.getaddrinfo, threading.Event()

    def slow(host: Any, *more: Any, **options: Any) -> Any:
        if str(host).startswith("dead"):
            leave.wait(within(60))
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return find(host, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr(workers, "PATIENCE_S", 0.3)
    dead = [f"http://dead{number}:9400" for number in range(MAX_WORKERS - 1)]
    with answering(answer({"pools": [POOL]})) as fine:
        fine = fine.replace("127.0.0.1", "localhost")
        try:
            with asking(*dead, fine) as asked:
                wait_until(lambda: all("nothing within" in said_of(asked, url) for url in dead))
                wait_until(lambda: asked.slots() == {"q": (1, 2)})
                leave.set()
                wait_until(lambda: all("resolution" in said_of(asked, url) for url in dead))
        finally:
            leave.set()


def test_it_ends_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while answers come."""
    monkeypatch.setattr(workers, "ASK_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        urls = [f"http://127.0.0.1:{gone.getsockname()[1]}/{number}" for number in range(20)]
    for _ in range(10):
        with asking(*urls) as asked:
            wait_until(lambda: "not asked" not in said_of(asked, urls[-1]))


def test_nobody_is_asked_whom_the_operator_has_not_named() -> None:
    """A redirect leads nowhere."""
    with answering(answer({"pools": [POOL]})) as other:
        moved = answer({}, "302 Found", f"Location: {other}/handlers\r\n")
        with answering(moved) as url, asking(url) as asked:
            wait_until(lambda: said_of(asked, url) == "what answers there is no worker")
            assert asked.slots() == {}


@pytest.mark.parametrize(
    "url",
    ["", "host:9400", "ftp://h", "file:///etc/passwd", "http://", "http://a b", "http://u:p@h",
     "http://h:99999", "http://h/x?y", "http://h\r\nX: y", "http://h:9400\n"],
)  # fmt: skip
def test_what_is_no_address_of_a_worker_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="worker is"):
        WebOptions(workers=(url,))


def test_workers_are_bounded() -> None:
    urls: Any = tuple(f"http://[::1]:{port}" for port in range(1, MAX_WORKERS + 1))
    assert WebOptions(workers=urls).workers == urls
    with pytest.raises(ConfigError, match="at most"):
        WebOptions(workers=(*urls, "https://h"))
