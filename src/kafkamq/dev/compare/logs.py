"""What contenders wrote beside the messages: counted in the logs, and removed at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing, suppress

from confluent_kafka import KafkaError, TopicPartition
from confluent_kafka import Message as Record
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # not in its __all__
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, KafkaMQError
from kafkamq.queue.wire.headers import ORIGIN
from kafkamq.transport.admin import Admin
from kafkamq.transport.clients import open_consumer
from kafkamq.transport.record import headers_of

SHARED = ("__consumer_offsets", "__share_group_state", "__transaction_state")
_READ_S = 20.0
_QUIET_S = 1.2  # longer than the interval of commits
_SETTLE_S = 3.0
_BATCH = 2000
_GONE = ("GROUP_ID_NOT_FOUND", "UNKNOWN_TOPIC_OR_PART")
_GROUP_SETTINGS = (
    "share.record.lock.duration.ms",
    "share.auto.offset.reset",
    "share.isolation.level",
)

Ends = dict[tuple[str, int], int]
Written = tuple[int, int]
"""Records, and the bytes of their keys, values and headers."""


def ends_of(config: ServiceConfig, prefix: str) -> Ends:
    """The ends of all topics that begin so, and of Kafka's own that groups write to."""
    found: Ends = {}
    with Admin(config) as admin:
        topics = [
            name
            for name in admin.client.list_topics(timeout=10).topics
            if name.startswith(prefix) or name in SHARED
        ]
        for topic in topics:
            for number, (_, high) in admin.log_ends(topic).items():
                found[topic, number] = high
    return found


def settled_ends(config: ServiceConfig, prefix: str) -> Ends:
    """The ends of logs when they have not moved for a while, or after a few seconds."""
    deadline_s = time.monotonic() + _SETTLE_S
    ends, since_s = ends_of(config, prefix), time.monotonic()
    while time.monotonic() < deadline_s and time.monotonic() - since_s < _QUIET_S:
        time.sleep(0.2)
        now = ends_of(config, prefix)
        if now != ends:
            ends, since_s = now, time.monotonic()
    return ends


def written_between(
    config: ServiceConfig, prefix: str, before: Ends, after: Ends, *, messages: str
) -> Written | None:
    """What was written in between for this prefix, first copies of messages not counted.

    Records of topics with the prefix count, and those of Kafka's own whose key names it.

    Returns:
        None when Kafka's own topics cannot be read.
    """
    spans = {place: end for place, end in after.items() if end > before.get(place, 0)}
    if not spans:
        return 0, 0
    settings = {
        "bootstrap.servers": config.bootstrap_servers,
        "group.id": f"{prefix}.reader",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "isolation.level": "read_uncommitted",
        "auto.offset.reset": "earliest",
        "fetch.queue.backoff.ms": 3,
        **config.kafka,
    }
    name = prefix.encode()
    count = size = 0
    with closing(open_consumer(settings)) as consumer:
        consumer.assign([TopicPartition(*place, before.get(place, 0)) for place in spans])
        deadline_s = time.monotonic() + _READ_S
        while spans and time.monotonic() < deadline_s:
            for record in consumer.consume(_BATCH, 0.1):
                place = (str(record.topic()), int(record.partition() or 0))
                offset, error = int(record.offset() or 0), record.error()
                if error is not None:
                    if error.code() != KafkaError._PARTITION_EOF:
                        return None
                    spans.pop(place, None)  # what ends the log may be a mark of a transaction
                elif place in spans and offset < spans[place]:
                    if _counts(record, name, messages):
                        count += 1
                        size += _size(record)
                    if offset == spans[place] - 1:
                        del spans[place]
    return None if spans else (count, size)


def _counts(record: Record, prefix: bytes, messages: str) -> bool:
    if record.topic() in SHARED:
        return prefix in (record.key() or b"")
    if record.topic() == messages:
        return any(name == ORIGIN for name, _ in headers_of(record))
    return True


def _size(record: Record) -> int:
    headers = sum(len(name) + len(value or b"") for name, value in headers_of(record))
    return len(record.key() or b"") + len(record.value() or b"") + headers


def remove(config: ServiceConfig, prefix: str, *, groups: Sequence[str]) -> list[str]:
    """Delete the topics and groups with that prefix, and these groups; what could not be deleted.

    Args:
        config: Where.
        prefix: Of names; consumer groups are found by it wherever it stands in theirs.
        groups: Share groups, which no client of ours can list.
    """
    left: list[str] = []
    with Admin(config) as admin:
        found = admin.client.list_consumer_groups(request_timeout=10).result(15).valid
        names = {each.group_id for each in found if prefix in each.group_id} | set(groups)
        topics = [
            name for name in admin.client.list_topics(timeout=10).topics if name.startswith(prefix)
        ]
        _forget_settings(admin, groups)
        for futures, what in (
            (admin.client.delete_consumer_groups(sorted(names)) if names else {}, "group"),
            (admin.client.delete_topics(topics) if topics else {}, "topic"),
        ):
            for name, future in futures.items():
                try:
                    admin.wait(future, f"deleting {what} {name}")
                except BrokerError as error:  # noqa: PERF203 - each one is tried
                    if error.code not in _GONE:
                        left.append(f"{what} {name}")
                except KafkaMQError:
                    left.append(f"{what} {name}")
    return left


def _forget_settings(admin: Admin, groups: Sequence[str]) -> None:
    for group in groups:
        entries = [
            ConfigEntry(name, None, incremental_operation=AlterConfigOpType.DELETE)
            for name in _GROUP_SETTINGS
        ]
        resource = ConfigResource(ConfigResource.Type.GROUP, group, incremental_configs=entries)
        for future in admin.client.incremental_alter_configs([resource]).values():
            with suppress(KafkaMQError):
                admin.wait(future, f"resetting share group {group}")
