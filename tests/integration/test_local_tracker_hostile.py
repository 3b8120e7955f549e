"""What a tracker meets that should not be there: bad records, bad topics, sizes, lost positions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)
from harness.markers import read_positions
from tests.integration.queue_logs import delete_group
from tests.integration.tracker_logs import Logs
from tests.waiting import wait_until, within

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.errors import (
    BrokerError,
    ConfigError,
    DataLossError,
    DeadlineExceededError,
    UnsupportedVersionError,
)
from kafkamq.markers.tracker.ledger import LedgerKey
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.markers.tracker.records import Quarantine, Ticker
from kafkamq.markers.wire.marker_writer import encode_end
from kafkamq.transport.admin import Admin
from kafkamq.transport.log_reader import RecordReader
from kafkamq.types import MessageId, Outcome

FAST = TrackerConfig(position_interval_ms=200)


@pytest.fixture
def logs(bootstrap: str, namespace: str) -> Logs:
    return Logs(bootstrap, namespace)


@pytest.fixture
def tracked(logs: Logs) -> Iterator[Logs]:
    with LocalTracker(logs.config, FAST).in_thread() as tracker:
        wait_until(lambda: tracker.is_live)
        yield logs


def alter(logs: Logs, topic: str, name: str, value: str) -> None:
    resource = ConfigResource(
        ResourceType.TOPIC,
        topic,
        incremental_configs=[ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)],
    )
    admin = AdminClient({"bootstrap.servers": logs.bootstrap})
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(within(30))
    with Admin(logs.config) as asked:  # the broker learns of it a moment later
        wait_until(lambda: asked.require_topic(topic).settings[name] == value)


def test_records_that_are_no_markers_are_set_aside_and_passed(tracked: Logs) -> None:
    bad = [None, b"", b"\xff\xff\xff", b"\x10\x05", encode_end(MessageId(0, 1), Outcome.ACK)[:-1]]
    (id_,) = tracked.send()
    place = tracked.place(id_)
    offsets = [tracked.raw_marker(place, value, key=b"k") for value in bad]
    tracked.start(id_, timeout_ms=500)
    offsets.append(tracked.raw_marker(place, b"garbage between them"))
    wait_until(lambda: tracked.ends(Outcome.REDELIVERED) == [id_])
    # Only the tracker's position waits for these.
    wait_until(lambda: len(tracked.read(tracked.config.quarantine_topic)) >= len(offsets))
    kept = tracked.read(tracked.config.quarantine_topic)
    origins = [dict(message.headers() or ())["kafkamq-origin"] for message in kept]
    places = [tuple(origin.decode().split("/")[:3]) for origin in origins]
    assert places == [(tracked.config.marker_topic, str(place), str(n)) for n in offsets]
    assert [message.value() for message in kept] == [*bad, b"garbage between them"]
    assert all(dict(message.headers() or ())["kafkamq-error"] for message in kept)


def test_a_quarantine_that_cannot_be_written_holds_the_position_and_nothing_else(
    tracked: Logs,
) -> None:
    (id_,) = tracked.send()
    place = tracked.place(id_)
    key = LedgerKey.of_markers(tracked.config, place)

    def position() -> int:
        return read_positions(tracked.config, [key])[key].position

    topic = tracked.config.quarantine_topic
    admin = AdminClient({"bootstrap.servers": tracked.bootstrap})
    admin.delete_topics([topic])[topic].result(within(30))
    wait_until(lambda: topic not in admin.list_topics(timeout=within(10)).topics)
    bad = tracked.raw_marker(place, b"no marker")
    for message in (id_, *tracked.send(2)):
        tracked.start(message, timeout_ms=500)
        wait_until(lambda: message in tracked.ends(Outcome.REDELIVERED))  # noqa: B023
    assert position() <= bad
    admin.create_topics([NewTopic(topic, 1)])[topic].result(within(30))
    wait_until(lambda: [each.value() for each in tracked.read(topic)] == [b"no marker"])
    wait_until(lambda: position() > bad)


def test_a_tracker_goes_on_without_the_topics_that_it_only_writes_to(
    bootstrap: str,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """librdkafka refuses records at once when a topic has not been there for some time."""
    logs = Logs(bootstrap, namespace, kafka={"topic.metadata.propagation.max.ms": "100"})
    gone = [logs.config.quarantine_topic, logs.config.tracker_topic]
    refused: set[str] = set()
    for kind, name in ((Quarantine, "_delivered"), (Ticker, "_published")):
        told = getattr(kind, name)

        def seen(self: Any, what: Any, error: Any, told: Any = told, name: str = name) -> None:
            if isinstance(error, BrokerError):  # raised, and not reported
                refused.add(name)
            told(self, what, error)

        monkeypatch.setattr(kind, name, seen)
    with LocalTracker(logs.config, FAST).in_thread() as tracker:
        wait_until(lambda: tracker.is_live)
        admin = AdminClient({"bootstrap.servers": bootstrap})
        for deleted in admin.delete_topics(gone).values():
            deleted.result(within(30))

        def are_missed() -> bool:
            logs.raw_marker(1, b"no marker")  # something to tell, of both kinds
            return tracker.is_over or len(refused) == 2

        wait_until(are_missed)
        (id_,) = logs.send()
        logs.start(id_, timeout_ms=500)
        wait_until(lambda: tracker.is_over or logs.ends(Outcome.REDELIVERED) == [id_])
    for topic in gone:
        assert caplog.text.count(f"writing to {topic} failed") == 1


def test_what_comes_behind_a_logs_former_end_is_found(logs: Logs) -> None:
    """Else one START that names no message would cost others their payloads for a minute."""
    logs.send(3)
    reader = RecordReader(logs.config, logs.config.message_topic)
    assert [reader.read(0, 3), reader.read(0, 5)] == [None, None]
    logs.send(2, value=b"large")
    for offset in (3, 4):
        found = reader.read(0, offset)
        assert found is not None
        assert found.value() == b"large"
    assert reader.read(0, 5) is None
    reader.close()


def test_starts_that_name_nothing_hold_up_no_other_one(tracked: Logs) -> None:
    """R18: while they are looked for for a minute."""
    (id_,) = tracked.send()
    inventions = [MessageId(99, 0), replace(id_, offset=1 << 40), replace(id_, topic_id=b"x" * 16)]
    tracked.start(*inventions, timeout_ms=1, value=None, by_reference=True)
    tracked.start(id_, timeout_ms=100)
    wait_until(lambda: tracked.ends(Outcome.REDELIVERED, Outcome.DEAD_LETTERED) != [])
    assert tracked.ends(Outcome.REDELIVERED) == [id_]
    assert not tracked.dead_letters()


def test_a_newer_version_stops_the_tracker(logs: Logs) -> None:
    tracker = LocalTracker(logs.config, FAST)
    stops = pytest.raises(UnsupportedVersionError, match="upgrade")
    with stops as caught, tracker.in_thread():
        wait_until(lambda: tracker.is_live)
        offset = logs.raw_marker(1, b"\x08\x03" + encode_end(MessageId(0, 1), Outcome.ACK))
        wait_until(lambda: tracker.is_over)
    assert (caught.value.partition, caught.value.offset) == (1, offset)
    assert not logs.read(logs.config.quarantine_topic)


@pytest.mark.parametrize(
    ("topic", "name", "value", "said"),
    [
        ("marker_topic", "message.timestamp.type", "CreateTime", "LogAppendTime"),
        ("marker_topic", "cleanup.policy", "compact", "compaction"),
        ("marker_topic", "retention.ms", "3600000", "max_lease"),
        ("message_topic", "retention.bytes", "1000000", "retention.bytes"),
        ("dead_letter_topic", "retention.ms", "3600000", "expire"),
    ],
)
def test_topics_that_cannot_work_are_refused(
    logs: Logs, topic: str, name: str, value: str, said: str
) -> None:
    full_name = getattr(logs.config, topic)
    alter(logs, full_name, name, value)
    with pytest.raises(ConfigError, match=said) as caught:
        LocalTracker(logs.config)
    assert full_name in str(caught.value)


def test_a_position_below_the_logs_start_is_never_passed_over(logs: Logs) -> None:
    ids = logs.send(10)
    logs.start(*ids, timeout_ms=3_600_000)
    place = logs.place(ids[0])
    with LocalTracker(logs.config, FAST).in_thread() as tracker:
        wait_until(lambda: tracker.is_live)
    admin = AdminClient({"bootstrap.servers": logs.bootstrap})
    for future in admin.delete_records(
        [TopicPartition(logs.config.marker_topic, place, 4)]
    ).values():
        future.result(within(30))
    again = LocalTracker(logs.config, FAST)
    with pytest.raises(DataLossError, match="up to 4 records"), again.in_thread():
        wait_until(lambda: again.is_over)


def expire(logs: Logs) -> None:
    """What Kafka does to ledgers that nobody wrote to for offsets.retention.minutes."""
    for number in range(logs.marker_partitions):
        delete_group(logs.bootstrap, LedgerKey.of_markers(logs.config, number).transactional_id)


def delete_before(logs: Logs, number: int, offset: int) -> None:
    admin = AdminClient({"bootstrap.servers": logs.bootstrap})
    place = TopicPartition(logs.config.marker_topic, number, offset)
    for future in admin.delete_records([place]).values():
        future.result(within(30))


def test_starts_that_were_deleted_unread_are_noticed_though_the_position_expired(
    logs: Logs,
) -> None:
    """The tracker stood still for longer than Kafka keeps offsets and than retention keeps markers.

    The status of the last one still says how far it was; an operator's offset ends the alarm.
    """
    ids = logs.send(10)
    place = logs.place(ids[0])
    key = LedgerKey.of_markers(logs.config, place)
    with LocalTracker(logs.config, FAST).in_thread() as tracker:
        wait_until(lambda: tracker.is_live)
        logs.start(*ids[:5], timeout_ms=300)
        wait_until(lambda: len(logs.ends(Outcome.REDELIVERED)) == 5)
        with Admin(logs.config) as asked:  # the last records are those of a transaction
            wait_until(
                lambda: (
                    asked.log_bounds(logs.config.marker_topic, [place])[place][1]
                    in {each.position for each in tracker.statuses() if each.partition == place}
                )
            )
    expire(logs)
    delete_before(logs, place, -1)  # everything
    with LocalTracker(logs.config, FAST).in_thread() as tracker:  # all that is gone was read
        wait_until(lambda: tracker.is_live)
    (first, *_) = logs.start(*ids[5:], timeout_ms=3_600_000)
    expire(logs)
    delete_before(logs, place, first + 2)
    for _ in range(2):
        again = LocalTracker(logs.config, FAST)
        said = r"records were deleted .* --to-earliest"
        with pytest.raises(DataLossError, match=said) as caught, again.in_thread():
            wait_until(lambda: again.is_over or again.is_live)  # noqa: B023 - at once
    assert key.transactional_id in str(caught.value)
    set_by_hand = ConsumerGroupTopicPartitions(
        key.transactional_id, [TopicPartition(key.topic, key.partition, first + 2)]
    )
    admin = AdminClient({"bootstrap.servers": logs.bootstrap})
    admin.alter_consumer_group_offsets([set_by_hand])[key.transactional_id].result(within(30))
    with LocalTracker(logs.config, TrackerConfig(takeover=False)).in_thread() as tracker:
        wait_until(lambda: tracker.is_live)
        wait_until(lambda: sum(each.entries for each in tracker.statuses()) == 3)


def test_a_log_whose_control_records_were_deleted_lost_nothing(logs: Logs) -> None:
    (id_,) = logs.send()
    place = logs.place(id_)
    key = LedgerKey.of_markers(logs.config, place)
    with LocalTracker(logs.config, FAST).in_thread() as tracker:
        wait_until(lambda: tracker.is_live)
        logs.start(id_, timeout_ms=300)
        wait_until(lambda: logs.ends(Outcome.REDELIVERED) == [id_])
        # The last records are an END and its transaction's commit record, and perhaps a TICK.
        topic = logs.config.marker_topic
        with Admin(logs.config) as asked:
            wait_until(
                lambda: (
                    read_positions(logs.config, [key])[key].position
                    == asked.log_bounds(topic, [place])[place][1]
                )
            )
    admin = AdminClient({"bootstrap.servers": logs.bootstrap})
    for future in admin.delete_records(
        [TopicPartition(logs.config.marker_topic, place, -1)]  # everything
    ).values():
        future.result(within(30))
    again = LocalTracker(logs.config, FAST)
    with again.in_thread():
        wait_until(lambda: again.is_live or again.is_over)


def test_a_broker_that_is_down_ends_the_start_within_its_bound() -> None:
    config = ServiceConfig(bootstrap_servers="127.0.0.1:1", namespace="nobody")
    with pytest.raises(DeadlineExceededError, match=r"127\.0\.0\.1:1"):
        LocalTracker(config, timeout_s=2.0)


@pytest.mark.parametrize("is_known_before", [True, False])
def test_a_copy_that_does_not_fit_becomes_a_dead_letter(logs: Logs, is_known_before: bool) -> None:
    """R11: the limit is either known when the copy is prepared, or the broker says it."""
    first, small, large, other = logs.send(4, value=b"x" * 6000)
    if is_known_before:
        alter(logs, logs.config.message_topic, "max.message.bytes", "5000")
    with LocalTracker(logs.config, FAST).in_thread() as tracker:
        wait_until(lambda: tracker.is_live)
        if not is_known_before:  # the tracker has looked at the topic, and will do so in a minute
            logs.start(first, timeout_ms=300, value=b"first")
            wait_until(lambda: logs.ends(Outcome.REDELIVERED) == [first])
            alter(logs, logs.config.message_topic, "max.message.bytes", "5000")
        ids = [small, large, other]
        values = [b"small", b"x" * 6000, b"other"]
        data = [(id_, value) for id_, value in zip(ids, values, strict=True)]
        for id_, value in data:
            logs.start(id_, timeout_ms=1000, value=value)
        wait_until(
            lambda: (
                set(logs.ends(Outcome.REDELIVERED)) >= {small, other}
                and logs.ends(Outcome.DEAD_LETTERED) == [large]
            )
        )
    ((letter, headers),) = logs.dead_letters()
    assert headers["kafkamq-reason"] == b"payload-lost"
    assert b"max.message.bytes" in (headers["kafkamq-error"] or b"")
    assert letter.value() is None
    assert headers["kafkamq-payload-at"] == (
        f"{logs.config.message_topic}/0/{large.offset}/{logs.sent[large]}".encode()
    )
    copied = Counter(logs.copied())
    copied.pop((0, first.offset), None)
    assert copied == Counter({(0, small.offset): 1, (0, other.offset): 1})
