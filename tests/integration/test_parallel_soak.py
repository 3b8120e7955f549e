"""Members that are killed and stopped: nothing lost, keys in order, never stuck."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, ConsumerGroupState
from confluent_kafka.admin import AdminClient
from tests.integration.parallel_soak import soak
from tests.integration.parallel_tools import committed, fill, make, make_topic
from tests.waiting import wait_until, within

from kafkamq.dev import LocalKafka, cache_dir_from, java_from

_log = logging.getLogger(__name__)
WATCHFUL = {  # Kafka's defaults miss a killed member of a group.protocol=consumer after 45 s
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": "6000",
    "group.consumer.min.heartbeat.interval.ms": "500",
    "group.consumer.heartbeat.interval.ms": "1000",
}


@pytest.fixture(scope="module")
def watchful() -> Iterator[LocalKafka]:
    """A broker that soon misses a member that was killed, whatever the group's protocol."""
    with LocalKafka(
        properties=WATCHFUL, cache_dir=cache_dir_from(os.environ), java=java_from(os.environ)
    ) as broker:
        yield broker


@pytest.mark.faults
@pytest.mark.slow
def test_a_short_soak(bootstrap: str, namespace: str) -> None:
    verdict = soak(
        bootstrap,
        namespace,
        seed=7,
        members=2,
        records=15_000,
        pause_s=(0.8, 1.6),
        kill_share=0.5,
        calm_after_s=20,
        timeout_s=120,
    )
    assert verdict.lost == 0
    assert verdict.disorder == []
    assert verdict.unexplained == []
    assert verdict.kills + verdict.stops >= 1


@pytest.mark.faults
@pytest.mark.parametrize("protocol", ["classic", "broker"])
@pytest.mark.parametrize("members", [2, 12])
def test_a_long_soak(
    watchful: LocalKafka,
    namespace: str,
    members: int,
    protocol: str,
) -> None:
    verdict = soak(
        watchful.bootstrap_servers,
        namespace,
        seed=members,
        members=members,
        records=500_000,
        pause_s=(0.1, 0.5) if members == 12 else (1.0, 3.0),
        kill_share=0.3,
        calm_after_s=150,
        timeout_s=300,
        protocol=protocol,
    )
    _log.info("%s", verdict)
    assert verdict.lost == 0
    assert verdict.disorder == []
    assert verdict.unexplained == []
    assert verdict.kills and verdict.stops


@pytest.mark.faults
def test_transactions_survive_kills(bootstrap: str, namespace: str) -> None:
    """Who reads committed data sees the result of each record exactly once."""
    verdict = soak(
        bootstrap,
        namespace,
        seed=11,
        members=3,
        records=60_000,
        pause_s=(1.5, 3.0),
        kill_share=0.7,
        calm_after_s=60,
        timeout_s=120,
        mode="transactional",
    )
    _log.info("%s", verdict)
    assert verdict.kills
    assert (verdict.lost, verdict.repeated, verdict.disorder) == (0, 0, [])


SILENT = """
import sys
from confluent_kafka import Consumer, ConsumerGroupState
member = Consumer({
    "bootstrap.servers": sys.argv[1], "group.id": sys.argv[2], "session.timeout.ms": 6000,
    "partition.assignment.strategy": "cooperative-sticky", "enable.auto.commit": False,
})
member.subscribe([sys.argv[2]])
while True:
    member.poll(0.1)
"""


@pytest.mark.faults
def test_what_is_done_while_the_group_waits_for_a_member_is_committed(
    bootstrap: str, namespace: str
) -> None:
    """The last commit stands behind the member's own join, and comes out in another generation."""
    topic = make_topic(bootstrap, namespace, 2)
    assigned: list[int] = []
    begun, may_end, done = threading.Event(), threading.Event(), []

    def handle(record: object) -> None:
        begun.set()
        assert may_end.wait(within(60))
        done.append(record)

    member = make(
        bootstrap,
        topic,
        topic,
        kafka={"session.timeout.ms": "30000"},
        on_assigned=lambda places: assigned.extend(partition for _, partition in places),
        on_revoked=lambda places, _: [assigned.remove(partition) for _, partition in places],
    )
    member.poll(handle)
    silent = subprocess.Popen([sys.executable, "-c", SILENT, bootstrap, topic])
    admin = AdminClient({"bootstrap.servers": bootstrap})

    def group() -> tuple[ConsumerGroupState, int]:
        found = admin.describe_consumer_groups([topic])[topic].result(within(30))
        return found.state, sum(bool(each.assignment) for each in found.members)

    try:
        wait_until(lambda: len(assigned) == 1, what="one partition each")
        wait_until(lambda: group() == (ConsumerGroupState.STABLE, 2), what="two members")
        fill(bootstrap, topic, ["k"], partition=assigned[0])
        assert begun.wait(within(30))
        silent.send_signal(signal.SIGSTOP)
        newcomer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": topic,
                "partition.assignment.strategy": "cooperative-sticky",
            }
        )
        newcomer.subscribe([topic])
        wait_until(lambda: group()[0] is ConsumerGroupState.PREPARING_REBALANCING)
        may_end.wait(2)  # two heartbeats: the member asks to join again, and waits
        may_end.set()
        place = assigned[0]
        member.close()
        newcomer.close()
    finally:
        silent.kill()
        silent.wait()
        member.close()
    assert len(done) == 1
    assert committed(bootstrap, topic, topic, place) == (1, "")
