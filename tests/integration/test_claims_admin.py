"""Pauses and positions of a live group; hostile records; topics that cannot work."""

from __future__ import annotations

import random
import time
from datetime import datetime, timedelta, timezone

import pytest
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    ResourceType,
)
from tests.integration.claim_logs import ClaimTopics
from tests.waiting import wait_until, within

from kafkamq.claims import Admin, Cluster, Consumer, init_topic
from kafkamq.errors import BrokerError, ConfigError, DataLossError, DeadlineExceededError


@pytest.fixture
def topics(bootstrap: str) -> ClaimTopics:
    return ClaimTopics(bootstrap)


def drain(consumer: Consumer, count: int) -> list[int]:
    found = []
    while len(found) < count:
        message = consumer.receive(within(30.0))
        assert message is not None, found
        message.commit()
        found.append(int(message.payload or b""))
    return found


@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
def test_positions_of_a_live_group_move_all_or_nothing(topics: ClaimTopics, delivery: str) -> None:
    topics.fill(20)
    middle = datetime.now(timezone.utc) + timedelta(hours=1)  # later than all: the end
    places = [(topics.work, 0), (topics.work, 1)]

    def read(consumer: Consumer, count: int) -> list[int]:
        if delivery == "at-least-once":
            return drain(consumer, count)
        found: list[int] = []
        for batch in consumer.batches(timeout=within(30.0)):
            found += [int(message.payload or b"") for message in batch.messages]
            if len(found) >= count:
                break
        return found

    with topics.cluster() as cluster, topics.cluster() as other:
        admin = Admin(other, topics.group)
        member = cluster.member("a", topics.group)
        with member.consumer(topics.work, claims="greedy", delivery=delivery) as consumer:
            assert sorted(read(consumer, 20)) == list(range(20))
            moved = admin.set_position({places[0]: 4, places[1]: "earliest"})
            assert moved == {places[0]: 4, places[1]: 0}
            assert admin.paused_until() == 0
            assert sorted(read(consumer, 16)) == sorted([*range(8, 20, 2), *range(1, 20, 2)])
            # Clamped to the log; a time that is later than everything is the end.
            assert admin.set_position({places[0]: 99, places[1]: middle}) == {
                places[0]: 10,
                places[1]: 10,
            }
            with pytest.raises(ConfigError, match="has 2 partitions"):
                admin.set_position({(topics.work, 2): 0})
            with pytest.raises(ConfigError, match="position"):
                admin.set_position({places[0]: "first"})
            with pytest.raises(ConfigError, match="timeout"):
                admin.set_position({places[0]: 0}, timeout=0)
    assert topics.audit().dual_claims == []


def test_nothing_moves_when_one_partition_cannot_be_claimed(topics: ClaimTopics) -> None:
    topics.fill(8)
    with topics.cluster() as cluster:
        # Somebody who does not know pauses, and heartbeats forever.
        def beat() -> None:
            topics.write(f"Heartbeat/1/{int(time.time())}/i/go/{topics.group}/{topics.work}/1/3")

        beat()
        seen = cluster.member("o", topics.group)
        wait_until(lambda: seen.claim_of(topics.work, 1).client == "go")
        admin = Admin(cluster, topics.group)
        with pytest.raises(DeadlineExceededError, match=r"no position .* was changed.*\[1\]"):
            admin.set_position({(topics.work, 0): 2, (topics.work, 1): 2}, timeout=4.0)
        assert seen.claim_of(topics.work, 0).offset == 0
        assert seen.claim_of(topics.work, 1).offset == 3
        assert admin.paused_until() == 0


def test_a_paused_group_holds_nothing(topics: ClaimTopics) -> None:
    topics.fill(4)
    with topics.cluster() as cluster:
        admin = Admin(cluster, topics.group)
        with cluster.member("a", topics.group).consumer(topics.work, claims="greedy") as consumer:
            drain(consumer, 4)
            until = admin.pause(60.0)
            assert admin.paused_until() == until
            admin.wait_until_free(40.0)
            topics.fill(2, first=4)
            assert consumer.receive(0.3) is None
            # A change of positions ends its own pause, not this one.
            assert admin.set_position({(topics.work, 0): 2}) == {(topics.work, 0): 2}
            assert admin.paused_until() == until
            admin.resume()
            assert sorted(drain(consumer, 2)) == [4, 5]


