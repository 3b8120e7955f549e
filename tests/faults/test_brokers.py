"""F5, F6, F7: brokers that die, are cut off, stand still; 3 brokers, replication 3, min ISR 2."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.faults import KafkaCluster
from tests.faults.stage import Stage

from kafkamq.queue.names import group_of

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

COUNT, RATE = 6000, 400.0
EXAMPLE = "test_what_was_sent_survives_the_leader"


def play(
    cluster: KafkaCluster, namespace: str, folder: Path, title: str, act: Callable[[Stage], None]
) -> None:
    """Two trackers, three workers, a sender; ``act`` among them; then everything must settle."""
    with Stage(cluster.bootstrap_servers, namespace, folder) as stage:
        for role in ("tracker", "tracker", "worker", "worker", "worker"):
            stage.start(role)
        stage.start("sender", count=COUNT, rate=RATE, delayed=0.01)
        stage.wait_until(lambda: stage.count("received") > 300)
        act(stage)
        cluster.heal()
        stage.healed()
        stage.wait_for_senders()
        stage.drain()
        report = stage.judge(title)
    report.require_ok(f"seed {stage.seed}: ")
    assert report.sent == COUNT
    assert sum(report.faults.values())


def of_messages(cluster: KafkaCluster, stage: Stage) -> int:
    return cluster.leader_of(stage.config.message_topic)


def of_markers(cluster: KafkaCluster, stage: Stage) -> int:
    return cluster.leader_of(stage.config.marker_topic)


def of_group(cluster: KafkaCluster, stage: Stage) -> int:
    return cluster.coordinator_of(group_of(stage.config, "a"))


def of_metadata(cluster: KafkaCluster, stage: Stage) -> int:
    return cluster.controller()


Who = Callable[[KafkaCluster, Stage], int]
Harm = Callable[[KafkaCluster, int], None]

# What is done to whom, and for how long. One that is cut from its peers is still reached by its
# clients. One that is cut from its clients leads on, for its peers see it: what it leads stands
# still for longer than a lease. One that is paused is so for longer than its session and a lease.
HARM: dict[str, tuple[Harm, float, tuple[Who, ...]]] = {
    "F5 killed": (KafkaCluster.kill, 6.0, (of_messages, of_markers, of_group, of_metadata)),
    "F6 cut from peers": (KafkaCluster.cut_from_peers, 8.0, (of_messages, of_markers, of_group)),
    "F6 cut from clients": (KafkaCluster.cut_from_clients, 8.0, (of_markers,)),
    "F7 paused": (KafkaCluster.pause, 8.0, (of_messages, of_markers)),
}


@pytest.mark.parametrize(
    ("what", "who"),
    [(what, who) for what, (_, _, victims) in HARM.items() for who in victims],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_leaders_in_trouble(
    kafka_cluster: KafkaCluster, namespace: str, tmp_path: Path, what: str, who: Who
) -> None:
    title = f"{what}: leader {who.__name__}"
    harm, lasts_s, _ = HARM[what]

    def act(stage: Stage) -> None:
        victim = who(kafka_cluster, stage)
        stage.fault(title, victim)
        harm(kafka_cluster, victim)
        time.sleep(lasts_s)

    play(kafka_cluster, namespace, tmp_path, title, act)


def test_a_rolling_restart(kafka_cluster: KafkaCluster, namespace: str, tmp_path: Path) -> None:
    def act(stage: Stage) -> None:
        for number in kafka_cluster.brokers:
            stage.fault("restart broker", number)
            kafka_cluster.restart(number)
            kafka_cluster.wait_until_whole()

    play(kafka_cluster, namespace, tmp_path, "F5 rolling restart", act)


def test_the_example_in_the_docs(kafka_cluster: KafkaCluster) -> None:
    """A broker's handle is destroyed under the requests in it, when it leaves the metadata."""
    text = Path("docs/evidence.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (example,) = [block for block in blocks if EXAMPLE in block]
    found: dict[str, Callable[[KafkaCluster], None]] = {}
    exec(example, found)
    found[EXAMPLE](kafka_cluster)
