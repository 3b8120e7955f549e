"""The topics of a namespace are made with the settings that the guarantees rest on, and checked
(R23).

Existing topics are never altered: what is wrong with them is said, and what to do about it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from kafkamq.config import Options, ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.transport.admin import Admin, TopicInfo

FOREIGN_TRACKER_GROUP = "kafka-mq-redelivery"
"""kafka-mq-go's tracker, of every markers topic of a cluster (R25)."""

HEADROOM_BYTES = 65_536
"""A START, a SCHEDULE or a dead letter may be so much larger than its message (R11)."""

_MISSING = "does not exist"
_VISIBLE_S = 5.0
_DAY_MS = 86_400_000
_MAX_MESSAGE_BYTES = 1_048_588


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a topic, and what to do."""

    level: Literal["refuse", "warn"]
    # Empty: the finding is of the cluster.
    topic: str
    text: str

    def __str__(self) -> str:
        return f"{self.topic or 'cluster'}: {self.text}"


def create_topics(
    config: ServiceConfig,
    *,
    partitions: int = Options.partitions.default,
    marker_partitions: int = Options.marker_partitions.default,
    replication_factor: int = Options.replication_factor.default,
    message_retention_ms: int = 7 * _DAY_MS,
    marker_retention_ms: int = 7 * _DAY_MS,
    max_message_bytes: int = _MAX_MESSAGE_BYTES,
    ledger_partitions: int = 32,
    max_lease_ms: int = Options.max_lease.default_ms,
    timeout_s: float = 30.0,
) -> tuple[str, ...]:
    """Create what is missing of a namespace, and check all of it.

    Args:
        message_retention_ms: A message that nobody received in this time is lost.
        marker_retention_ms: At least twice the longest lease.
        max_message_bytes: Largest message; markers and dead letters get 64 KiB more.
        ledger_partitions: Of the ledger topic of exactly-once sinks; it holds no records.
        max_lease_ms: The longest lease that queues of this namespace will allow.
    """
    for count, name in (
        (partitions, "partitions"),
        (marker_partitions, "marker_partitions"),
        (ledger_partitions, "ledger_partitions"),
    ):
        if count < 1:
            raise ConfigError(f"{name} is {count}: it must be >= 1")
    if replication_factor == 0 or replication_factor < -1:
        raise ConfigError(f"replication_factor is {replication_factor}: -1, or >= 1")
    if -1 < marker_retention_ms < 2 * max_lease_ms:
        raise ConfigError(
            f"marker_retention_ms is {marker_retention_ms}: it must be at least twice the longest "
            f"lease ({2 * max_lease_ms})"
        )
    with Admin(config, timeout_s=timeout_s) as admin:
        log = log_settings(admin, replication_factor)
        messages = {**log, "max.message.bytes": str(max_message_bytes)}
        messages["retention.ms"] = str(message_retention_ms)
        large = {**log, "max.message.bytes": str(max_message_bytes + HEADROOM_BYTES)}
        markers = {**large, "retention.ms": str(marker_retention_ms)}
        compacted = {**log, "cleanup.policy": "compact", "segment.bytes": str(16 * 1024 * 1024)}
        wanted = {
            config.message_topic: (partitions, messages),
            config.marker_topic: (marker_partitions, markers),
            config.dead_letter_topic: (partitions, {**large, "retention.ms": "-1"}),
            config.tracker_topic: (1, compacted),
            config.ledger_topic: (ledger_partitions, compacted),
            config.quarantine_topic: (1, {**large, "retention.ms": str(30 * _DAY_MS)}),
        }
        created = admin.create_topics(wanted, replication_factor=replication_factor)
        findings = _findings(admin, config, max_lease_ms)
        deadline_s = time.monotonic() + _VISIBLE_S
        while any(_MISSING in one.text for one in findings) and time.monotonic() < deadline_s:
            time.sleep(0.05)
            findings = _findings(admin, config, max_lease_ms)
        raise_refusals(findings)
        return created


def log_settings(admin: Admin, replication_factor: int) -> dict[str, str]:
    """Return settings by which nothing vanishes but by age, and time is the broker's."""
    replicas = replication_factor
    if replicas < 0:
        replicas = int(admin.cluster().settings.get("default.replication.factor", "1"))
    return {
        "unclean.leader.election.enable": "false",
        "min.insync.replicas": "2" if replicas >= 3 else "1",
        "retention.bytes": "-1",
        "cleanup.policy": "delete",
        "message.timestamp.type": "LogAppendTime",
    }


