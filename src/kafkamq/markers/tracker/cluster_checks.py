"""What ``doctor`` says of a cluster and of a namespace's topics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, ConfigError, DeadlineExceededError
from kafkamq.markers.membership import broker_session_problems, session_problem
from kafkamq.markers.overview import doubled_queues
from kafkamq.queue.topics import check_topics
from kafkamq.transport.admin import Admin, ClusterInfo, require_brokers
from kafkamq.transport.broker_release import broker_release

TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report; ``level`` is ok, warn or refuse."""

    level: str
    what: str
    text: str


def cluster_checks(
    config: ServiceConfig, *, max_lease_ms: int, redelivery_timeout_ms: int = 10_000
) -> Iterator[Check]:
    """One check after another; what cannot be asked is a refusal that ends them."""
    try:
        require_brokers(config)
        with Admin(config, timeout_s=TIMEOUT_S) as admin:
            cluster = admin.cluster()
        brokers = ", ".join(cluster.brokers.values())
        yield Check("ok", "brokers", f"{len(cluster.brokers)} ({brokers})")
        yield Check("ok", "kafka", kafka_version(config, cluster))
        findings = check_topics(config, max_lease_ms=max_lease_ms, timeout_s=TIMEOUT_S)
        yield from _sessions(config, cluster, redelivery_timeout_ms)
        yield from _messages(config, cluster, max_lease_ms)
    except (BrokerError, ConfigError, DeadlineExceededError) as error:
        yield Check("refuse", "cluster", str(error))
        return
    for finding in findings:
        yield Check(finding.level, finding.topic or "cluster", finding.text)
    if not findings:
        yield Check("ok", "topics", f"those of namespace {config.namespace} are as they should be")


def _sessions(
    config: ServiceConfig, cluster: ClusterInfo, redelivery_timeout_ms: int
) -> Iterator[Check]:
    """How soon the group of a queue notices that a worker is dead."""
    problems = [session_problem(config, redelivery_timeout_ms)]
    problems += broker_session_problems(config, cluster.settings, redelivery_timeout_ms)
    for problem in filter(None, problems):
        yield Check("warn", "sessions", problem)


def _messages(config: ServiceConfig, cluster: ClusterInfo, max_lease_ms: int) -> Iterator[Check]:
    """What depends on how long messages are kept, and who works on their queues."""
    with Admin(config, timeout_s=TIMEOUT_S) as admin:
        messages = admin.topics([config.message_topic]).get(config.message_topic)
    if messages is None:  # it is said elsewhere
        return
    retention_ms = messages.retention_ms
    if not messages.topic_id:
        text = "no markers can be batched: the brokers tell no ids of topics (Kafka before 2.8)"
        yield Check("warn", "batches", text)
    elif 0 <= retention_ms <= 2 * max_lease_ms:  # R28
        yield Check(
            "warn",
            "batches",
            f"no markers can be batched: {messages.name} keeps messages for {retention_ms} ms, "
            f"so none outlives a lease of {max_lease_ms} ms by far; set retention.ms to more than "
            f"{2 * max_lease_ms}, or the max_lease of the queues lower",
        )
    yield from _groups(config, cluster, retention_ms)


def _groups(config: ServiceConfig, cluster: ClusterInfo, retention_ms: int) -> Iterator[Check]:
    """What Kafka forgets of groups, and queues that two groups work on."""
    kept_min = int(cluster.settings.get("offsets.retention.minutes", "10080"))
    if not 0 <= retention_ms <= kept_min * 60_000:
        yield Check(
            "warn",
            "groups",
            f"offsets.retention.minutes is {kept_min}, messages are kept for longer: queues of the "
            "markers backend have their positions in the ledger, other groups that are empty for "
            "so long begin again; raise it",
        )
    for queue_id in doubled_queues(config):
        yield Check(
            "warn",
            "groups",
            f"kafka-mq-go's workers and kafkamq's both work on queue {queue_id!r}, each in a group "
            f"of its own: each gets every message; open it with group='kafka-mq-{queue_id}', or "
            "delete the group that is left over",
        )


def kafka_version(config: ServiceConfig, cluster: ClusterInfo) -> str:
    """The release of one broker; where it does not tell, what its settings give away."""
    for address in cluster.brokers.values():
        release = broker_release(config, address)
        if release is not None:
            return release
    # The setting is gone in Kafka 4.
    return cluster.settings.get("inter.broker.protocol.version", "4.0 or newer")
