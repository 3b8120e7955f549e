"""F1-F3, F6, F7, F10, F15, F19: processes that die, stand still, are cut off, come and go."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from harness.faults import KafkaCluster
from tests.faults.stage import Actor, Stage
from tests.waiting import deadline_after

pytestmark = [pytest.mark.faults, pytest.mark.timeout(500)]

EARLIER = os.environ.get("KAFKAMQ_FAULTS_EARLIER", "")
"""``src`` of another revision: half of the processes of F19 run that one."""
SECONDS = float(os.environ.get("KAFKAMQ_FAULTS_SECONDS", "40"))
KILLS = 20
LATE_S = 10.0
"""How late 99 of 100 redeliveries may be where no tracker and no broker is disturbed (I6)."""
SHORT_SESSION = {"session.timeout.ms": "6000"}
"""So that the group gives up who is away for 8 s, and his partitions go to others."""


def test_workers_are_killed_twenty_times(bootstrap: str, namespace: str, tmp_path: Path) -> None:
    """F1: at random moments, in the middle of their work."""
    with Stage(bootstrap, namespace, tmp_path, work_s=0.005, kafka=SHORT_SESSION) as stage:
        stage.start("tracker")
        for _ in range(3):
            stage.start("worker")
        stage.start("sender", count=8000, rate=100.0)
        kill_workers(stage)
        stage.wait_for_senders()
        stage.drain()
        report = stage.judge("F1 SIGKILL of workers", max_lateness_s=LATE_S)
    report.require_ok(f"seed {stage.seed}: ")
    assert report.sent == 8000
    assert report.faults["kill worker"] >= KILLS
    assert report.verdict.redelivered > 0


def test_workers_of_an_exactly_once_queue_are_killed_twenty_times(
    bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    """F1: and no message that a live worker holds is STARTed a second time."""
    quick = {**SHORT_SESSION, "transaction.timeout.ms": "3000"}
    with Stage(
        bootstrap, namespace, tmp_path, exactly_once=True, work_s=0.005, kafka=quick
    ) as stage:
        stage.start("tracker")
        for _ in range(3):
            stage.start("worker")
        stage.start("sender", count=8000, rate=100.0)
        kill_workers(stage)
        stage.wait_for_senders()
        stage.drain()
        report = stage.judge("F1 SIGKILL of workers, exactly_once")
    report.require_ok(f"seed {stage.seed}: ")
    assert report.sent == 8000
    assert report.faults["kill worker"] >= KILLS
    assert report.verdict.redelivered > 0
    assert report.second_starts == 0


def kill_workers(stage: Stage) -> None:
    """Twenty times in all some of those that have messages in hand; others take their places.

    Who has none shows nothing: the group waits for dead members, so most have none for seconds.
    """
    kills = 0
    while kills < KILLS:
        stage.wait_until(lambda: stage.at_work("worker"))
        time.sleep(0.5 * stage.chance.random())
        busy = stage.at_work("worker")
        for victim in busy[: stage.chance.randint(1, 3)]:
            stage.replace(victim)
            kills += 1
    stage.healed()


def test_trackers_are_killed_twenty_times(bootstrap: str, namespace: str, tmp_path: Path) -> None:
    """F2: two of them, one or both at a time, while they fire; many nacks to fire."""
    with Stage(
        bootstrap, namespace, tmp_path, nacks=0.3, max_actions=5, kafka=SHORT_SESSION
    ) as stage:
        stage.start("tracker")
        stage.start("tracker")
        stage.start("worker")
        stage.start("sender", count=10_000, rate=120.0, delayed=0.02)
        kills = 0
        while kills < KILLS:
            before = stage.copies()
            stage.wait_until(lambda before=before: stage.copies() > before + 5)
            for victim in stage.at_work("tracker")[: stage.chance.randint(1, 2)]:
                stage.replace(victim)
                kills += 1
        stage.healed()
        stage.wait_for_senders()
        stage.drain()
        report = stage.judge("F2 SIGKILL of local trackers")
    report.require_ok(f"seed {stage.seed}: ")
    assert report.sent == 10_000
    assert report.faults["kill tracker"] >= KILLS
    assert report.verdict.redelivered > 500


def test_senders_are_killed(bootstrap: str, namespace: str, tmp_path: Path) -> None:
    """F3: what was confirmed is there; what was not may be."""
    with Stage(bootstrap, namespace, tmp_path) as stage:
        stage.start("tracker")
        stage.start("worker")
        for _ in range(6):
            sender = stage.start("sender", count=100_000, rate=1000.0)
            before = stage.count("sent")
            stage.wait_until(lambda before=before: stage.count("sent") > before + 500)
            stage.fault("kill sender", sender)
            sender.kill()
        stage.healed()
        stage.drain()
        report = stage.judge("F3 SIGKILL of senders")
    report.require_ok(f"seed {stage.seed}: ")
    assert report.sent > 3000


@pytest.mark.parametrize("role", ["worker", "tracker"])
def test_processes_that_are_paused(
    bootstrap: str, namespace: str, tmp_path: Path, role: str
) -> None:
    """F7: for longer than lease and session; what a paused worker does afterwards is late."""
    with Stage(
        bootstrap,
        namespace,
        tmp_path,
        redelivery_timeout=2.0,
        work_s=0.002,
        kafka=SHORT_SESSION,
    ) as stage:
        for each in ("tracker", "tracker", "worker", "worker"):
            stage.start(each)
        stage.start("sender", count=5000, rate=200.0)
        stage.wait_until(lambda: stage.count("received") > 200)
        for _ in range(3):
            victim = stage.chance.choice(stage.playing(role))
            stage.fault(f"pause {role}", victim)
            victim.send(signal.SIGSTOP)
            time.sleep(8.0)
            victim.send(signal.SIGCONT)
            time.sleep(1.0)
        stage.healed()
        stage.wait_for_senders()
        stage.drain()
        report = stage.judge(f"F7 pause of a {role}")
    report.require_ok(f"seed {stage.seed}: ")
    assert report.sent == 5000
    if role == "worker":
        assert report.verdict.redelivered > 0


@pytest.mark.parametrize("role", ["worker", "tracker"])
def test_processes_that_are_cut_off(
    kafka_cluster: KafkaCluster, namespace: str, tmp_path: Path, role: str
) -> None:
    """F6: from all brokers, for longer than a lease, and back: a zombie with verdicts to give."""
    cluster = kafka_cluster
    far = cluster.network.add(f"far-{role}")
    with Stage(
        cluster.bootstrap_servers, namespace, tmp_path, work_s=0.002, kafka=SHORT_SESSION
    ) as stage:
        for each in ("tracker", "worker", "worker"):
            stage.start(each)
        victim = stage.start(role, launcher=far.prefix, work_s=0.01)

        def tracked_by_others() -> set[int]:
            trackers = [one for one in stage.playing("tracker") if one is not victim]
            return set[int]().union(*map(stage.tracked_by, trackers))

        stage.start("sender", count=5000, rate=200.0)
        stage.wait_until(lambda: stage.count("received") > 300)
        for _ in range(2):
            if role == "worker":
                stage.wait_until(lambda: stage.in_hand(victim) > 20)
            else:
                stage.wait_until(lambda: stage.tracked_by(victim) - tracked_by_others())
            stage.fault(f"cut {role} off", victim)
            for number in cluster.brokers:
                cluster.network.cut(far.name, f"broker-{number}")
            time.sleep(8.0)
            if role == "tracker":  # what it had is the other one's: it comes back as a zombie
                stage.wait_until(lambda: len(tracked_by_others()) == 3)
            cluster.network.heal()
            time.sleep(2.0)
        stage.healed()
        stage.wait_for_senders()
        stage.drain()
        report = stage.judge(f"F6 {role} cut from the cluster")
    report.require_ok(f"seed {stage.seed}: ")
    assert report.sent == 5000
    assert report.told_late or role != "worker"


def test_poison_kills_its_worker_and_nothing_else(
    bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    """F10, R6: 0.3 % of the messages kill the process; all of them end as dead letters, alone."""
    with Stage(
        bootstrap,
        namespace,
        tmp_path,
        redelivery_timeout=1.0,
        max_deliveries=3,
        kafka=SHORT_SESSION,
    ) as stage:
        stage.start("tracker")
        for _ in range(4):
            stage.start("worker", batch=5)
        stage.start("sender", count=10_000, rate=200.0, poison=0.003)
        deadline_s = deadline_after(300)
        while time.monotonic() < deadline_s and not (
            not stage.playing("sender") and stage.is_drained()
        ):
            for actor in [a for a in stage.actors if a.role == "worker" and not a.is_running]:
                if not actor.was_replaced:
                    actor.was_replaced = True
                    stage.fault("worker killed by poison", actor)
                    stage.again(actor)
            time.sleep(0.3)
        stage.healed()
        report = stage.judge("F10 poison messages", max_lateness_s=LATE_S)
    report.require_ok(f"seed {stage.seed}: ")
    assert report.sent == 10_000
    assert report.faults["worker killed by poison"] > 0
    assert report.innocent_dead == 0


def test_a_storm_of_rebalances(bootstrap: str, namespace: str, tmp_path: Path) -> None:
    """F15: every second a worker joins or leaves, for a minute."""
    with Stage(bootstrap, namespace, tmp_path, partitions=4) as stage:
        stage.start("tracker")
        stage.start("worker")
        stage.start("sender", count=60_000, rate=1000.0)
        stage.wait_until(lambda: stage.count("received") > 100)
        guests: list[Actor] = []
        for turn in range(60):
            if turn % 2 == 0 or not guests:
                guests.append(stage.start("worker"))
                stage.fault("worker joins", guests[-1])
            else:
                guest = guests.pop(0)
                stage.fault("worker leaves", guest)
                guest.process.terminate()
            time.sleep(1.0)
        stage.healed()
        stage.wait_for_senders()
        stage.drain()
        report = stage.judge("F15 rebalance storm", max_lateness_s=LATE_S)
    report.require_ok(f"seed {stage.seed}: ")
    assert report.sent == 60_000


@pytest.mark.parametrize("exactly_once", [False, True])
def test_two_versions_are_at_work_while_one_replaces_the_other(
    bootstrap: str, namespace: str, tmp_path: Path, exactly_once: bool
) -> None:
    """F19: upgrades and downgrades of workers and trackers, some of which are killed first."""
    rate, earlier = 100.0, ("env", f"PYTHONPATH={EARLIER}") if EARLIER else ()
    with Stage(
        bootstrap, namespace, tmp_path, exactly_once=exactly_once, nacks=0.05, kafka=SHORT_SESSION
    ) as stage:
        for role in ("tracker", "tracker", "worker", "worker", "worker", "worker"):
            stage.start(role, launcher=earlier if len(stage.actors) % 2 else ())
        stage.start("sender", count=int(SECONDS * rate), rate=rate, delayed=0.01)
        while stage.playing("sender"):
            role = stage.chance.choice(["tracker", "worker", "worker"])
            old = stage.chance.choice(stage.playing(role))
            is_killed = stage.chance.random() < 0.3
            stage.fault(f"{'kill' if is_killed else 'replace'} {role}", old)
            if is_killed:
                old.kill()
            else:
                old.stop()
            stage.start(role, launcher=() if old.launcher else earlier)
            stage.wait_until(
                lambda: (
                    (stage.at_work("worker") and stage.at_work("tracker"))
                    or not stage.playing("sender")
                )
            )
        stage.healed()
        stage.drain()
        report = stage.judge(f"F19 two versions{', exactly_once' if exactly_once else ''}")
    report.require_ok(f"seed {stage.seed}: ")
    assert report.sent == int(SECONDS * rate)
    assert report.verdict.redelivered > 0
