"""The bare share consumer of confluent-kafka at the work of ``benchmarks/compare.py``.

Two forms: ``bare-pool``, one consumer whose batch goes to a pool of threads, acknowledged when all
of it is done; ``bare-many``, one consumer for each handler at once, record by record.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from confluent_kafka import AcknowledgeType, KafkaException, Message, ShareConsumer

from kafkamq.config import ServiceConfig
from kafkamq.dev.actors import Handler, serve_worker
from kafkamq.dev.children import serve, tell
from kafkamq.dev.compare.stage import QUEUE
from kafkamq.dev.history import Recorder
from kafkamq.queue.names import group_of
from kafkamq.share.settings import configure_group
from kafkamq.transport.admin import Admin

POLL_S = 0.2
RUNS = 5  # of the broker; then a record is archived


def open_consumer(first: Mapping[str, Any]) -> ShareConsumer:
    """A member of the group, which is set up."""
    config = ServiceConfig(
        bootstrap_servers=first["bootstrap_servers"], namespace=first["namespace"]
    )
    group_id = group_of(config, QUEUE)
    with Admin(config) as admin:
        lock_ms = int(first["settings"]["redelivery_timeout"] * 1000)
        configure_group(admin, group_id, lock_ms=lock_ms, max_deliveries=RUNS - 1)
    return join(first, group_id)


def join(first: Mapping[str, Any], group_id: str) -> ShareConsumer:
    """A member."""
    settings = {
        "bootstrap.servers": first["bootstrap_servers"],
        "group.id": group_id,
        "share.acknowledgement.mode": "explicit",
    }
    consumer = ShareConsumer(settings)
    consumer.subscribe([first["topic"]])
    return consumer


def verdict(handler: Handler, record: Message) -> int:
    """Handle one."""
    is_done = handler.handle(record.value(), record.delivery_count() or 1)
    return AcknowledgeType.ACCEPT if is_done else AcknowledgeType.RELEASE


def settle(consumer: ShareConsumer, records: list[Message], verdicts: list[int]) -> None:
    """Acknowledge a batch; what was held too long is refused, and comes again."""
    for record, kind in zip(records, verdicts, strict=True):
        with suppress(KafkaException):
            consumer.acknowledge(record, kind)
    with suppress(KafkaException):
        consumer.commit_sync(10.0)


def run_pool(first: Mapping[str, Any], recorder: Recorder, stopping: threading.Event) -> None:
    """One consumer, and a pool."""
    handler = Handler(recorder)
    consumer = open_consumer(first)
    with ThreadPoolExecutor(first["concurrency"]) as pool:
        tell("ready")
        while not stopping.is_set():
            records = [each for each in consumer.poll(POLL_S) if each.error() is None]
            if records:
                verdicts = list(pool.map(lambda record: verdict(handler, record), records))
                settle(consumer, records, verdicts)
    consumer.close()


def run_many(first: Mapping[str, Any], recorder: Recorder, stopping: threading.Event) -> None:
    """As many consumers as handlers."""
    handler = Handler(recorder)
    lead = open_consumer(first)
    config = ServiceConfig(
        bootstrap_servers=first["bootstrap_servers"], namespace=first["namespace"]
    )
    group_id = group_of(config, QUEUE)
    more = [join(first, group_id) for _ in range(first["concurrency"] - 1)]
    threads = [
        threading.Thread(target=_one_by_one, args=(each, handler, stopping), daemon=True)
        for each in (lead, *more)
    ]
    for thread in threads:
        thread.start()
    tell("ready")
    for thread in threads:
        thread.join()


def _one_by_one(consumer: ShareConsumer, handler: Handler, stopping: threading.Event) -> None:
    while not stopping.is_set():
        records = [each for each in consumer.poll(POLL_S) if each.error() is None]
        if records:
            settle(consumer, records, [verdict(handler, record) for record in records])
    consumer.close()


if __name__ == "__main__":
    runners = {"bare-pool": run_pool, "bare-many": run_many}
    serve(lambda orders: serve_worker(orders, runners))
