"""A worker process of a comparison: one contender's handlers, and what they did in a file."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from kafkamq.dev.children import Orders, serve, tell
from kafkamq.dev.compare.facts import Kind
from kafkamq.dev.compare.history import HistoryWriter
from kafkamq.dev.compare.plan import Contender, decode
from kafkamq.queue.message import Message
from kafkamq.queue.service import Service
from kafkamq.runtime.worker import Worker
from kafkamq.transport.clients import open_consumer
from kafkamq.transport.errors import broker_error
from kafkamq.types import Nack

QUEUE = "work"
_POLL_S = 0.1
_GROUP_BATCH = 500


class Handler:
    """The handler of every contender: says that it began, sleeps, says what came of it."""

    def __init__(self, history: HistoryWriter) -> None:
        self._write = history.write

    def handle(self, payload: bytes | None, attempt: int) -> bool:
        """Whether the message is done; False: it is to be given back."""
        number, us, fails = decode(payload or b"")
        write, clock = self._write, time.monotonic_ns
        write(Kind.BEGIN, number, attempt, clock())
        if us:
            time.sleep(us / 1e6)
        is_done = attempt > fails
        write(Kind.END if is_done else Kind.FAIL, number, attempt, clock())
        return is_done


Runner = Callable[[Mapping[str, Any], Handler, threading.Event], None]


def run_queue(first: Mapping[str, Any], handler: Handler, stopping: threading.Event) -> None:
    """One of our backends, as a user would run it."""
    with Service(first["bootstrap_servers"], first["namespace"], kafka=first["kafka"]) as service:
        queue = service.queue(
            QUEUE, backend=first["contender"], redelivery_timeout=first["lease_s"]
        )

        @queue.handler(concurrency=first["concurrency"], ordering=first["ordering"])
        def handle(message: Message) -> Nack | None:
            is_done = handler.handle(message.payload, message.delivery_count)
            return None if is_done else Nack(delay=0.0)

        with Worker(service, telemetry=False) as worker:
            tell("ready")
            while not stopping.is_set():
                worker.wait(_POLL_S)


def run_group(first: Mapping[str, Any], handler: Handler, stopping: threading.Event) -> None:
    """A plain consumer group: as many consumers as partitions in all, record by record."""
    threads = [
        threading.Thread(target=_consume, args=(first, handler, stopping), daemon=True)
        for _ in range(max(1, -(-first["partitions"] // first["processes"])))
    ]
    for thread in threads:
        thread.start()
    tell("ready")
    for thread in threads:
        thread.join()


def _consume(first: Mapping[str, Any], handler: Handler, stopping: threading.Event) -> None:
    settings = {
        "bootstrap.servers": first["bootstrap_servers"],
        "group.id": f"{first['namespace']}.group",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "fetch.queue.backoff.ms": 3,
        **first["kafka"],
    }
    with closing(open_consumer(settings)) as consumer:
        consumer.subscribe([first["topic"]])
        while not stopping.is_set():
            first_record = consumer.poll(_POLL_S)
            if first_record is None:
                continue
            for record in [first_record, *consumer.consume(_GROUP_BATCH, 0)]:
                error = record.error()
                if error is not None:
                    raise broker_error(error, "reading as a consumer group")
                attempt = 1  # it cannot be given back: it is tried again here
                while not handler.handle(record.value(), attempt):
                    attempt += 1
            consumer.commit()


_RUNNERS: dict[str, Runner] = {
    **{each.value: run_queue for each in Contender},
    Contender.GROUP.value: run_group,
}


def serve_contender(orders: Orders, runners: Mapping[str, Runner] = _RUNNERS) -> None:
    """Work as told by the first line, until the next one comes."""
    stopping = threading.Event()
    orders.follow(lambda _: stopping.set())
    first = orders.first
    handler = Handler(HistoryWriter(Path(first["history"])))
    runners[first["contender"]](first, handler, stopping)
    tell("stopped")


def main() -> None:
    """Runs until told to stop, or until its parent is gone."""
    serve(serve_contender)


if __name__ == "__main__":
    main()
