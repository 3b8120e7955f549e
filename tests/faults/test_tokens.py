"""SIGKILL of holders and of givers of verdicts, in any order: one verdict counts (R34)."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.faults import read_namespace
from harness.simulation.settlers import Reported, untrue
from tests.integration.queue_logs import make_service, tracked
from tests.waiting import wait_until, within

from kafkamq.testing import check_logs
from kafkamq.testing.history import read_timelines
from kafkamq.types import MessageId, Outcome

ROOT = Path(__file__).parents[2]
SECONDS = 45
ROUNDS = 15
WANTED = {(Outcome.ACK, True), (Outcome.ACK, False), (Outcome.NACK, True)}


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_r34_killed_holders_and_givers(bootstrap: str, namespace: str, tmp_path: Path) -> None:
    rng = random.Random(34)
    with make_service(bootstrap, namespace, partitions=2) as service, tracked(service.config):
        producer = service.queue("a").producer()
        started = 0

        def start(role: str) -> tuple[str, subprocess.Popen[bytes]]:
            nonlocal started
            started += 1
            where = bootstrap, namespace, str(tmp_path), str(started)
            command = [sys.executable, "-m", "tests.integration.token_roles", role, *where]
            return role, subprocess.Popen(command, cwd=ROOT)

        running = [start(role) for role in ("hold", "hold", "settle", "settle")]
        try:
            for number in range(ROUNDS):
                for each in range(20):
                    producer.send(b"%d" % each, id=f"{number}-{each}").result(within(30))
                time.sleep(SECONDS / ROUNDS)
                role, victim = running.pop(rng.randrange(len(running)))
                assert victim.poll() is None, "it ended by itself"
                victim.kill()
                victim.wait()
                running.append(start(role))
            wait_until(lambda: _told(_said(tmp_path)) >= WANTED)
        finally:
            for _, process in running:
                process.kill()
                process.wait()
        found = read_namespace(service.config)
    verdict = check_logs(
        messages=found.messages,
        markers=found.markers,
        dead_letters=found.dead_letters,
        must_be_settled=False,  # the last of them are killed, too
    )
    verdict.require_ok()
    said = _said(tmp_path)
    assert _told(said) >= WANTED
    assert list(untrue(said, read_timelines(found.markers), excuses=False)) == []


def _said(folder: Path) -> list[Reported]:
    return [each for path in folder.glob("said-*") for each in _read(path)]


def _told(said: list[Reported]) -> set[tuple[Outcome, bool | None]]:
    return {(each.outcome, each.counted) for each in said}


def _read(path: Path) -> list[Reported]:
    said: list[Reported] = []
    for line in path.read_text().splitlines():
        place, outcome, result = line.split(" ")
        if result == "begins":
            partition, offset, topic_id, epoch = place.split(":")
            one = MessageId(int(partition), int(offset), bytes.fromhex(topic_id), int(epoch))
            said.append(Reported(one, Outcome[outcome]))
        else:
            said[-1].counted = result == "counted"
    return said
