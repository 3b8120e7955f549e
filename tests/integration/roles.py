"""The roles of docs/operations.md: what each does, and the rights that it needs for that.

``NS`` stands for the namespace, ``TOPIC`` for a queue's own topic. An action does all that its role
ever does, so that a right which is missing shows; it raises when the broker refuses something.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from tests.integration.claim_roles import CLAIM_ACTIONS, CLAIM_ROLES
from tests.integration.cli_tools import Commands
from tests.integration.queue_logs import delete_group, receive_all
from tests.integration.secured import Right
from tests.integration.tracker_logs import Logs, read_topic
from tests.integration.web_client import WebClient
from tests.waiting import deadline_after, wait_until, within

from kafkamq import Service
from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.queue.names import group_of
from kafkamq.types import MarkerType, Outcome
from kafkamq.web.app import serving
from kafkamq.web.index.follower import IndexOptions
from kafkamq.web.options import WebOptions

__all__ = ["ACTIONS", "ROLES", "Action", "make_topic", "rights_of"]

Action = Callable[[ServiceConfig, Logs], None]
WAIT_S = within(60.0)

_LOOK = (
    ("topic", "NS.*", "DESCRIBE"),
    ("topic", "NS.*", "DESCRIBE_CONFIGS"),
    ("group", "kafka-mq-*", "DESCRIBE"),
)
_TRACK = (
    *_LOOK,
    ("topic", "NS.markers", "READ"),
    ("topic", "NS.markers", "WRITE"),
    ("topic", "NS.messages", "READ"),
    ("topic", "NS.messages", "WRITE"),
    ("topic", "NS.dead-letters", "WRITE"),
    ("topic", "NS.quarantine", "WRITE"),
    ("topic", "NS.tracker", "WRITE"),
    ("group", "kafkamq.NS.markers.*", "READ"),
    ("group", "kafkamq.reader", "DESCRIBE"),
    ("transactional-id", "kafkamq.NS.markers.*", "WRITE"),
)
_RECEIVE = (
    *_LOOK,
    ("topic", "NS.messages", "READ"),
    ("topic", "NS.markers", "WRITE"),
    ("group", "kafkamq/NS/QUEUE", "READ"),
)
_POSITIONS = (
    ("topic", "NS.markers", "READ"),
    ("topic", "NS.ledger", "READ"),
    ("topic", "NS.ledger", "WRITE"),
)
_WORK = (*_RECEIVE, *_POSITIONS)
_OF_TOPIC = (
    *_LOOK,
    ("topic", "TOPIC", "DESCRIBE_CONFIGS"),
    ("topic", "TOPIC", "READ"),
)
ROLES: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "producer": (
        *_LOOK,
        ("topic", "NS.messages", "WRITE"),
        ("topic", "NS.markers", "WRITE"),
        ("topic", "NS.markers", "READ"),
        ("group", "kafkamq.reader", "DESCRIBE"),
    ),
    "worker": _WORK,
    "exactly-once worker": (*_WORK, ("transactional-id", "kafkamq/NS/QUEUE/*", "WRITE")),
    "worker of a topic": (
        *_OF_TOPIC,
        ("topic", "NS.markers", "WRITE"),
        *_POSITIONS,
        ("group", "kafkamq/NS/QUEUE", "READ"),
    ),
    "local tracker": _TRACK,
    "tracker of a topic": (
        *_TRACK,
        ("topic", "TOPIC", "DESCRIBE_CONFIGS"),
        ("topic", "TOPIC", "READ"),
        ("topic", "TOPIC", "WRITE"),
    ),
    "Spark tracker": (*_TRACK, ("topic", "NS.tracker", "READ")),
    "Spark worker": (
        *_RECEIVE,
        ("topic", "NS.markers", "READ"),
        ("group", "kafkamq.reader", "DESCRIBE"),
        ("topic", "NS.out", "WRITE"),
        ("topic", "NS.ledger", "READ"),
        ("topic", "NS.ledger", "WRITE"),
        ("group", "kafkamq.NS.ledger.*", "READ"),
        ("transactional-id", "kafkamq.NS.ledger.*", "WRITE"),
    ),
    "operator": (
        *_LOOK[1:],  # Read implies Describe
        ("cluster", "kafka-cluster", "DESCRIBE_CONFIGS"),
        ("topic", "NS.*", "CREATE"),
        ("topic", "NS.*", "READ"),
        ("topic", "NS.messages", "WRITE"),
        ("topic", "NS.ledger", "WRITE"),
        ("group", "kafkamq/NS/*", "DESCRIBE"),
        ("group", "kafkamq.reader", "DESCRIBE"),
        ("transactional-id", "kafkamq.NS.*", "WRITE"),
    ),
    "web": (
        *_LOOK[1:],  # Read implies Describe
        ("cluster", "kafka-cluster", "DESCRIBE_CONFIGS"),
        ("topic", "NS.*", "READ"),
        ("group", "kafkamq.reader", "DESCRIBE"),
        ("topic", "NS.messages", "WRITE"),
        ("topic", "NS.markers", "WRITE"),
        ("topic", "NS.ledger", "WRITE"),
        ("topic", "NS.actions", "WRITE"),
        ("topic", "NS.actions", "CREATE"),
        ("group", "kafkamq.NS.actions", "READ"),
        ("transactional-id", "kafkamq.NS.*", "WRITE"),
    ),
    **CLAIM_ROLES,
}


def rights_of(role: str, namespace: str, queue_id: str = "a") -> list[Right]:
    """The rights of a role in one namespace."""
    names = {"TOPIC": f"{namespace}-topic", "QUEUE": queue_id, "NS": namespace}
    pattern = "|".join(names)
    return [
        Right(kind, re.sub(pattern, lambda found: names[found[0]], name), operation)
        for kind, name, operation in ROLES[role]
    ]


def produce(config: ServiceConfig, logs: Logs) -> None:
    """Send at once and later, and take back what was to come later."""
    with Service(config.bootstrap_servers, config.namespace, kafka=config.kafka) as service:
        producer = service.queue("a").producer()
        producer.send(b"now").result(WAIT_S)
        later = producer.send(b"later", delay=600).result(WAIT_S)
        assert later.schedule is not None
        producer.cancel(later.schedule)
        producer.flush(WAIT_S)


def work(config: ServiceConfig, logs: Logs, *, topic: str = "", **more: Any) -> None:
    """Receive, and give each verdict; then once more, when Kafka has dropped the group."""
    logs.send(3, key=b"a")
    with Service(config.bootstrap_servers, config.namespace, kafka=config.kafka) as service:
        queue = service.queue("a", topic=topic, **more)
        with queue.consumer() as consumer:
            acked, nacked, rejected = receive_all(consumer, 3, timeout_s=WAIT_S)
            acked.ack(wait=True)
            nacked.nack(delay=60, wait=True)
            rejected.reject("no", wait=True)
        delete_group(logs.bootstrap, group_of(config, "a"))
        (sent,) = logs.send(1, key=b"a")
        with queue.consumer() as consumer:
            (got,) = receive_all(consumer, 1, timeout_s=WAIT_S)
            # Without the right to read positions, what was acked comes first.
            assert (got.message_id.partition, got.message_id.offset) == (
                sent.partition,
                sent.offset,
            )
            got.ack(wait=True)


def make_topic(logs: Logs) -> str:
    """A topic of others with broker time, which ``logs.send`` writes to from now on."""
    topic = f"{logs.config.namespace}-topic"
    admin = AdminClient({"bootstrap.servers": logs.bootstrap})
    config = {"message.timestamp.type": "LogAppendTime"}
    admin.create_topics([NewTopic(topic, 1, 1, config=config)])[topic].result(within(15))
    logs.config = replace(logs.config, message_topic=topic)
    return topic


def work_on_topic(config: ServiceConfig, logs: Logs) -> None:
    work(config, logs, topic=make_topic(logs))


def track_topic(config: ServiceConfig, logs: Logs) -> None:
    """All that the local tracker does, and a copy in a queue's own topic."""
    track(config, logs)
    topic = make_topic(logs)
    logs.send(1, value=b"x" * 100_000)  # its START refers to it
    service = Service(logs.bootstrap, config.namespace)
    with service, service.queue("a", topic=topic).consumer() as consumer:
        receive_all(consumer, 1)[0].nack(wait=True)
        with LocalTracker(config).in_thread():
            (again,) = receive_all(consumer, 1, timeout_s=WAIT_S)
        assert again.delivery_count == 2
        again.ack(wait=True)


