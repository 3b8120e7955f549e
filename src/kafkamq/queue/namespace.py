"""What clients must know of topics: those of a namespace, and one that is a queue of its own.

``QueueTopic`` is the one topic of a queue on another backend than ``markers``, ``AnyTopic`` that of
a ``markers`` queue, for which the namespace has everything else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import ConfigError, KafkaMQError
from kafkamq.queue.rules.log_clock import BrokerClock
from kafkamq.queue.topics import (
    Finding,
    check_topics,
    log_settings,
    mending_command,
    raise_refusals,
)
from kafkamq.queue.wire.headers import log_id_of, stamp_of
from kafkamq.transport.admin import Admin, TopicInfo

CONNECT_TIMEOUT_S = 15.0
# The thread that asks again gives up at once when it is told to end.
_END_S = 5.0
# Kafka's ``metadata.max.age.ms``: new partitions are used after this at the latest.
MAX_AGE_S = 300.0
# Of workers: STARTs that name a topic by its former id are soon made again.
IDENTITY_AGE_S = 15.0
# What a copy adds: the framing of batch and record, origin, count.
COPY_OVERHEAD_BYTES = 1024
# What a dead letter adds beyond that: the reason, 4 KiB of error text, the queue id.
DEAD_LETTER_OVERHEAD_BYTES = 8192
MARKER_OVERHEAD_BYTES = 1024
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NamespaceFacts:
    """The topics of a namespace as they are now."""

    message_topic_id: bytes
    message_partitions: int
    marker_partitions: int
    # Negative: forever; 0: for no time that can be relied on.
    message_retention_ms: int
    marker_retention_ms: int
    max_message_bytes: int
    max_marker_bytes: int
    # What our records have in a queue that is a topic of its own (R38).
    stamp: bytes = b""
    is_broker_time: bool = True

    @classmethod
    def of(cls, config: ServiceConfig, topics: Mapping[str, TopicInfo]) -> NamespaceFacts:
        messages, markers = topics[config.message_topic], topics[config.marker_topic]
        copies = messages.max_message_bytes - COPY_OVERHEAD_BYTES
        dead_letters = topics.get(config.dead_letter_topic)
        if dead_letters is not None:
            copies = min(copies, dead_letters.max_message_bytes - DEAD_LETTER_OVERHEAD_BYTES)
        return cls(
            message_topic_id=messages.topic_id,
            message_partitions=messages.partitions,
            marker_partitions=markers.partitions,
            message_retention_ms=messages.kept_ms,
            marker_retention_ms=markers.retention_ms,
            max_message_bytes=copies,
            max_marker_bytes=markers.max_message_bytes - MARKER_OVERHEAD_BYTES,
        )

    def are_of_another_topic(self, former: NamespaceFacts) -> bool:
        """Return whether the messages' topic was recreated since ``former``.

        A topic whose id one of the two does not know is no other one: brokers begin to tell ids,
        or some of them do, while they are upgraded.
        """
        ids = self.message_topic_id, former.message_topic_id
        return all(ids) and ids[0] != ids[1]


class Namespace:
    """Asks the cluster for the facts, and keeps them; thread-safe."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.broker_clock = BrokerClock()
        self._lock = threading.Lock()
        self._facts: NamespaceFacts | None = None
        self._asked_s = 0.0
        self._true_s = 0.0
        self.certain_until_s = 0.0
        self._looked: set[tuple[str, str]] = set()
        self._checked: set[int] = set()
        self._refreshing: threading.Thread | None = None
        self._is_closed = False

    def facts(self) -> NamespaceFacts:
        """Return the latest facts; asks when nothing is known yet."""
        facts = self._facts
        if facts is not None:
            return facts
        with self._lock:
            if self._facts is None:
                self._true_s = time.monotonic()
                self._facts = self._ask()
            return self._facts

    def require(self, max_lease_ms: int) -> NamespaceFacts:
        """``facts``, of topics that a queue with that longest lease can use (R23, R25)."""
        facts = self.facts()
        if max_lease_ms not in self._checked:
            ours = (self.config.message_topic, self.config.marker_topic)
            found = check_topics(
                self.config, max_lease_ms=max_lease_ms, timeout_s=CONNECT_TIMEOUT_S
            )
            raise_refusals([finding for finding in found if finding.topic in ours])
            self._checked.add(max_lease_ms)
        return facts

    def is_first_look(self, queue_id: str, group: str) -> bool:
        """Return whether nobody has asked this before, of a queue and its group."""
        found = queue_id, group
        is_first = found not in self._looked
        self._looked.add(found)
        return is_first

    def refresh_if_old(self, max_age_s: float = MAX_AGE_S) -> None:
        """Ask again when the facts are old, without waiting for the answer."""
        if self._facts is None or time.monotonic() - self._asked_s < max_age_s:
            return
        with self._lock:
            before = self._refreshing
            if self._is_closed or (before is not None and before.is_alive()):
                return
            self._asked_s = time.monotonic()
            self._refreshing = threading.Thread(
                target=self._refresh, name="kafkamq-topics", daemon=True
            )
            self._refreshing.start()

    def _refresh(self) -> None:
        """A failure leaves the facts as they are."""
        try:
            self.ask_again()
        except KafkaMQError as error:
            if not self._is_closed:
                _log.warning("topics could not be described again", extra={"error": str(error)})

    def close(self) -> None:
        """Ask nobody any more; who waits for an answer gives up. Idempotent."""
        self._is_closed = True
        with self._lock:
            thread = self._refreshing
        if thread is not None:
            thread.join(_END_S)

    def _admin(self) -> Admin:
        return Admin(self.config, timeout_s=CONNECT_TIMEOUT_S, is_over=lambda: self._is_closed)

    def ask_again(self) -> NamespaceFacts:
        """Return the facts of now; the same object while nothing has changed."""
        began_s = time.monotonic()
        facts = self._ask()
        with self._lock:
            known = self._facts
            if known is not None and not facts.message_topic_id:
                # This broker does not tell the id.
                facts = replace(facts, message_topic_id=known.message_topic_id)
            if known is None or known != facts:
                self.certain_until_s, self._facts, known = self._true_s, facts, facts
            self._true_s = began_s
            return known

    def _ask(self) -> NamespaceFacts:
        names = (self.config.message_topic, self.config.marker_topic, self.config.dead_letter_topic)
        with self._admin() as admin:
            topics = admin.topics(names)
            for name in names[:2]:
                if name not in topics:
                    # It raises, and says how to create the topic, if that is not new.
                    topics[name] = admin.require_topic(name)
        self._asked_s = time.monotonic()
        return NamespaceFacts.of(self.config, topics)