def test_a_pause_lasts_as_long_as_was_asked_by_the_brokers_clock(topics: ClaimTopics) -> None:
    """Before it is written an idle log tells no time, and the process's own clock is wrong."""
    with topics.cluster() as cluster:
        cluster.ready()
        for wrong_ms in (-40_000, 40_000):
            cluster.engine.clock._now_ms += wrong_ms
            until = Admin(cluster, topics.group).pause(60.0)
            assert 50 < until - time.time() < 65
            assert cluster.paused_until(topics.group) == until


def test_old_records_do_not_set_the_clock_back(topics: ClaimTopics) -> None:
    """What a reader sees at its start was not appended just now."""
    name = f"{topics.coordination}-old"
    topics.create(name, 1, **{"message.timestamp.type": "CreateTime", "retention.ms": "-1"})
    hour_ago_ms = round(time.time() * 1000) - 3_600_000
    topics.producer.produce(name, "nonsense", partition=0, timestamp=hour_ago_ms)
    topics.producer.confirm(15)
    entry = ConfigEntry(
        "message.timestamp.type", "LogAppendTime", incremental_operation=AlterConfigOpType.SET
    )
    resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": topics.bootstrap})
    admin.incremental_alter_configs([resource])[resource].result(within(15))
    with topics.cluster(coordination_topic=name) as cluster:
        cluster.ready()
        assert sum(log.malformed for log in cluster.engine.log.logs) == 1
        assert abs(cluster.engine.clock.now_s() - time.time()) < 600


def test_hostile_records_are_counted_and_change_nothing(topics: ClaimTopics) -> None:
    chance = random.Random(3)
    now, group, work = int(time.time()), topics.group, topics.work
    hostile = [
        f"Heartbeat/1/{now}/i/c/{group}/{work}/-1/5",
        f"Heartbeat/1/{now}/i/c/{group}/{work}/{2**62}/5",
        f"Heartbeat/1/{now}/i/c/{group}/{work}/{2**80}/5",
        f"Heartbeat/1/{now}/i/a/b/{group}/{work}/0/5",
        f"Heartbeat/1/{now}/i/c/{group}/{work}/0",
        f"ClaimingPartition/1/{now}/i/c/{group}/{work}/0/1",
        "NoSuchType/1/2/3/4/5/6/7",
        "Heartbeat",
        "",
        "/" * 1000,
        "Heartbeat/1/" + "9" * 100_000,
        f"ReleaseGroup/0/{now}/i/c/{group}/{work}/3/{now + 999}",
    ]
    with topics.cluster() as cluster:
        before = cluster.member("a", topics.group)
        with before.consumer(topics.work, claims="greedy") as consumer:
            consumer.wait_for_claims(2)
            topics.write(*hostile)
            topics.write(*(chance.randbytes(chance.randint(0, 200)) for _ in range(200)))
            topics.write(hostile[0], **{"kafkamq-interval-ms": b"\xff\x00no number"})
            topics.fill(6)
            assert len(drain(consumer, 6)) == 6
            assert len(consumer.claims) == 2
        logs = cluster.engine.log.logs
        assert sum(log.impossible for log in logs) == 3
        assert sum(log.malformed for log in logs) >= 200
        assert sum(cluster.engine.log.reasons.values()) == sum(log.malformed for log in logs)
    with topics.cluster() as cluster:  # one that reads them at its start
        assert not cluster.paused_until(topics.group)
        with cluster.member("a", topics.group).consumer(topics.work, claims="greedy") as consumer:
            consumer.wait_for_claims(2)


