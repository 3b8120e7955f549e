"""What a release leaves in Kafka. ``leave_behind.py`` runs it with that release.

A message's payload says what becomes of it (``FATES`` in ``left.py``). The worker ends as one that
was killed does: nothing is closed, what it holds stays held.

    python earlier.py local|spark|maps|fresh-local|fresh-spark BOOTSTRAP_SERVERS CHECKPOINT
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kafkamq import ParallelConsumer, Service
from kafkamq.config import ServiceConfig
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.queue.dead_letters import Selection, read_dead_letters, redrive
from kafkamq.spark.tracker.tracker import SparkTracker

LEASE_S = 30.0  # renewed, until the worker ends
DELAY_S = 60.0
Entries = Callable[[], int]


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline_s, f"not within two minutes: {what}"
        time.sleep(0.05)


@contextmanager
def tracking(kind: str, config: ServiceConfig, checkpoint: str) -> Iterator[Entries]:
    """A tracker of that release; gives how many messages it has open."""
    if kind == "local":
        local = LocalTracker(config)
        with local.in_thread():
            yield lambda: sum(status.entries for status in local.statuses())
        return
    with SparkTracker(config, checkpoint=checkpoint, trigger_s=0.2) as spark:
        yield lambda: sum(status.entries for status in spark.statuses().values())


def opened(namespace: str, servers: str) -> Service:
    return Service(servers, namespace=namespace, kafka={"session.timeout.ms": "6000"})


def leave_fresh(kind: str, servers: str) -> None:
    """A message that no worker has seen: those before are dead, they would START it ahead."""
    with opened(kind, servers) as service:
        service.queue("orders").producer().send(b"fresh", id="fresh-0", headers={"n": b"0"}).result(
            30
        )


def leave_namespace(kind: str, servers: str, checkpoint: str) -> None:
    service = opened(kind, servers)
    config = service.config
    service.create_topics(partitions=2, marker_partitions=2)
    orders = service.queue("orders", redelivery_timeout=LEASE_S)
    once = service.queue("payments", redelivery_timeout=LEASE_S, exactly_once=True)
    producer = orders.producer()

    def send(queue: object, fate: str, count: int = 2, **options: object) -> None:
        for number in range(count):
            payload = fate.encode().ljust(70_000 if fate == "large" else 0)
            queue.producer().send(  # type: ignore[attr-defined]
                payload, id=f"{fate}-{number}", headers={"n": b"%d" % number}, **options
            ).result(30)

    held = []

    def work(consumer: object, count: int) -> None:
        for _ in range(count):
            message = consumer.receive(timeout=60)  # type: ignore[attr-defined]
            fate = message.payload.rstrip().decode()
            if fate == "acked" or message.delivery_count > 1:
                message.ack(wait=True)
            elif fate == "nacked":
                message.nack(delay=DELAY_S, reason="later")
            elif fate == "again":
                message.nack(delay=0, reason="at once")
            elif fate == "rejected":
                message.reject("no good")
            else:
                held.append(message)

    with tracking(kind, config, checkpoint) as entries:
        worker, other = orders.consumer(), once.consumer()
        send(orders, "rejected", 1, key="a key")
        work(worker, 1)
        wait_until(lambda: list(read_dead_letters(config)), "a dead letter")
        redrive(config, Selection())  # its id is "rejected-0"; rejected once more
        work(worker, 1)
        for fate in ("acked", "again", "nacked", "held", "large", "late-ack"):
            send(orders, fate)
        send(once, "acked")
        send(once, "held")
        work(worker, 12 + 2)  # those of "again" come twice
        work(other, 4)
        send(orders, "delayed", delay=DELAY_S)
        token = producer.send(b"cancelled", id="cancelled-0", delay=DELAY_S).result(30).schedule
        producer.cancel(token)
        # nacked, held, large, late-ack, delayed; of payments, held.
        wait_until(lambda: entries() == 12, "what is left open")
        time.sleep(2)  # the positions of an idle log
    for message in held:
        if message.payload == b"late-ack":
            message.ack(wait=True)


def leave_maps(servers: str) -> None:
    """Two groups that have done 1,000 records but four, each with a map of runs."""
    for group in ("runs", "runs-exact"):
        done: list[int] = []

        def handle(record: object, done: list[int] = done) -> None:
            if record.offset in {3, 500, 501, 900}:  # type: ignore[attr-defined]
                raise OSError("stuck")
            done.append(record.offset)  # type: ignore[attr-defined]

        with ParallelConsumer(
            "records", group_id=group, bootstrap_servers=servers, backoff=lambda record: 60.0
        ) as consumer:
            assert consumer.is_exact
            consumer.poll(handle)
            wait_until(lambda done=done: len(done) == 996, "records that are done")


if __name__ == "__main__":
    kind, servers, checkpoint = sys.argv[1:]
    if kind == "maps":
        leave_maps(servers)
    elif kind.startswith("fresh-"):
        leave_fresh(kind.removeprefix("fresh-"), servers)
    else:
        leave_namespace(kind, servers, checkpoint)
        os._exit(0)  # as if killed