def check_topics(
    config: ServiceConfig,
    *,
    max_lease_ms: int = Options.max_lease.default_ms,
    timeout_s: float = 30.0,
) -> list[Finding]:
    """Return what is wrong with the topics of a namespace, refusals first (R23, R25)."""
    with Admin(config, timeout_s=timeout_s) as admin:
        return _findings(admin, config, max_lease_ms)


def require_topics(
    config: ServiceConfig,
    *,
    max_lease_ms: int = Options.max_lease.default_ms,
    timeout_s: float = 30.0,
) -> list[Finding]:
    """``check_topics`` for a start: returns the warnings."""
    return raise_refusals(check_topics(config, max_lease_ms=max_lease_ms, timeout_s=timeout_s))


def raise_refusals(findings: Sequence[Finding]) -> list[Finding]:
    """Raise those that refuse; returns the others."""
    refusals = [str(finding) for finding in findings if finding.level == "refuse"]
    if refusals:
        raise ConfigError("the topics cannot be used:\n  " + "\n  ".join(refusals))
    return list(findings)


def _findings(admin: Admin, config: ServiceConfig, max_lease_ms: int) -> list[Finding]:
    names = list(config.topics.values())
    topics = admin.topics(names)
    missing = f"{_MISSING}; create it with `kafkamq create` or Service.create_topics()"
    findings = [Finding("refuse", name, missing) for name in names if name not in topics]
    for name in (config.message_topic, config.marker_topic):
        if name in topics:
            findings += _of_log(topics[name])
    if config.marker_topic in topics:
        findings += _of_markers(topics[config.marker_topic], max_lease_ms)
    if config.dead_letter_topic in topics:
        findings += _of_dead_letters(topics[config.dead_letter_topic])
    if config.tracker_topic in topics:
        findings += _of_status(topics[config.tracker_topic])
    what = "brokers refuse what a client writes whose clock is an hour ahead"
    lost = "positions and status are not kept"
    setting = "message.timestamp.type=LogAppendTime"
    for name in (config.tracker_topic, config.ledger_topic):
        if name in topics:
            mend = mending_command(config.bootstrap_servers, name, setting)
            findings += _of_time(topics[name], "warn", f"{what}, so {lost}; {mend}")
    findings += _of_sizes(topics, config)
    copied = (config.message_topic, config.marker_topic, config.dead_letter_topic)
    findings += _of_replication([topics[name] for name in copied if name in topics])
    findings += _of_other_tracker(admin, config)
    # In the order of the texts "refuse" comes before "warn".
    return sorted(findings, key=lambda finding: finding.level)


def _has(topic: TopicInfo, setting: str, default: str) -> str:
    return topic.settings.get(setting, default)


def _of_kept(topic: TopicInfo, *, if_compact: str, if_bytes: str) -> Iterator[Finding]:
    """Messages, markers and dead letters: nothing may vanish from them but by age."""
    refuse = partial(Finding, "refuse", topic.name)
    policy = _has(topic, "cleanup.policy", "delete")
    if "compact" in policy:
        yield refuse(f"cleanup.policy is {policy}: {if_compact}; set it to delete")
    if _has(topic, "retention.bytes", "-1") != "-1":
        yield refuse(if_bytes)
    if _has(topic, "unclean.leader.election.enable", "false") == "true":
        yield refuse(
            "unclean.leader.election.enable is true: confirmed records may vanish; set it to false"
        )


def _of_log(topic: TopicInfo) -> Iterator[Finding]:
    yield from _of_kept(
        topic,
        if_compact="compaction removes messages and markers",
        if_bytes="retention.bytes is set: a burst would delete what is still needed; set it to -1",
    )
    yield from _of_time(
        topic,
        "refuse",
        "one client with a wrong clock would move everybody's time; set it to LogAppendTime, and "
        "use a new namespace if the topic holds records already",
    )


