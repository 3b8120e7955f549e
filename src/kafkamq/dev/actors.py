"""The processes of the demo and of ``compare``: workers that do what messages say, and a tracker.

A message says how long its handler works and how often it fails: in its payload (``compare``), or
in a header (the demo, whose payloads are the user's). What a worker did stands in its history.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException

from kafkamq.config import Backoff, ServiceConfig, TrackerConfig
from kafkamq.dev.children import Orders, serve, tell
from kafkamq.dev.compare.plan import decode
from kafkamq.dev.demo.plan import KIND_HEADER, Kind, kind_of
from kafkamq.dev.history import Recorder
from kafkamq.errors import DeadlineExceededError
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.queue.message import Message
from kafkamq.queue.service import Service
from kafkamq.runtime.worker import Worker
from kafkamq.transport.clients import open_consumer
from kafkamq.transport.errors import broker_error
from kafkamq.types import Nack

WORK_S = 0.001
LIVE_TIMEOUT_S = 300.0
_POLL_S = 0.1
_GROUP_BATCH = 500


class PoisonError(ValueError):
    """What the handler of a poison message raises."""


class Handler:
    """The handler of every contender of ``compare``: it says that it begins, sleeps, and ends."""

    def __init__(self, recorder: Recorder) -> None:
        self._record = recorder.record_call

    def handle(self, payload: bytes | None, attempt: int) -> bool:
        """Return whether the message is done; False: it is to be given back."""
        number, us, fails = decode(payload or b"")
        self._record("begin", number, attempt)
        if us:
            time.sleep(us / 1e6)
        is_done = attempt > fails
        self._record("end" if is_done else "fail", number, attempt)
        return is_done


Runner = Callable[[Mapping[str, Any], Recorder, threading.Event], None]


def run_work(first: Mapping[str, Any], recorder: Recorder, stopping: threading.Event) -> None:
    """Run one of our backends at the work of ``compare``, as a user would."""
    handler = Handler(recorder)

    def handle(message: Message) -> Nack | None:
        is_done = handler.handle(message.payload, message.delivery_count)
        return None if is_done else Nack(delay=0.0)

    _run_worker(first, handle, stopping)


def run_demo_worker(
    first: Mapping[str, Any], recorder: Recorder, stopping: threading.Event
) -> None:
    """A worker of the demo: poison raises, a slow message takes longer than its lease."""

    def handle(message: Message) -> None:
        kind = kind_of(message.headers.get(KIND_HEADER))
        call = message.id, message.delivery_count
        recorder.record_call("begin", *call)
        if kind is Kind.POISON:
            recorder.record_call("fail", *call)
            raise PoisonError("the demo's handler cannot digest this message")
        time.sleep(first["slow_s"] if kind is Kind.SLOW else WORK_S)
        recorder.record_call("end", *call)

    _run_worker(first, handle, stopping)


def _run_worker(
    first: Mapping[str, Any], handle: Callable[[Message], object], stopping: threading.Event
) -> None:
    with Service(first["bootstrap_servers"], first["namespace"], kafka=first["kafka"]) as service:
        settings = dict(first["settings"])
        if "backoff" in settings:
            settings["backoff"] = Backoff(**settings["backoff"])
        for queue_id in first["queues"]:
            one = service.queue(queue_id, backend=first["contender"], **settings)
            one.handler(concurrency=first["concurrency"], ordering=first["ordering"])(handle)
        with Worker(service, telemetry=False) as worker:
            tell("ready")
            while not stopping.is_set():
                worker.wait(_POLL_S)


def run_group(first: Mapping[str, Any], recorder: Recorder, stopping: threading.Event) -> None:
    """A plain consumer group: as many consumers as partitions in all, record by record."""
    threads = [
        threading.Thread(target=_consume, args=(first, Handler(recorder), stopping), daemon=True)
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
                # It cannot be given back: it is tried again here.
                attempt = 1
                while not handler.handle(record.value(), attempt):
                    attempt += 1
            with suppress(KafkaException):
                # The group has moved on: what is not kept comes again.
                consumer.commit()


_RUNNERS: dict[str, Runner] = {"work": run_work, "group": run_group, "demo": run_demo_worker}


def serve_worker(orders: Orders, runners: Mapping[str, Runner] = _RUNNERS) -> None:
    """Work as the first line tells, until the next one comes."""
    stopping = threading.Event()
    orders.follow(lambda _: stopping.set())
    first = orders.first
    runners[first["runner"]](first, Recorder(first["histories"], first["name"]), stopping)
    tell("stopped")


# The tracker.


def serve_tracker(orders: Orders) -> None:
    """Tracks what the first line names, or a later one, until the next one comes.

    Spark starts at once, beside the broker, before there is anything to track.
    """
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    orders.follow(inbox.put)
    first = orders.first
    with ThreadPoolExecutor(1) as pool:
        session = None
        if first.get("engine") == "spark":
            from kafkamq.dev.demo.judge import demo_session

            folder, messages = Path(first["folder"]), first["messages"]
            session = pool.submit(demo_session, "tracker", folder, messages=messages)
        where = first if "namespace" in first else inbox.get()
        config = ServiceConfig(
            bootstrap_servers=where["bootstrap_servers"],
            namespace=where["namespace"],
            kafka=where["kafka"],
        )
        settings = TrackerConfig(**where.get("settings", {}))
        if session is None:
            tracking = _track_here(config, settings)
        else:
            checkpoint = (folder / "checkpoint").as_uri()
            partitions = where["marker_partitions"]
            tracking = _track_on_spark(config, settings, session.result(), checkpoint, partitions)
        with tracking:
            tell("ready")
            inbox.get()
    tell("stopped")


@contextmanager
def _track_here(config: ServiceConfig, settings: TrackerConfig) -> Iterator[None]:
    tracker = LocalTracker(config, settings)
    with tracker.in_thread():
        _wait_until(lambda: tracker.is_live)
        yield


@contextmanager
def _track_on_spark(
    config: ServiceConfig, settings: TrackerConfig, spark: Any, checkpoint: str, partitions: int
) -> Iterator[None]:
    from kafkamq.spark.tracker.tracker import SparkTracker

    with SparkTracker(config, settings, checkpoint=checkpoint, spark=spark) as tracker:
        _wait_until(lambda: sum(seen.is_live for seen in tracker.statuses().values()) == partitions)
        yield


def _wait_until(is_live: Callable[[], bool]) -> None:
    """Wait until each partition has read the TICK of its start: before that it only reads (R17)."""
    deadline = time.monotonic() + LIVE_TIMEOUT_S
    while not is_live():
        if time.monotonic() > deadline:
            raise DeadlineExceededError(f"the tracker was not live after {LIVE_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)


def _serve(orders: Orders) -> None:
    (serve_tracker if orders.first["role"] == "tracker" else serve_worker)(orders)


if __name__ == "__main__":
    serve(_serve)
