"""A worker process of the demo: one consumer per queue, a thread each.

A normal message is done at once. The handler of poison raises. A slow message is worked on longer
than its redelivery timeout, while the worker goes on with others; only KEEPALIVEs keep it here.
What happened is written as JSON lines, one write each, so that a SIGKILL loses none.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from kafkamq.config import Backoff
from kafkamq.dev.children import Orders, tell
from kafkamq.dev.demo.plan import KIND_HEADER, Kind, kind_of
from kafkamq.errors import LeaseLostError
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.message import Message
from kafkamq.queue.service import Queue, Service

_log = logging.getLogger(__name__)
BATCH = 50
POLL_S = 0.2
WORK_S = 0.001  # what a normal message takes


class PoisonError(ValueError):
    """What the handler of a poison message raises."""


class History:
    """What this worker did, as JSON lines; thread-safe."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, event: str, message: Message) -> None:
        """One line in one write: what was written survives a SIGKILL."""
        line = {
            "event": event,
            "queue": message.queue_id,
            "id": message.id,
            "delivery": message.delivery_count,
            "at_ms": time.time_ns() // 1_000_000,
        }
        os.write(self._file, json.dumps(line).encode() + b"\n")


def work(consumer: Consumer, history: History, *, slow_s: float, stopping: threading.Event) -> None:
    """Receives, handles and settles until told to stop; what is under way is finished first."""
    under_way: deque[tuple[float, Message]] = deque()
    while under_way or not stopping.is_set():
        if not stopping.is_set():
            messages = consumer.receive_many(BATCH, POLL_S)
            for message in messages:
                history.write("received", message)
            for message in messages:
                if kind_of(message.headers.get(KIND_HEADER)) is Kind.SLOW:
                    under_way.append((time.monotonic() + slow_s, message))
                else:
                    _handle(message, history)
        else:
            time.sleep(POLL_S)
        while under_way and under_way[0][0] <= time.monotonic():
            _finish(under_way.popleft()[1], history)
    consumer.flush()


def _handle(message: Message, history: History) -> None:
    """Handles one message the way a user would: leaving the block is the verdict."""
    try:
        with message:
            if kind_of(message.headers.get(KIND_HEADER)) is Kind.POISON:
                raise PoisonError("the demo's handler cannot digest this message")
            time.sleep(WORK_S)
            history.write("done", message)
    except PoisonError:
        history.write("failed", message)
    except LeaseLostError:
        history.write("late", message)


def _finish(message: Message, history: History) -> None:
    try:
        history.write("done", message)
        message.ack()
    except LeaseLostError:
        history.write("late", message)


def _run_queue(
    queue: Queue, history: History, orders: dict[str, Any], stopping: threading.Event
) -> None:
    try:
        with queue.consumer(on_lease_lost=lambda lost: history.write("late", lost)) as consumer:
            work(consumer, history, slow_s=orders["slow_s"], stopping=stopping)
    except LeaseLostError:
        pass  # flush names what on_lease_lost has written down
    except BaseException as error:  # noqa: BLE001  ends the process
        _log.exception("the worker of queue %s failed", queue.queue_id)
        tell("error", text=f"{type(error).__name__}: {error}")
        os._exit(1)  # the whole process: the demo must not go on with two thirds of a worker


def main() -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    orders = Orders()
    first = orders.first
    stopping = threading.Event()
    orders.follow(lambda _: stopping.set())
    history = History(Path(first["history"]))
    with Service(first["bootstrap_servers"], first["namespace"], kafka=first["kafka"]) as service:
        threads = []
        for queue_id in first["queues"]:
            queue = service.queue(
                queue_id,
                redelivery_timeout=first["redelivery_timeout"],
                max_deliveries=first["max_deliveries"],
                backoff=Backoff(**first["backoff"]),
            )
            thread = threading.Thread(
                target=_run_queue, args=(queue, history, first, stopping), name=queue_id
            )
            thread.start()
            threads.append(thread)
        tell("ready")
        for thread in threads:
            thread.join()
    tell("stopped")


if __name__ == "__main__":
    main()
