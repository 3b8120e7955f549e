"""Handlers that hang, on a broker: the process is not live until one of them ends."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError

import pytest
from tests.integration.parallel_tools import fill, make, make_topic
from tests.waiting import wait_until, within

from kafkamq import ParallelRecord, Service, Worker, aio
from kafkamq.metrics import serve_metrics


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()


def ask(port: int, path: str, name: str) -> tuple[int, dict[str, Any]]:
    """The status, and what is said of one loop."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=within(10)) as answer:
            status, text = answer.status, answer.read()
    except HTTPError as error:
        status, text = error.code, error.read()
    (found,) = [loop for loop in json.loads(text)["loops"] if loop["name"] == name]
    return status, found


@pytest.mark.parametrize("batch_size", [0, 4])
def test_a_parallel_consumer_whose_handlers_hang(
    bootstrap: str, namespace: str, gate: threading.Event, batch_size: int
) -> None:
    topic = make_topic(bootstrap, namespace)
    name = f"handlers of parallel consumer {namespace}"
    fill(bootstrap, topic, [f"k{number}" for number in range(16)])
    options = {"concurrency": 2, "batch_size": batch_size, "hung_after": 0.2}
    with (
        serve_metrics(0, host="127.0.0.1") as server,
        make(bootstrap, topic, namespace, **options) as consumer,
    ):
        consumer.poll(lambda record: gate.wait(within(60)) and None)
        wait_until(lambda: not consumer.health().is_alive, what="the hang")
        now = consumer.health()
        assert not now.is_ready
        assert now.hung_s > 0.2
        assert now.oldest.startswith(f"{topic}-0@")
        assert now.oldest_s is not None
        assert now.oldest_s >= now.hung_s
        status, loop = ask(server.port, "/live", name)
        assert status == 503
        said = rf"2 of 2 handlers at work, the oldest for \d+ s at {topic}-0@"
        assert re.match(said, loop["detail"])
        assert ask(server.port, "/ready", name)[0] == 503
        gate.set()
        wait_until(lambda: not consumer.health().waiting + consumer.health().in_flight, what="all")
        wait_until(lambda: consumer.health().is_alive)
        now = consumer.health()
        assert (now.hung_s, now.oldest_s, now.oldest) == (0, None, "")
        assert ask(server.port, "/live", name)[0] == 200
    assert consumer.health().hung_s == 0


def test_a_loop_of_the_users_that_is_blocked(
    bootstrap: str, namespace: str, gate: threading.Event
) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, ["a"])
    consumer = aio.ParallelConsumer(
        topic, group_id=namespace, bootstrap_servers=bootstrap, hung_after=1.0
    )

    async def handle(record: ParallelRecord) -> None:
        gate.wait(within(60))

    async def main() -> None:
        async with consumer:
            await consumer.poll(handle)
            while not gate.is_set():
                await asyncio.sleep(0.05)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        wait_until(lambda: consumer.health().hung_s > 1, what="the hang")
        assert not consumer.health().is_alive
        assert consumer.health().oldest == f"{topic}-0@0"
    finally:
        gate.set()
        thread.join(within(60))
    assert consumer.health().state == "closed"


def test_a_worker_whose_handlers_hang(
    bootstrap: str, namespace: str, gate: threading.Event
) -> None:
    service = Service(bootstrap_servers=bootstrap, namespace=namespace)
    service.create_topics(partitions=1)
    queue = service.queue("orders", redelivery_timeout=60.0)

    @queue.handler(concurrency=2)
    def handle(body: bytes) -> None:
        gate.wait(within(60))

    with (
        service,
        serve_metrics(0, host="127.0.0.1") as server,
        Worker(service, hung_after=0.2) as worker,
    ):
        with queue.producer() as producer:
            for _ in range(3):
                producer.send(b"x")
        wait_until(lambda: ask(server.port, "/live", "handlers of orders")[0] == 503, what="a hang")
        _, loop = ask(server.port, "/ready", "handlers of orders")
        assert not loop["is_live"]
        said = rf"2 of 2 handlers at work, the oldest for \d+ s at {namespace}.messages-0@0"
        assert re.fullmatch(said, loop["detail"])
        gate.set()
        wait_until(lambda: worker.handled == 3, what="all")
        assert ask(server.port, "/live", "handlers of orders")[0] == 200