def test_topics_that_cannot_work_are_refused(topics: ClaimTopics) -> None:
    with pytest.raises(ConfigError, match="does not exist: create it with"):
        Cluster(topics.bootstrap, coordination_topic=f"{topics.work}-none")
    for number, (setting, value) in enumerate(
        [
            ("cleanup.policy", "compact"),
            ("message.timestamp.type", "CreateTime"),
            ("retention.ms", "5000"),
        ]
    ):
        name = f"{topics.coordination}-bad{number}"
        settings = {"message.timestamp.type": "LogAppendTime", setting: value}
        topics.create(name, 1, **settings)
        with pytest.raises(ConfigError, match=setting):
            Cluster(topics.bootstrap, coordination_topic=name, heartbeat_interval=1)
        with pytest.raises(ConfigError, match=setting):
            init_topic(topics.bootstrap, name, heartbeat_interval=1)
    # Go clients' rules go by the clients' clocks anyway.
    Cluster(
        topics.bootstrap,
        coordination_topic=f"{topics.coordination}-bad1",
        heartbeat_interval=1,
        rules="peer",
    ).close()
    with pytest.raises(ConfigError, match="heartbeat_interval"):
        Cluster(topics.bootstrap, coordination_topic=topics.coordination, heartbeat_interval=0.1)
    with pytest.raises(ConfigError, match="rules"):
        Cluster(topics.bootstrap, coordination_topic=topics.coordination, rules="mine")


def test_members_must_agree_on_the_interval(topics: ClaimTopics) -> None:
    with topics.cluster() as cluster:
        cluster.member("a", topics.group).consumer(topics.work).wait_for_claims(1)
        with (
            topics.cluster(heartbeat_interval=2.0) as other,
            pytest.raises(ConfigError, match=r"2 s here and 10 s for client a"),
        ):
            other.member("b", topics.group).consumer(topics.work)


def test_with_go_clients_nothing_is_claimed_that_they_hold(bootstrap: str) -> None:
    """Their heartbeats make an owner by their own rules, whatever was claimed before."""
    topics = ClaimTopics(bootstrap)
    topics.fill(6)
    record = f"Heartbeat/1/%d/i/go/{topics.group}/{topics.work}/%d/0"
    now = int(time.time())
    topics.write(record % (now + 600, 0))  # ahead: stale for them, held by the log
    topics.write(f"ClaimingPartition/1/{now}/i/go/{topics.group}/{topics.work}/0")
    with topics.cluster(rules="peer") as cluster:
        lost: list[tuple[str, int, str]] = []
        with cluster.member("a", topics.group).consumer(
            topics.work, claims="greedy", on_lost=lambda *what: lost.append(what)
        ) as consumer:
            consumer.wait_for_claims(1)
            assert set(consumer.claims) == {(topics.work, 1)}
            assert drain(consumer, 3) == [1, 3, 5]
            topics.write(record % (int(time.time()), 1))
            wait_until(lambda: lost)
            assert lost[0][:2] == (topics.work, 1)
            assert "other rules" in lost[0][2]
            assert consumer.claims == {}


def test_a_changed_coordination_topic_ends_every_claim(topics: ClaimTopics) -> None:
    with topics.cluster() as cluster:
        consumer = cluster.member("a", topics.group).consumer(topics.work, claims="greedy")
        consumer.wait_for_claims(2)
        admin = AdminClient({"bootstrap.servers": topics.bootstrap})
        admin.create_partitions([NewPartitions(topics.coordination, 3)])[
            topics.coordination
        ].result(within(10))
        cluster.engine._topology_ms = 0  # rather than five seconds from now
        with pytest.raises(BrokerError, match="has 3 partitions, and had 2"):
            consumer.receive(within(60.0))
        assert consumer.claims == {}


def test_a_position_outside_the_log_is_an_error_or_passed_over(topics: ClaimTopics) -> None:
    topics.fill(4)
    now = int(time.time())
    topics.write(
        f"ClaimingPartition/1/{now}/i/go/{topics.group}/{topics.work}/0",
        f"ReleasingPartition/1/{now}/i/go/{topics.group}/{topics.work}/0/50",
    )
    with topics.cluster() as cluster:
        member = cluster.member("a", topics.group)
        with (
            member.consumer(topics.work, claims="greedy") as consumer,
            pytest.raises(DataLossError, match="48 behind the log's end"),
        ):
            drain(consumer, 4)
        seen = cluster.member("o", topics.group)
        assert seen.claim_of(topics.work, 0).offset == 50  # left as it was
        with member.consumer(topics.work, claims="greedy", on_data_loss="skip") as consumer:
            consumer.wait_for_claims(2)
            assert consumer.positions()[topics.work, 0] == 2