def load_tracker(logs: Logs) -> None:
    """What makes a tracker use all its rights: a copy, a dead letter, a payload, garbage."""
    copied, buried = logs.send(2, key=b"a")
    logs.start(copied, timeout_ms=100, key=b"a", by_reference=True, value=None)
    logs.start(buried, timeout_ms=100, key=b"a", count=9, max_deliveries=5)
    logs.raw_marker(0, b"no marker")


def is_settled(config: ServiceConfig, logs: Logs) -> bool:
    """Whether a tracker has done all of that, and says how it is."""
    topics = (config.quarantine_topic, config.tracker_topic)
    return (
        len(logs.copies()) == 1
        and len(logs.dead_letters()) == 1
        and all(read_topic(logs.bootstrap, topic) for topic in topics)
    )


def track(config: ServiceConfig, logs: Logs) -> None:
    """Run the local tracker until it has settled all."""
    load_tracker(logs)
    with LocalTracker(config, TrackerConfig(position_interval_ms=200)).in_thread() as tracker:
        wait_until(lambda: tracker.is_over or is_settled(config, logs), "all is settled")


def track_on_spark(config: ServiceConfig, logs: Logs) -> None:
    """The same on Spark."""
    from kafkamq.spark.tracker.tracker import SparkTracker

    load_tracker(logs)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = str(Path(folder) / "checkpoint")
        tracker = TrackerConfig(position_interval_ms=200)
        with SparkTracker(config, tracker, checkpoint=checkpoint, trigger_s=0.2) as running:
            deadline_s = deadline_after(60)
            while not is_settled(config, logs) and time.monotonic() < deadline_s:
                running.wait(0.2)
    assert is_settled(config, logs), "not all was settled"