def _of_time(topic: TopicInfo, level: Literal["refuse", "warn"], what: str) -> Iterator[Finding]:
    kind = _has(topic, "message.timestamp.type", "CreateTime")
    if kind != "LogAppendTime":
        yield Finding(level, topic.name, f"message.timestamp.type is {kind}: {what}")


def _of_markers(topic: TopicInfo, max_lease_ms: int) -> Iterator[Finding]:
    if 0 <= topic.retention_ms < 2 * max_lease_ms:
        yield Finding(
            "refuse",
            topic.name,
            f"retention.ms is {topic.retention_ms}: a START could be deleted while its message is "
            f"held; set it to {2 * max_lease_ms} or more (twice max_lease)",
        )


def _of_dead_letters(topic: TopicInfo) -> Iterator[Finding]:
    if topic.retention_ms != -1:
        yield Finding("refuse", topic.name, "dead letters expire; set retention.ms to -1")
    yield from _of_kept(
        topic,
        if_compact="dead letters of the same key replace each other",
        if_bytes="dead letters expire; set retention.bytes to -1",
    )


def _of_status(topic: TopicInfo) -> Iterator[Finding]:
    policy = _has(topic, "cleanup.policy", "delete")
    if policy != "compact":
        what = "set it to compact, or the status of a quiet partition vanishes"
        yield Finding("warn", topic.name, f"cleanup.policy is {policy}: {what}")


def mending_command(servers: str, topic: str, setting: str) -> str:
    return (
        f"set it: kafka-configs.sh --bootstrap-server {servers} --alter --entity-type topics "
        f"--entity-name {topic} --add-config {setting}"
    )


def _of_sizes(topics: Mapping[str, TopicInfo], config: ServiceConfig) -> Iterator[Finding]:
    limits = {name: topic.max_message_bytes for name, topic in topics.items()}
    largest = limits.get(config.message_topic, 0)
    for name in (config.marker_topic, config.dead_letter_topic):
        if name in limits and limits[name] < largest + HEADROOM_BYTES:
            yield Finding(
                "warn",
                name,
                f"max.message.bytes is {limits[name]}: the largest "
                "messages could not be delayed, or go to the dead letters without their "
                f"payload; set it to {largest + HEADROOM_BYTES} or more",
            )


def _of_replication(topics: Sequence[TopicInfo]) -> Iterator[Finding]:
    """Findings on all topics that hold messages; what is true of all is one finding."""
    few = [topic for topic in topics if topic.replication_factor < 3]
    if few:
        least = min(topic.replication_factor for topic in few)
        text = f"replication factor {least}, 3 is usual: a lost disk loses messages"
        yield Finding("warn", _names(few, topics), text)
    alone = [
        topic
        for topic in topics
        if topic.replication_factor > 1 and int(_has(topic, "min.insync.replicas", "1")) < 2
    ]
    if alone:
        text = "min.insync.replicas 1, 2 is usual: one broker may have a record alone"
        yield Finding("warn", _names(alone, topics), text)


def _names(some: Sequence[TopicInfo], topics: Sequence[TopicInfo]) -> str:
    return "" if len(some) == len(topics) else ", ".join(topic.name for topic in some)


def _of_other_tracker(admin: Admin, config: ServiceConfig) -> Iterator[Finding]:
    """R25: kafka-mq-go's tracker stops for good at the first marker that it does not know."""
    members = admin.group_assignments(FOREIGN_TRACKER_GROUP)
    # Its group has the same name for all markers topics of a cluster. A member without partitions
    # may be about to get ours.
    if any(not topics or config.marker_topic in topics for topics in members):
        yield Finding(
            "refuse",
            config.marker_topic,
            f"group {FOREIGN_TRACKER_GROUP} is live: "
            "kafka-mq-go's tracker may read these markers and would stop for good; stop "
            "it, kafkamq's tracker serves its clients too",
        )
