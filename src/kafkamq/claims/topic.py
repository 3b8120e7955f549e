"""The coordination topic: made with the settings that the claims rest on, and checked before use.

An existing topic is never altered: what is wrong with it is said, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

from kafkamq.claims.wire.marshal import COORDINATION_TOPIC
from kafkamq.config import QueueConfig, ServiceConfig, milliseconds, wait_seconds
from kafkamq.errors import BrokerError, ConfigError
from kafkamq.queue.topics import Finding, log_settings
from kafkamq.transport.admin import Admin, TopicInfo

_DAY_S = 86_400
_MAX_ID_CHARACTERS = 249
_MIN_INTERVALS_KEPT = 6  # readers begin three intervals back; the rest is for those that were slow


def coordination_topic(config: ServiceConfig) -> str:
    """Where the claims of a namespace's queues are written."""
    return f"{config.namespace}.claims"


def heartbeat_s(queue: QueueConfig) -> float:
    """The heartbeat interval of a queue's claims: two of them are its redelivery timeout."""
    return max(0.5, queue.redelivery_timeout_ms / 2000)


def check_id(name: str, value: str) -> None:
    """Checks that an id can stand in a record."""
    if not 0 < len(value) <= _MAX_ID_CHARACTERS or "/" in value or not value.isprintable():
        raise ConfigError(
            f"{name} is {value!r}: it must be 1-{_MAX_ID_CHARACTERS} printable characters without"
            " '/', which separates the fields of a record"
        )


@dataclass(frozen=True, slots=True)
class CoordinationTopic:
    """A coordination topic that was found fit."""

    name: str
    partitions: int  # a change ends every claim
    has_broker_time: bool = True  # its records carry the broker's time
    warnings: tuple[str, ...] = ()  # what should be changed, though it works


def init_topic(
    bootstrap_servers: str,
    topic: str = COORDINATION_TOPIC,
    *,
    partitions: int = 8,
    replication_factor: int = -1,
    retention: float | timedelta = _DAY_S,
    heartbeat_interval: float | timedelta = 60.0,
    rules: str = "safe",
    kafka: Mapping[str, str] | None = None,
    timeout: float | timedelta = 30.0,
) -> bool:
    """Create a coordination topic unless it exists, and check it.

    It gets LogAppendTime (a claim's age is the broker's), no compaction (a claim is the order of
    its records) and at least two replicas in sync where three exist.

    Args:
        bootstrap_servers: The cluster.
        topic: Its name; Go clients know ``__marshal`` only.
        partitions: Topics are spread over them by their names; cannot be changed while in use.
        replication_factor: -1: the cluster's default.
        retention: Seconds that records are kept: at least six heartbeat intervals.
        heartbeat_interval: Of the clients that will use it, in seconds.
        rules: As for ``Cluster``.
        kafka: Kafka's own properties, for example for security.
        timeout: Bound of every single request, in seconds.

    Returns:
        False: it existed already.

    Raises:
        ConfigError: An argument, or the topic as it is, cannot work.
        BrokerError, DeadlineExceededError: The cluster refused, or does not answer.
    """
    check_rules(rules)
    if partitions < 1 or (replication_factor < 1 and replication_factor != -1):
        raise ConfigError(
            f"partitions is {partitions} and replication_factor {replication_factor}: they must be"
            " >= 1 (a replication factor of -1 is the cluster's default)"
        )
    retention_ms = milliseconds(retention, name="retention")
    interval_ms = milliseconds(heartbeat_interval, name="heartbeat_interval")
    timeout_s = wait_seconds(timeout)
    if retention_ms < _MIN_INTERVALS_KEPT * interval_ms:
        raise ConfigError(
            f"retention is {retention_ms / 1000:g} s: it must be at least {_MIN_INTERVALS_KEPT}"
            f" heartbeat intervals ({_MIN_INTERVALS_KEPT * interval_ms / 1000:g} s)"
        )
    config = ServiceConfig(bootstrap_servers=bootstrap_servers, kafka=dict(kafka or {}))
    with Admin(config, timeout_s=timeout_s) as admin:
        created = False
        if topic not in admin.topics([topic]):
            settings = log_settings(admin, replication_factor)
            settings = {**settings, "retention.ms": str(retention_ms)}
            wanted = {topic: (partitions, settings)}
            created = bool(admin.create_topics(wanted, replication_factor=replication_factor))
        require_topic(admin, topic, rules=rules, interval_ms=interval_ms)
        return created