def _break(frame: Any, number: int) -> None:
    frame.count()
    raise RuntimeError("broken on purpose")


def work_on_spark(config: ServiceConfig, logs: Logs) -> None:
    """Acknowledge in a stream of Spark: alone, and in one transaction with the output.

    The first batch fails, and is repeated: STARTs are read again.
    """
    from pyspark.errors import PySparkException

    from kafkamq.spark import ack, read_queue
    from kafkamq.spark.session import build_session

    def run(rows: Any, checkpoint: str, **more: Any) -> None:
        query = ack(rows, config, checkpoint=checkpoint, available_now=True, **more)
        try:
            assert query.wait(WAIT_S), "the query did not end"
        except PySparkException as error:
            raise AssertionError(str(error)) from error

    out = f"{config.namespace}.out"
    admin = AdminClient({"bootstrap.servers": logs.bootstrap})
    admin.create_topics([NewTopic(out, 1, 1)])[out].result(within(15))
    spark = build_session(app_name=config.namespace)
    with tempfile.TemporaryDirectory() as folder:
        for topic in ("", out):
            logs.send(3, key=b"a")
            rows = read_queue(spark, "a", config).select("ack_token", "value")
            checkpoint = str(Path(folder) / (topic or "checkpoint"))
            if not topic:
                with pytest.raises(AssertionError, match="broken on purpose"):
                    run(rows, checkpoint, each_batch=_break)
            run(rows, checkpoint, topic=topic)
    assert len(read_topic(logs.bootstrap, out)) == 3
    outcomes = [marker.outcome for _, marker in logs.said() if marker.type is MarkerType.END]
    assert outcomes == [Outcome.ACK] * 6, outcomes


def operate(config: ServiceConfig, logs: Logs) -> None:
    """Make the topics, look at everything, redrive dead letters."""
    commands = Commands(config.bootstrap_servers, config.namespace, config.kafka)
    more = replace(commands, namespace=f"{config.namespace}.new")
    more.run("create", "--partitions", "1", "--marker-partitions", "1")
    load_tracker(logs)
    with LocalTracker(logs.config).in_thread():
        wait_until(logs.dead_letters, "a dead letter")
    with Service(logs.bootstrap, config.namespace) as service:
        receive_all(service.queue("a").consumer(), 1)[0].ack(wait=True)
        (found,) = commands.json("stat")
        assert [(queue["queue_id"], queue["members"]) for queue in found["queues"]] == [("a", 1)]
    commands.run("doctor")
    assert commands.json("dlq", "ls")
    commands.run("dlq", "redrive", "--everything")
    assert len(logs.copies()) >= 1


def act_on_pages(config: ServiceConfig, logs: Logs) -> None:
    """Look at everything, send, take back what was to come later, redrive a dead letter."""
    service = Service(logs.bootstrap, config.namespace)
    later = service.queue("a").producer().send(b"later", delay=600).result(WAIT_S)
    load_tracker(logs)
    with LocalTracker(logs.config).in_thread():
        wait_until(lambda: len(logs.dead_letters()) == 1)
    with tempfile.TemporaryDirectory() as folder:
        options = IndexOptions(path=Path(folder) / "index")
        with serving(config, WebOptions(port=0), options) as address:
            try:
                web = WebClient(address, timeout_s=WAIT_S)
                assert web.get("redrive")["count"] == 1
                assert web.get("health")["ok"]
                web.post("messages", queue="a", payload="x")
                web.post(f"cancel/1/{later.partition}/{later.offset}")
                assert web.wait_for(web.post("jobs", everything=True)["id"], "done")["done"] == 1
            except HTTPError as error:
                raise AssertionError(error.read().decode()) from error
    assert len(logs.copies()) >= 1
    service.close()


ACTIONS: Mapping[str, Action] = {
    "producer": produce,
    "worker": work,
    "exactly-once worker": partial(work, exactly_once=True),
    "worker of a topic": work_on_topic,
    "local tracker": track,
    "tracker of a topic": track_topic,
    "Spark tracker": track_on_spark,
    "Spark worker": work_on_spark,
    "operator": operate,
    "web": act_on_pages,
    **CLAIM_ACTIONS,
}
