"""Twelve SIGKILLs of a driver that acknowledges, of its JVM and of its Python workers."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from tests.faults.figures import say
from tests.integration.tracker_logs import Logs, read_topic, tracker_process
from tests.spark.queue_driver import TIMEOUT_S, children_of, queue_driver
from tests.spark.test_queues_crash import open_messages, output
from tests.waiting import wait_until, within

from kafkamq.types import Outcome

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.timeout(1500)]

KILLS = 12
MESSAGES = 400  # before each kill
PATIENCE_S = 200.0


def send(logs: Logs, first: int, count: int) -> None:
    for number in range(first, first + count):
        logs._producer.produce(logs.config.message_topic, b"%d" % number, b"work", number % 2)
    logs._producer.confirm(30)


def test_each_output_is_there_once(bootstrap: str, namespace: str, tmp_path: Path) -> None:
    logs = Logs(bootstrap, namespace)
    out = f"{namespace}-out"
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(out, 2, 1)])[out].result(within(30))
    seed = random.SystemRandom().randrange(10**6)
    chance = random.Random(seed)
    killed: Counter[str] = Counter()
    sent = 0
    with tracker_process(logs.config):
        for turn in range(KILLS):
            with queue_driver(logs, tmp_path / "checkpoint", out) as process:
                send(logs, sent, MESSAGES)
                sent += MESSAGES
                before = len(output(logs, out))

                def writes(
                    process: subprocess.Popen[bytes] = process, before: int = before
                ) -> bool:
                    assert process.poll() is None, f"the driver ended by itself (seed {seed})"
                    return len(output(logs, out)) > before

                wait_until(writes, timeout_s=PATIENCE_S)
                time.sleep(2.0 * chance.random() ** 2)
                what = ("driver", "worker", "jvm")[turn % 3]
                killed[what] += kill(process, what, chance)
            if turn % 4 == 3:
                time.sleep(1.5 * TIMEOUT_S)  # long enough for leases to end
        with queue_driver(logs, tmp_path / "checkpoint", out) as process:

            def is_done(process: subprocess.Popen[bytes] = process) -> bool:
                assert process.poll() is None, f"the driver ended by itself (seed {seed})"
                return len(output(logs, out)) >= sent and not open_messages(logs)

            wait_until(is_done, timeout_s=PATIENCE_S)
    found = output(logs, out)
    redelivered = len(logs.ends(Outcome.REDELIVERED))
    row = {
        "scenario": "SIGKILL of an acknowledging stream",
        "seed": seed,
        "killed": dict(killed),
        "sent": sent,
        "redelivered": redelivered,
    }
    row["records_with_aborted"] = len(read_topic(bootstrap, out, isolation="read_uncommitted"))
    say(row)
    twice = {value: count for value, count in found.items() if count > 1}
    assert not twice, f"seed {seed}: {len(twice)} twice"
    assert found.keys() == {b"%d" % number for number in range(sent)}, f"seed {seed}"


def kill(process: subprocess.Popen[bytes], what: str, chance: random.Random) -> int:
    """A driver with all that is below it, one of its Python workers, or its JVM; 1: it died."""
    if what == "driver":
        os.killpg(process.pid, signal.SIGKILL)
        return 1
    found = children_of(process.pid, "kafkamq.spark.daemon" if what == "worker" else "java")
    if not found:
        return 0
    victims = found if what == "jvm" else [chance.choice(found)]
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(within(10))  # a lost worker ends the batch, and the query with it
    return 1
