"""Topics on a real broker: made, made again, checked; questions to a cluster that is not there."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient, NewTopic
from tests.waiting import wait_until, within

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, ConfigError, DeadlineExceededError, KafkaMQError
from kafkamq.queue.topics import FOREIGN_TRACKER_GROUP, check_topics, create_topics, require_topics
from kafkamq.transport.admin import Admin


@pytest.fixture
def config(bootstrap: str, namespace: str) -> ServiceConfig:
    return ServiceConfig(bootstrap_servers=bootstrap, namespace=namespace)


def id_of(config: ServiceConfig, topic: str) -> bytes:
    with Admin(config) as admin:
        return admin.require_topic(topic).topic_id


def refusals(config: ServiceConfig) -> list[str]:
    return [str(finding) for finding in check_topics(config) if finding.level == "refuse"]


def test_created_topics_are_accepted_and_a_second_time_changes_nothing(
    config: ServiceConfig,
) -> None:
    created = create_topics(config, partitions=3, marker_partitions=5)
    assert set(created) == {
        config.message_topic,
        config.marker_topic,
        config.dead_letter_topic,
        config.tracker_topic,
        config.ledger_topic,
        config.quarantine_topic,
    }
    assert refusals(config) == []
    assert create_topics(config, partitions=4, marker_partitions=9) == ()
    with Admin(config) as admin:
        assert admin.require_topic(config.message_topic).partitions == 3
        assert admin.require_topic(config.marker_topic).partitions == 5
    warnings = require_topics(config)
    assert any("replication" in warning.text for warning in warnings)  # one broker


def test_settings_of_created_topics(config: ServiceConfig) -> None:
    create_topics(config, partitions=1, marker_partitions=1, max_message_bytes=2_000_000)
    names = (
        config.message_topic,
        config.marker_topic,
        config.dead_letter_topic,
        config.tracker_topic,
        config.ledger_topic,
    )
    with Admin(config) as admin:
        topics = admin.topics(names)
    messages, markers, letters, status, ledger = (topics[name].settings for name in names)
    for settings in (messages, markers, letters, status, ledger):
        assert settings["message.timestamp.type"] == "LogAppendTime"
    for settings in (messages, markers, letters):
        assert settings["cleanup.policy"] == "delete"
        assert settings["retention.bytes"] == "-1"
        assert settings["unclean.leader.election.enable"] == "false"
    assert messages["max.message.bytes"] == "2000000"
    assert markers["max.message.bytes"] == letters["max.message.bytes"] == "2065536"
    assert markers["retention.ms"] == str(7 * 86_400_000)
    assert letters["retention.ms"] == "-1"
    assert status["cleanup.policy"] == "compact"


def test_existing_topics_are_checked_and_never_altered(
    config: ServiceConfig, bootstrap: str
) -> None:
    """kmq makes its markers topic so: with the client's time, and compacted."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    new = NewTopic(config.marker_topic, 2, 1, config={"cleanup.policy": "compact"})
    admin.create_topics([new])[config.marker_topic].result(within(30))
    with pytest.raises(ConfigError, match="LogAppendTime") as caught:
        create_topics(config)
    assert "compaction" in str(caught.value)
    with Admin(config) as ours:
        assert ours.require_topic(config.marker_topic).settings["cleanup.policy"] == "compact"


def test_topics_that_refuse_clients_with_a_fast_clock_are_told(
    config: ServiceConfig, bootstrap: str
) -> None:
    """Those of earlier versions have the time of clients; an hour ahead, and nothing is kept."""
    names = (config.tracker_topic, config.ledger_topic)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    old = {"cleanup.policy": "compact", "message.timestamp.type": "CreateTime"}
    for future in admin.create_topics(
        [NewTopic(name, 1, 1, config=old) for name in names]
    ).values():
        future.result(within(30))
    create_topics(config, partitions=1, marker_partitions=1)
    told = {each.topic: each for each in check_topics(config) if "CreateTime" in each.text}
    assert set(told) == set(names)
    for name, finding in told.items():
        assert finding.level == "warn"
        assert f"--entity-name {name} --add-config message.timestamp.type=Log" in finding.text


def test_missing_topics_are_named(config: ServiceConfig) -> None:
    with pytest.raises(ConfigError, match="kafkamq create") as caught:
        require_topics(config)
    assert config.marker_topic in str(caught.value)
    with pytest.raises(BrokerError, match="kafkamq create"):
        id_of(config, config.message_topic)


