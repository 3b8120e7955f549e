"""F18: everything at once, in an order that a seed draws."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from harness.faults import KafkaCluster
from tests.faults.stage import Stage

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]

SECONDS = float(os.environ.get("KAFKAMQ_FAULTS_SECONDS", "150"))
RATE = float(os.environ.get("KAFKAMQ_FAULTS_RATE", "250"))  # messages/s


class Chaos:
    """Faults of processes, also while a broker is away: one at a time, as min ISR 2 allows."""

    def __init__(self, cluster: KafkaCluster, stage: Stage) -> None:
        self._cluster = cluster
        self._stage = stage

    def step(self) -> None:
        chance = self._stage.chance
        of_processes = [self._kill, self._kill, self._pause]
        chance.choice([self._broker, self._broker, *of_processes])()
        time.sleep(1.0 + 2.0 * chance.random())

    def _broker(self) -> None:
        chance, cluster = self._stage.chance, self._cluster
        number = chance.choice(sorted(cluster.brokers))
        kind = chance.choice(["kill", "pause", "cut_from_peers", "isolate", "cut_from_clients"])
        self._stage.fault(f"{kind} broker", number)
        getattr(cluster, kind)(number)
        if chance.random() < 0.5:
            time.sleep(chance.random())
            chance.choice([self._kill, self._pause])()
        time.sleep(2.0 + 5.0 * chance.random())
        cluster.heal()
        self._stage.healed()

    def _kill(self) -> None:
        role = self._stage.chance.choice(["worker", "worker", "tracker"])
        self._stage.replace(self._stage.chance.choice(self._stage.playing(role)))

    def _pause(self) -> None:
        role = self._stage.chance.choice(["worker", "tracker"])
        victim = self._stage.chance.choice(self._stage.playing(role))
        self._stage.fault(f"pause {role}", victim)
        victim.send(signal.SIGSTOP)
        time.sleep(1.0 + 5.0 * self._stage.chance.random())
        victim.send(signal.SIGCONT)


@pytest.mark.parametrize("exactly_once", [False, True])
def test_everything_at_once(
    kafka_cluster: KafkaCluster, namespace: str, tmp_path: Path, exactly_once: bool
) -> None:
    seed = int(os.environ.get("KAFKAMQ_FAULTS_SEED", "0")) or None
    with Stage(
        kafka_cluster.bootstrap_servers, namespace, tmp_path, seed=seed, exactly_once=exactly_once
    ) as stage:
        for role in ("tracker", "tracker", "worker", "worker", "worker"):
            stage.start(role)
        stage.start("sender", count=int(SECONDS * RATE), rate=RATE, delayed=0.01)
        stage.wait_until(lambda: stage.count("received") > 100)
        chaos = Chaos(kafka_cluster, stage)
        end_s = time.monotonic() + SECONDS
        while time.monotonic() < end_s:
            chaos.step()
        kafka_cluster.heal()
        stage.healed()
        stage.wait_for_senders()
        stage.drain()
        report = stage.judge(f"F18 everything{', exactly_once' if exactly_once else ''}")
    report.require_ok(f"seed {stage.seed}: ")
    assert report.sent == int(SECONDS * RATE)
    assert sum(report.faults.values()) > SECONDS / 15
    assert not (exactly_once and report.second_starts)