# What a dead letter adds: reason, error text, origin, framing.
_LETTER_OVERHEAD_BYTES = 9216
_NO_IDS = "the brokers tell no ids of topics (Kafka before 2.8): nothing tells it from a later one"


class QueueTopic(Namespace):
    """The facts of a queue's own topic, in the form that senders know."""

    def __init__(self, config: ServiceConfig, queue: QueueConfig) -> None:
        super().__init__(config)
        self._queue = queue

    def require(self, max_lease_ms: int) -> NamespaceFacts:
        """Return the facts; a topic of any kind will do."""
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
    """The facts of a namespace whose messages are those of a queue's own topic (R37)."""

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
    """Say what is wrong with ``config.message_topic`` as a queue, and the commands that mend it."""
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
    mend = partial(mending_command, config.bootstrap_servers, topic.name)
    refuse, warn = partial(Finding, "refuse", topic.name), partial(Finding, "warn", topic.name)
    policy = topic.settings.get("cleanup.policy", "delete")
    if "compact" in policy:
        yield refuse(
            f"cleanup.policy is {policy}: compaction removes messages that nobody has received; "
            + mend("cleanup.policy=delete")
        )
    if not topic.topic_id:
        yield refuse(_NO_IDS)
    if topic.settings.get("unclean.leader.election.enable", "false") == "true":
        yield warn(
            "unclean.leader.election.enable is true: confirmed messages and copies may vanish; "
            + mend("unclean.leader.election.enable=false")
        )
    if not _is_broker_time(topic):
        yield warn(
            "message.timestamp.type is CreateTime: no message has a TTL, and STARTs carry the "
            "payloads, which costs throughput; " + mend("message.timestamp.type=LogAppendTime")
        )
    if topic.kept_ms == 0:
        yield warn(
            "retention.bytes is set: a burst deletes what nobody has received, and STARTs carry "
            "the payloads; " + mend("retention.bytes=-1")
        )
    elif 0 < topic.retention_ms <= 2 * max_lease_ms:  # R28
        yield warn(
            f"retention.ms is {topic.retention_ms}: no message outlives twice max_lease "
            f"({2 * max_lease_ms}), so STARTs carry the payloads; "
            + mend(f"retention.ms={max(4 * max_lease_ms, 604_800_000)}")
        )


def _is_broker_time(topic: TopicInfo) -> bool:
    return topic.settings.get("message.timestamp.type", "CreateTime") == "LogAppendTime"
