"""R23 as a table: which settings of which topic refuse a start, and which only warn."""

from __future__ import annotations

import pytest

from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.queue.topics import (
    HEADROOM_BYTES,
    Finding,
    _of_dead_letters,
    _of_log,
    _of_markers,
    _of_replication,
    _of_sizes,
    _of_status,
    raise_refusals,
)
from kafkamq.transport.admin import TopicInfo

GOOD = {
    "cleanup.policy": "delete",
    "retention.bytes": "-1",
    "retention.ms": "604800000",
    "message.timestamp.type": "LogAppendTime",
    "unclean.leader.election.enable": "false",
    "min.insync.replicas": "2",
    "max.message.bytes": "1048588",
}


def topic(name: str = "t", *, replication: int = 3, **changed: str) -> TopicInfo:
    settings = {**GOOD, **{key.replace("_", "."): value for key, value in changed.items()}}
    return TopicInfo(name, b"i" * 16, 4, replication, settings)


def levels(findings: object) -> list[str]:
    return [finding.level for finding in findings]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "changed",
    [
        {"cleanup_policy": "compact"},
        {"cleanup_policy": "compact,delete"},
        {"retention_bytes": "1000"},
        {"message_timestamp_type": "CreateTime"},
        {"unclean_leader_election_enable": "true"},
    ],
)
def test_messages_and_markers_refuse(changed: dict[str, str]) -> None:
    assert levels(_of_log(topic(**changed))) == ["refuse"]


def test_good_topics_have_no_findings() -> None:
    assert not list(_of_log(topic()))
    assert not list(_of_replication([topic()]))
    assert not list(_of_markers(topic(), 43_200_000))


@pytest.mark.parametrize(
    ("retention_ms", "is_enough"), [("7200000", True), ("7199999", False), ("-1", True)]
)
def test_markers_live_twice_as_long_as_the_longest_lease(
    retention_ms: str, is_enough: bool
) -> None:
    findings = list(_of_markers(topic(retention_ms=retention_ms), 3_600_000))
    assert levels(findings) == ([] if is_enough else ["refuse"])


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"retention_ms": "-1"}, []),
        ({}, ["refuse"]),
        ({"retention_ms": "-1", "retention_bytes": "1"}, ["refuse"]),
        ({"retention_ms": "-1", "cleanup_policy": "compact"}, ["refuse"]),
    ],
)
def test_dead_letters_never_expire(changed: dict[str, str], expected: list[str]) -> None:
    assert levels(_of_dead_letters(topic(**changed))) == expected


def test_the_rest_warns() -> None:
    assert levels(_of_status(topic())) == ["warn"]
    assert levels(_of_replication([topic(replication=2, min_insync_replicas="1")])) == ["warn"] * 2
    assert levels(_of_replication([topic(replication=3)])) == []


def test_what_all_topics_lack_is_one_short_line() -> None:
    one_broker = [topic(replication=1, min_insync_replicas="1") for _ in range(3)]
    (line,) = [f"warning: {finding}" for finding in _of_replication(one_broker)]
    assert line.startswith("warning: cluster: replication factor 1")
    assert len(line) < 80
    (finding,) = _of_replication([*one_broker[:1], *[topic(replication=3)] * 2])
    assert finding.topic == one_broker[0].name


@pytest.mark.parametrize(("extra", "expected"), [(HEADROOM_BYTES, []), (0, ["warn", "warn"])])
def test_markers_and_dead_letters_hold_more_than_messages(extra: int, expected: list[str]) -> None:
    config = ServiceConfig(bootstrap_servers="h:1")
    topics = {
        config.message_topic: topic(max_message_bytes="1000000"),
        config.marker_topic: topic(max_message_bytes=str(1_000_000 + extra)),
        config.dead_letter_topic: topic(max_message_bytes=str(1_000_000 + extra)),
    }
    assert levels(_of_sizes(topics, config)) == expected


def test_a_refusal_names_all_of_them_and_leaves_out_the_warnings() -> None:
    findings = [
        Finding("refuse", "a", "first"),
        Finding("refuse", "b", "second"),
        Finding("warn", "c", "third"),
    ]
    with pytest.raises(ConfigError, match=r"a: first\n.*b: second") as caught:
        raise_refusals(findings)
    assert "third" not in str(caught.value)
    assert raise_refusals(findings[2:]) == findings[2:]