def check_rules(rules: str) -> None:
    """Refuse what is not the name of a rule set."""
    if rules not in ("safe", "peer"):
        raise ConfigError(f"rules is {rules!r}: it must be 'safe' or 'peer'")


def require_work(admin: Admin, topic: str) -> int:
    """How many partitions a topic has whose partitions are claimed."""
    found = admin.topics([topic]).get(topic)
    if found is None:
        raise BrokerError(
            f"topic {topic} does not exist: claims are made on topics that are there",
            code="UNKNOWN_TOPIC_OR_PART",
        )
    return found.partitions


def find_topic(admin: Admin, topic: str) -> TopicInfo:
    """Look up a coordination topic; there being none is a ``ConfigError``."""
    found = admin.topics([topic]).get(topic)
    if found is None:
        raise ConfigError(
            f"coordination topic {topic} does not exist: create it with `kafkamq claims init` or"
            " kafkamq.claims.init_topic()"
        )
    return found


def require_topic(admin: Admin, topic: str, *, rules: str, interval_ms: int) -> CoordinationTopic:
    """Look up a coordination topic, and refuse one that claims cannot rest on."""
    found = find_topic(admin, topic)
    findings = list(topic_findings(found, rules=rules, interval_ms=interval_ms))
    refusals = [str(finding) for finding in findings if finding.level == "refuse"]
    if refusals:
        raise ConfigError("the coordination topic cannot be used:\n  " + "\n  ".join(refusals))
    has_broker_time = found.settings.get("message.timestamp.type") == "LogAppendTime"
    warnings = tuple(finding.text for finding in findings)
    return CoordinationTopic(topic, found.partitions, has_broker_time, warnings)


def topic_findings(topic: TopicInfo, *, rules: str, interval_ms: int) -> Iterator[Finding]:
    """What is wrong with an existing coordination topic."""
    name, settings = topic.name, topic.settings
    policy = settings.get("cleanup.policy", "delete")
    if "compact" in policy:
        yield Finding(
            "refuse",
            name,
            f"cleanup.policy is {policy}: records have no key, and an order of claims cannot be"
            " compacted; set it to delete",
        )
    kind = settings.get("message.timestamp.type", "CreateTime")
    if kind != "LogAppendTime":
        yield Finding(
            "refuse" if rules == "safe" else "warn",
            name,
            f"message.timestamp.type is {kind}: the age of a claim would be a client's clock; set"
            " it to LogAppendTime and wait three heartbeat intervals",
        )
    if settings.get("unclean.leader.election.enable", "false") == "true":
        yield Finding(
            "refuse",
            name,
            "unclean.leader.election.enable is true: a claim that was read back may vanish; set it"
            " to false",
        )
    retention_ms = int(settings.get("retention.ms", "604800000"))
    if 0 <= retention_ms < _MIN_INTERVALS_KEPT * interval_ms:
        yield Finding(
            "refuse",
            name,
            f"retention.ms is {retention_ms}: a living claim could be deleted; set it to"
            f" {_MIN_INTERVALS_KEPT * interval_ms} or more",
        )
    if settings.get("retention.bytes", "-1") != "-1":
        yield Finding(
            "warn", name, "retention.bytes is set: a burst may delete living claims; set it to -1"
        )
    if topic.replication_factor < 3:
        yield Finding(
            "warn", name, f"replication factor {topic.replication_factor}: 3 keeps claims safe"
        )
