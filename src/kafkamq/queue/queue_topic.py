"""The topic of one queue: made, checked, and what its producer must know of it.

``AnyTopic`` is that of a queue of the ``markers`` backend: the namespace has everything else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.queue.namespace import (
    CONNECT_TIMEOUT_S,
    COPY_OVERHEAD_BYTES,
    Namespace,
    NamespaceFacts,
)
from kafkamq.queue.topics import (
    Finding,
    check_topics,
    log_settings,
    mending_command,
    raise_refusals,
)
from kafkamq.queue.wire.stamps import log_id_of, stamp_of
from kafkamq.transport.admin import Admin, TopicInfo

_LETTER_OVERHEAD_BYTES = 9216  # what a dead letter adds: reason, error text, origin, framing
_NO_IDS = "the brokers tell no ids of topics (Kafka before 2.8): nothing tells it from a later one"
_log = logging.getLogger(__name__)


class QueueTopic(Namespace):
    """The facts of a queue's own topic, in the form that senders know."""

    def __init__(self, config: ServiceConfig, queue: QueueConfig) -> None:
        super().__init__(config)
        self._queue = queue

    def require(self, max_lease_ms: int) -> NamespaceFacts:
        """The facts; a topic of any kind will do."""
        del max_lease_ms
        return self.facts()

    def _ask(self) -> NamespaceFacts:
        with self._admin() as admin:
            topic = admin.require_topic(self._queue.topic)
            letters = admin.topics([self.config.dead_letter_topic])
        limit = topic.max_message_bytes
        for found in letters.values():
            limit = min(limit, found.max_message_bytes - _LETTER_OVERHEAD_BYTES)
        self._asked_s = time.monotonic()
        return NamespaceFacts(
            message_topic_id=topic.topic_id,
            message_partitions=topic.partitions,
            marker_partitions=1,
            message_retention_ms=-1,
            marker_retention_ms=-1,
            max_message_bytes=limit,
            max_marker_bytes=0,
        )


def require_dead_letters(config: ServiceConfig, queue: QueueConfig) -> None:
    """Checks that a queue's topic is there, and the one for what it gives up."""
    with Admin(config, timeout_s=CONNECT_TIMEOUT_S) as admin:
        admin.require_topic(queue.topic)
        if config.dead_letter_topic not in admin.topics([config.dead_letter_topic]):
            raise ConfigError(
                f"topic {config.dead_letter_topic} does not exist: queue {queue.queue_id!r} needs "
                "it for its dead letters; create it with Queue.create_topics()"
            )


def create_queue_topics(
    config: ServiceConfig,
    queue: QueueConfig,
    *,
    partitions: int,
    replication_factor: int,
    timeout_s: float = 30.0,
) -> None:
    """Create what a queue needs and does not exist: its topic, and dead letters."""
    if partitions < 1:
        raise ConfigError(f"partitions is {partitions}: it must be >= 1")
    with Admin(config, timeout_s=timeout_s) as admin:
        common = log_settings(admin, replication_factor)
        limit = 1024 * 1024 + 65_536
        letters = {
            **common,
            "retention.ms": "-1",
            "max.message.bytes": str(limit + _LETTER_OVERHEAD_BYTES + 65_536),
        }
        wanted = {
            queue.topic: {**common, "max.message.bytes": str(limit)},
            config.dead_letter_topic: letters,
        }
        admin.create_topics(
            {name: (partitions, settings) for name, settings in wanted.items()},
            replication_factor=replication_factor,
        )


