"""F8, F9: broker clocks that step, disks that are full, links that are slow."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from harness.faults import (
    BrokerClock,
    KafkaCluster,
    SlowLink,
    why_no_clock,
    why_no_network,
)
from tests.faults.stage import Stage
from tests.integration.queue_logs import (
    die,
    ends,
    make_service,
    receive_all,
    tracked,
)
from tests.waiting import wait_until

from kafkamq.dev import Listener, LocalKafka, cache_dir_from, java_from
from kafkamq.errors import KafkaMQError
from kafkamq.queue.names import group_of
from kafkamq.transport.admin import Admin
from kafkamq.types import Outcome

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

HOUR_S = 3600
FROM_ENVIRONMENT = {"cache_dir": cache_dir_from(os.environ), "java": java_from(os.environ)}


@pytest.mark.skipif(bool(why_no_clock()), reason=why_no_clock() or "it can")
def test_the_clock_of_a_broker_steps(namespace: str, tmp_path: Path) -> None:
    """F8, R1, R3: an hour ahead, back, an hour behind, and back, under load.

    Only what is open at a step may come back early; live workers keep what they hold. The clocks
    of a tracker, a worker and the sender are wrong throughout, and mean nothing.
    """
    (tmp_path / "clock").mkdir()
    clock = BrokerClock(tmp_path / "clock")
    with (
        LocalKafka(
            launcher=clock.launcher,
            cache_dir=cache_dir_from(os.environ),
            java=java_from(os.environ),
        ) as kafka,
        Stage(kafka.bootstrap_servers, namespace, tmp_path, work_s=0.002) as stage,
    ):
        stage.start("tracker")
        stage.start("tracker", clock_ahead_s=HOUR_S)
        workers = [stage.start("worker"), stage.start("worker", clock_ahead_s=-HOUR_S)]
        stage.start("sender", count=5000, rate=200.0, delayed=0.01, clock_ahead_s=HOUR_S)
        stage.wait_until(lambda: stage.count("received") > 300)
        for offset_s in (HOUR_S, 0, -HOUR_S, 0):
            stage.fault(f"clock {offset_s:+d} s", "broker")
            clock.set(offset_s)
            time.sleep(3.0)
        stage.replace(workers[0])
        stage.healed()
        stage.wait_for_senders()
        stage.drain()
        report = stage.judge("F8 broker clock +-1 h")
        stamps = [record.timestamp_ms for record in stage.records().markers]
    report.require_ok(f"seed {stage.seed}: ")
    assert report.sent == 5000
    assert max(stamps) - min(stamps) > 1.9 * HOUR_S * 1000  # the steps are in the log


@pytest.mark.skipif(bool(why_no_network()), reason=why_no_network() or "it can")
def test_the_disk_of_a_broker_is_full(namespace: str, tmp_path: Path) -> None:
    """F9: that broker stops; the others go on; it comes back when there is room."""
    small = 160 * 1024 * 1024
    properties = {"log.segment.bytes": "8388608", "log.index.size.max.bytes": "65536"}
    try:
        cluster = KafkaCluster(properties=properties, disks={1: small}, **FROM_ENVIRONMENT)
    except KafkaMQError as error:
        pytest.skip(f"no small disks on this machine: {error}")
    with cluster, Stage(cluster.bootstrap_servers, namespace, tmp_path) as stage:
        for role in ("tracker", "worker", "worker"):
            stage.start(role)
        stage.start("sender", count=5000, rate=200.0, payload_bytes=4000)
        stage.wait_until(lambda: stage.count("received") > 300)
        stage.fault("disk full", "broker 1")
        cluster.fill_disk(1)
        stage.wait_until(lambda: not cluster.brokers[1].is_running, timeout_s=60)
        time.sleep(3.0)
        cluster.free_disk(1)
        cluster.heal()
        stage.healed()
        stage.wait_for_senders()
        stage.drain()
        report = stage.judge("F9 disk of a broker full")
    report.require_ok(f"seed {stage.seed}: ")
    assert report.sent == 5000


def test_a_slow_link(namespace: str, tmp_path: Path) -> None:
    """Everybody 100 ms away from the broker, and 400 ms for a while."""
    with SlowLink(delay_s=0.05) as link:
        door = Listener(name="SLOW", protocol="PLAINTEXT", advertised=link.address)
        with LocalKafka(listeners=[door], **FROM_ENVIRONMENT) as kafka:
            link.target = ("127.0.0.1", kafka.port_of("SLOW"))
            with Stage(link.address, namespace, tmp_path) as stage:
                for role in ("tracker", "worker", "worker"):
                    stage.start(role)
                stage.start("sender", count=3000, rate=150.0)
                stage.wait_until(lambda: stage.count("received") > 100)
                stage.fault("slow link", "0.4 s")
                link.delay_s = 0.2
                time.sleep(6.0)
                link.delay_s = 0.05
                stage.replace(stage.playing("worker")[0])
                stage.healed()
                stage.wait_for_senders()
                stage.drain()
                report = stage.judge("slow link")
    report.require_ok(f"seed {stage.seed}: ")
    assert report.sent == 3000
    assert link.connections > 5


def test_groups_expire(namespace: str) -> None:
    """Kafka drops what empty groups committed, queues' and trackers'; nothing acked comes again.

    A worker has closed, another one was killed with messages in its hands, and no tracker ran.
    """
    properties = {
        "offsets.retention.minutes": "1",
        "offsets.retention.check.interval.ms": "1000",
    }
    with (
        LocalKafka(properties=properties, **FROM_ENVIRONMENT) as kafka,
        make_service(kafka.bootstrap_servers, namespace) as service,
        Admin(service.config) as admin,
    ):
        producer = service.queue("a").producer()
        for number in range(100):
            producer.send(b"%d" % number)
        producer.flush()
        queue = service.queue("a", redelivery_timeout=2.0)
        with tracked(service.config):
            with queue.consumer() as consumer:
                for message in receive_all(consumer, 50):
                    message.ack()
            wait_until(lambda: len(ends(service.config, Outcome.ACK)) == 50)
        worker = queue.consumer()
        held = receive_all(worker, 30)
        for message in held[10:]:
            message.ack(wait=True)
        die(worker)
        config = service.config
        asked = [
            (group_of(config, "a"), (config.message_topic, 0)),
            (f"kafkamq.{config.marker_topic}.0", (config.marker_topic, 0)),
        ]
        wait_until(lambda: all(each.offset < 0 for each in admin.committed(asked)), timeout_s=180.0)
        seen: list[bytes | None] = []
        with tracked(config), queue.consumer() as consumer:
            while len(seen) < 30:
                (message,) = receive_all(consumer, 1)
                message.ack()
                seen.append(message.payload)
            assert consumer.receive(5.0) is None
        acked = {message.payload for message in held[10:]}
        assert len(set(seen)) == 30
        assert acked.isdisjoint(seen)
        assert {message.payload for message in held[:10]} <= set(seen)
