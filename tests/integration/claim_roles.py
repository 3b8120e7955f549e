"""The roles of claims in docs/operations.md: what each does, and the rights that it needs for that.

``NS.claims`` and ``NS.ranges`` stand for coordination topics, ``NS.work`` for the topic whose
partitions are claimed, and ``NS-group`` for the group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from confluent_kafka.admin import AdminClient, NewTopic
from tests.integration.cli_tools import Commands
from tests.integration.tracker_logs import Logs
from tests.sure_producer import SureProducer
from tests.waiting import wait_until, within

from kafkamq.claims import Cluster, RangeClaims, init_topic
from kafkamq.config import ServiceConfig
from kafkamq.transport.admin import Admin

__all__ = ["CLAIM_ACTIONS", "CLAIM_ROLES"]

INTERVAL_S = 3.0
WAIT_S = within(60.0)
PARTITIONS = 2

_READER = ("group", "kafkamq.reader", "DESCRIBE")
_OBSERVE = (
    ("topic", "NS.claims", "READ"),
    ("topic", "NS.claims", "DESCRIBE_CONFIGS"),
    _READER,
)
_WORK = (
    ("topic", "NS.work", "READ"),
    ("topic", "NS.work", "DESCRIBE_CONFIGS"),
    ("group", "NS-group", "READ"),
)
_MEMBER = (*_OBSERVE, ("topic", "NS.claims", "WRITE"), *_WORK)
_FENCED = ("transactional-id", "kafkamq.claims.NS-group.*", "WRITE")
CLAIM_ROLES: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "claims observer": _OBSERVE,
    "claims member": _MEMBER,
    "fenced claims member": (*_MEMBER, _FENCED),
    "claims operator": (
        *_MEMBER,
        _FENCED,
        ("topic", "NS.claims", "CREATE"),
        ("cluster", "kafka-cluster", "DESCRIBE_CONFIGS"),
    ),
    "range member": (
        ("topic", "NS.ranges", "READ"),
        ("topic", "NS.ranges", "DESCRIBE_CONFIGS"),
        ("topic", "NS.ranges", "WRITE"),
        _READER,
        *_WORK,
    ),
}


def _prepare(logs: Logs, coordination: str = "") -> None:
    """The topics, with ten messages of work."""
    namespace = logs.config.namespace
    admin = AdminClient({"bootstrap.servers": logs.bootstrap})
    work = f"{namespace}.work"
    admin.create_topics([NewTopic(work, PARTITIONS, 1)])[work].result(within(15))
    wait_until(lambda: work in admin.list_topics(timeout=within(15)).topics)
    producer = SureProducer({"bootstrap.servers": logs.bootstrap})
    for number in range(10):
        producer.produce(work, str(number), partition=number % PARTITIONS)
    if coordination:
        name = f"{namespace}.{coordination}"
        init_topic(logs.bootstrap, name, partitions=1, heartbeat_interval=INTERVAL_S)
        if coordination == "claims":
            record = f"Heartbeat/1/{int(time.time())}/i/c/other/{work}/0/0"
            producer.produce(name, record, headers=[("kafkamq-interval-ms", b"3000")])
    producer.confirm(15)


def _check_committed(logs: Logs) -> None:
    """Positions are committed to Kafka as well, best effort; the right to do so is needed."""
    group, work = f"{logs.config.namespace}-group", f"{logs.config.namespace}.work"
    with Admin(ServiceConfig(bootstrap_servers=logs.bootstrap)) as admin:
        found = admin.committed([(group, (work, n)) for n in range(PARTITIONS)])
    assert sum(place.offset for place in found) == 10, "the positions were not committed"


def _commands(config: ServiceConfig) -> tuple[Commands, tuple[str, ...]]:
    commands = Commands(config.bootstrap_servers, config.namespace, config.kafka)
    return commands, ("--topic", f"{config.namespace}.claims", "--interval", str(INTERVAL_S))


def observe(config: ServiceConfig, logs: Logs) -> None:
    """Look at everything."""
    _prepare(logs, "claims")
    commands, on = _commands(config)
    (row,) = commands.json("claims", "state", *on)
    assert row["client"] == "c"
    assert commands.json("claims", "watch", "--no-follow", *on)
    assert commands.json("claims", "decode", *on[:2])
    commands.run("claims", "doctor", *on)


def consume(config: ServiceConfig, logs: Logs, *, delivery: str) -> None:
    """Claim all, read all, give all back."""
    _prepare(logs, "claims")
    with (
        Cluster(
            config.bootstrap_servers,
            coordination_topic=f"{config.namespace}.claims",
            heartbeat_interval=INTERVAL_S,
            kafka=config.kafka,
        ) as cluster,
        cluster.member("a", f"{config.namespace}-group").consumer(
            f"{config.namespace}.work", claims="greedy", delivery=delivery
        ) as consumer,
    ):
        consumer.wait_for_claims(PARTITIONS, WAIT_S)
        seen, deadline_s = 0, time.monotonic() + WAIT_S
        while seen < 10 and time.monotonic() < deadline_s:
            batch = consumer.next_batch(1.0)
            if batch is not None:
                seen += len(batch)
                if delivery == "at-least-once":
                    consumer.commit(batch)
        assert seen == 10
        consumer.flush(WAIT_S)
    _check_committed(logs)


def operate(config: ServiceConfig, logs: Logs) -> None:
    """Make the topic, pause a group, move it, let it go on."""
    _prepare(logs)
    commands, on = _commands(config)
    commands.run("claims", "init", "--partitions", "1", *on)
    group, work = f"{config.namespace}-group", f"{config.namespace}.work"
    commands.run("claims", "pause", group, "--for", "60", *on)
    commands.run("claims", "resume", group, *on)
    moved = commands.json("claims", "set-position", group, f"{work}:0=2", f"{work}:1=latest", *on)
    assert [row["offset"] for row in moved] == [2, 5]


def share(config: ServiceConfig, logs: Logs) -> None:
    """Work on ranges."""
    _prepare(logs, "ranges")
    seen, deadline_s = 0, time.monotonic() + WAIT_S
    with RangeClaims(
        config.bootstrap_servers,
        f"{config.namespace}.work",
        client_id="a",
        group_id=f"{config.namespace}-group",
        size=5,
        range_topic=f"{config.namespace}.ranges",
        heartbeat_interval=INTERVAL_S,
        kafka=config.kafka,
    ) as ranges:
        while seen < 10 and time.monotonic() < deadline_s:
            claimed = ranges.next_range(1.0)
            if claimed is not None:
                seen += sum(1 for _ in claimed)
                claimed.done()
    assert seen == 10
    _check_committed(logs)


CLAIM_ACTIONS: Mapping[str, Callable[[ServiceConfig, Logs], None]] = {
    "claims observer": observe,
    "claims member": partial(consume, delivery="at-least-once"),
    "fenced claims member": partial(consume, delivery="at-most-once"),
    "claims operator": operate,
    "range member": share,
}