def test_topic_ids_follow_a_topic_that_is_recreated(config: ServiceConfig, bootstrap: str) -> None:
    create_topics(config, partitions=1, marker_partitions=1)
    before = id_of(config, config.message_topic)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.delete_topics([config.message_topic])[config.message_topic].result(within(30))
    with Admin(config) as ours:
        wait_until(lambda: not ours.topics([config.message_topic]))
    create_topics(config, partitions=1, marker_partitions=1)
    after = id_of(config, config.message_topic)
    assert len(before) == len(after) == 16
    assert before != after


@pytest.mark.parametrize(
    "arguments",
    [
        {"partitions": 0},
        {"marker_partitions": -1},
        {"replication_factor": 0},
        {"marker_retention_ms": 3_600_000},
    ],
)
def test_arguments_that_cannot_work(config: ServiceConfig, arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        create_topics(config, **arguments)


def test_more_replicas_than_brokers(config: ServiceConfig) -> None:
    with pytest.raises(BrokerError, match="replication") as caught:
        create_topics(config, replication_factor=3)
    assert caught.value.code == "INVALID_REPLICATION_FACTOR"


def test_a_live_foreign_tracker_is_refused(config: ServiceConfig, bootstrap: str) -> None:
    """R25: kafka-mq-go's tracker would stop at our first marker."""
    create_topics(config, partitions=1, marker_partitions=1)
    foreign = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": FOREIGN_TRACKER_GROUP,
            "session.timeout.ms": 6000,
        }
    )
    try:
        foreign.subscribe([config.marker_topic])
        wait_until(lambda: foreign.poll(0.05) is None and bool(foreign.assignment()))
        (refusal,) = refusals(config)
        assert FOREIGN_TRACKER_GROUP in refusal
    finally:
        foreign.close()
    wait_until(lambda: refusals(config) == [])


def test_a_foreign_tracker_of_other_topics_is_no_obstacle(
    config: ServiceConfig, bootstrap: str
) -> None:
    create_topics(config, partitions=1, marker_partitions=1)
    other = ServiceConfig(bootstrap_servers=bootstrap, namespace=f"{config.namespace}-other")
    create_topics(other, partitions=1, marker_partitions=1)
    foreign = Consumer({"bootstrap.servers": bootstrap, "group.id": FOREIGN_TRACKER_GROUP})
    try:
        foreign.subscribe([other.marker_topic])
        wait_until(lambda: foreign.poll(0.05) is None and bool(foreign.assignment()))
        assert refusals(config) == []
        assert refusals(other)
    finally:
        foreign.close()


def test_the_cluster_is_described(config: ServiceConfig, bootstrap: str) -> None:
    with Admin(config) as admin:
        cluster = admin.cluster()
    assert cluster.cluster_id
    assert list(cluster.brokers.values()) == [bootstrap]
    assert cluster.settings["auto.create.topics.enable"] == "false"


# ---- clusters that do not answer


@contextmanager
def silent_server() -> Iterator[str]:
    """Takes connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()[:2]
        yield f"{host}:{port}"


Question = Callable[[ServiceConfig], object]
QUESTIONS: list[Question] = [
    lambda config: create_topics(config, timeout_s=2),
    lambda config: check_topics(config, timeout_s=2),
    lambda config: Admin(config, timeout_s=2).require_topic(config.message_topic),
]


@pytest.mark.parametrize("ask", QUESTIONS)
@pytest.mark.parametrize("kind", ["refused", "silent"])
def test_every_question_ends_within_its_bound(ask: Question, kind: str) -> None:
    with silent_server() as silent:
        servers = "127.0.0.1:1" if kind == "refused" else silent
        with pytest.raises(DeadlineExceededError) as caught:
            ask(ServiceConfig(bootstrap_servers=servers))
    assert servers in str(caught.value)


def test_wrong_credentials_are_reported_before_the_bound(bootstrap: str) -> None:
    config = ServiceConfig(
        bootstrap_servers=bootstrap,
        kafka={
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "somebody",
            "sasl.password": "do-not-show-this",
        },
    )
    with pytest.raises(KafkaMQError, match=r"sasl\.username") as caught:
        check_topics(config, timeout_s=60)
    assert isinstance(caught.value, BrokerError)
    assert caught.value.code == "_AUTHENTICATION"
    assert not caught.value.is_retriable
    assert "do-not-show-this" not in str(caught.value)