class AnyTopic(Namespace):
    """The facts of a namespace whose messages are those of a queue's own topic."""

    def __init__(self, config: ServiceConfig, queue: QueueConfig) -> None:
        check_name(config, queue.topic)
        super().__init__(replace(config, message_topic=queue.topic))
        self._queue_id = queue.queue_id

    def require(self, max_lease_ms: int) -> NamespaceFacts:
        """``facts``; what the topic lacks is refused or logged, with the command that mends it."""
        if max_lease_ms in self._checked:
            return self.facts()
        config = self.config
        found = check_any_topic(config, max_lease_ms=max_lease_ms)
        ours = (config.marker_topic, config.dead_letter_topic)
        others = check_topics(config, max_lease_ms=max_lease_ms, timeout_s=CONNECT_TIMEOUT_S)
        raise_refusals([*found, *(each for each in others if each.topic in ours)])
        facts = self.facts()
        for finding in found:
            _log.warning("queue %r: %s", self._queue_id, finding)
        self._checked.add(max_lease_ms)
        return facts

    def _ask(self) -> NamespaceFacts:
        names = [self.config.marker_topic, self.config.dead_letter_topic]
        with self._admin() as admin:
            topics = admin.topics(names)
            for name in (self.config.message_topic, self.config.marker_topic):
                topics[name] = admin.require_topic(name)
        self._asked_s = time.monotonic()
        topic = topics[self.config.message_topic]
        if not topic.topic_id:
            raise ConfigError(f"topic {topic.name} cannot be a queue: {_NO_IDS}")
        facts = NamespaceFacts.of(self.config, topics)
        stamp = stamp_of(topic.topic_id, self.config.namespace, self._queue_id)
        return replace(
            facts,
            message_topic_id=log_id_of(topic.topic_id, self._queue_id),
            max_message_bytes=facts.max_message_bytes - COPY_OVERHEAD_BYTES - len(stamp),
            stamp=stamp,
            is_broker_time=_is_broker_time(topic),
        )


def check_name(config: ServiceConfig, topic: str) -> None:
    """Refuse what a namespace needs for itself, and Kafka's own topics."""
    if topic in config.topics.values() or topic.startswith("__"):
        raise ConfigError(
            f"topic is {topic!r}: a queue cannot be one of the namespace's or of Kafka's own topics"
        )


def check_any_topic(config: ServiceConfig, *, max_lease_ms: int) -> list[Finding]:
    """What is wrong with ``config.message_topic`` as a queue, and the commands that mend it."""
    name = config.message_topic
    with Admin(config, timeout_s=CONNECT_TIMEOUT_S) as admin:
        topic = admin.topics([name]).get(name)
    servers = config.bootstrap_servers
    if topic is None:
        create = (
            f"kafka-topics.sh --bootstrap-server {servers} --create --topic {name} "
            "--config message.timestamp.type=LogAppendTime"
        )
        return [Finding("refuse", name, f"does not exist; create it: {create}")]
    return list(_of_topic(topic, config, max_lease_ms))


def _of_topic(topic: TopicInfo, config: ServiceConfig, max_lease_ms: int) -> Iterator[Finding]:
    name, settings = topic.name, topic.settings
    mend = partial(mending_command, config.bootstrap_servers, name)
    policy = settings.get("cleanup.policy", "delete")
    if "compact" in policy:
        yield Finding(
            "refuse",
            name,
            f"cleanup.policy is {policy}: compaction removes messages that nobody has received; "
            + mend("cleanup.policy=delete"),
        )
    if not topic.topic_id:
        yield Finding("refuse", name, _NO_IDS)
    if settings.get("unclean.leader.election.enable", "false") == "true":
        yield Finding(
            "warn",
            name,
            "unclean.leader.election.enable is true: confirmed messages and copies may vanish; "
            + mend("unclean.leader.election.enable=false"),
        )
    if not _is_broker_time(topic):
        yield Finding(
            "warn",
            name,
            "message.timestamp.type is CreateTime: no message has a TTL, and STARTs carry the "
            "payloads, which costs throughput; " + mend("message.timestamp.type=LogAppendTime"),
        )
    if topic.kept_ms == 0:
        yield Finding(
            "warn",
            name,
            "retention.bytes is set: a burst deletes what nobody has received, and STARTs carry "
            "the payloads; " + mend("retention.bytes=-1"),
        )
    elif 0 < topic.retention_ms <= 2 * max_lease_ms:  # R28
        yield Finding(
            "warn",
            name,
            f"retention.ms is {topic.retention_ms}: no message outlives twice max_lease "
            f"({2 * max_lease_ms}), so STARTs carry the payloads; "
            + mend(f"retention.ms={max(4 * max_lease_ms, 604_800_000)}"),
        )


def _is_broker_time(topic: TopicInfo) -> bool:
    return topic.settings.get("message.timestamp.type", "CreateTime") == "LogAppendTime"
