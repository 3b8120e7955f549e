"""Drivers that acknowledge: SIGKILLs, of their JVMs and Python workers too; pauses; poison."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.figures import say
from tests.integration.tracker_logs import Logs, read_topic, tracker_process
from tests.spark.processes import driver
from tests.spark.queue_driver import (
    TIMEOUT_S,
    children_of,
    open_messages,
    output,
    output_topic,
    queue_driver,
)
from tests.waiting import wait_until, within

from kafkamq.queue.names import group_of
from kafkamq.transport.admin import Admin
from kafkamq.types import Outcome

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.timeout(1500)]

KILLS = 12
MESSAGES = 400  # before each kill
PATIENCE_S = 200.0
PAUSE_S = 60.0


def send(logs: Logs, first: int, count: int) -> None:
    for number in range(first, first + count):
        logs._producer.produce(logs.config.message_topic, b"%d" % number, b"work", number % 2)
    logs._producer.confirm(30)


def test_each_output_is_there_once(bootstrap: str, namespace: str, tmp_path: Path) -> None:
    logs = Logs(bootstrap, namespace)
    out = output_topic(logs)
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


def test_a_query_that_is_paused_beside_its_successor(
    bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    """The machine of a driver stands still for a minute; it is started elsewhere, and goes on."""
    logs = Logs(bootstrap, namespace)
    out = output_topic(logs)
    group = group_of(logs.config, "work")
    places = [(group, (logs.config.message_topic, number)) for number in range(2)]

    def position() -> list[int]:
        with Admin(logs.config) as admin:
            return [each.offset for each in admin.committed(places)]

    def has(count: int, process: subprocess.Popen[bytes]) -> Callable[[], bool]:
        def has_it() -> bool:
            assert process.poll() is None, "the driver ended by itself"
            return len(output(logs, out)) >= count and not open_messages(logs)

        return has_it

    send(logs, 0, MESSAGES)
    with (
        tracker_process(logs.config),
        queue_driver(logs, tmp_path / "checkpoint", out) as paused,
    ):
        wait_until(lambda: len(output(logs, out)) > 0, timeout_s=PATIENCE_S)
        send(logs, MESSAGES, MESSAGES)
        wait_until(lambda: bool(open_messages(logs)), timeout_s=PATIENCE_S)
        os.killpg(paused.pid, signal.SIGSTOP)
        until_s = time.monotonic() + PAUSE_S
        try:
            with queue_driver(logs, tmp_path / "checkpoint", out) as later:
                wait_until(has(2 * MESSAGES, later), timeout_s=PATIENCE_S)
                wait_until(lambda: time.monotonic() >= until_s, timeout_s=2 * PAUSE_S)
                before = position()
                os.killpg(paused.pid, signal.SIGCONT)
                send(logs, 2 * MESSAGES, MESSAGES)
                assert paused.wait(within(PATIENCE_S)), "it is fenced"
                wait_until(has(3 * MESSAGES, later), timeout_s=PATIENCE_S)
                wait_until(lambda: sum(position()) > sum(before), timeout_s=PATIENCE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(paused.pid, signal.SIGCONT)
    assert output(logs, out) == Counter(b"%d" % number for number in range(3 * MESSAGES))


_POISON = """
import os, sys, time
from kafkamq.config import ServiceConfig
from kafkamq.spark import ack, map_messages, read_queue, register
from kafkamq.spark.session import build_session
config = ServiceConfig(bootstrap_servers=sys.argv[1], namespace=sys.argv[2])
spark = build_session(settings={"spark.sql.shuffle.partitions": "2"})
register(spark, config)
def handler(message):
    if message.payload == b"3":
        os._exit(9)
    return message.payload
starts = 0
while True:
    starts += 1
    print("start", starts, flush=True)
    stream = read_queue(spark, "work", redelivery_timeout=20.0, max_deliveries=2)
    done = map_messages(stream, handler).selectExpr("ack_token", "verdict", "result AS value")
    try:
        ack(done, checkpoint=sys.argv[3], topic=sys.argv[4], trigger_s=0.1).wait()
    except Exception as error:
        print("ended", str(error)[:100], flush=True)
"""


def test_what_kills_its_python_worker_becomes_a_dead_letter(
    bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    """The query is started again at once, however often; the others of its batch are done."""
    logs = Logs(bootstrap, namespace)
    out, said = output_topic(logs), tmp_path / "said"
    for number in range(8):
        logs._producer.produce(logs.config.message_topic, b"%d" % number, b"work", 0)
    logs._producer.confirm(30)
    arguments = [bootstrap, namespace, str(tmp_path / "checkpoint"), out]
    with tracker_process(logs.config), driver(_POISON, *arguments, output=said):
        wait_until(lambda: bool(logs.dead_letters()), timeout_s=2 * PATIENCE_S)
        wait_until(lambda: len(output(logs, out)) == 7, timeout_s=PATIENCE_S)
    starts = said.read_text().count("start ")
    say({"scenario": "a message that kills its Python worker", "starts": starts})
    assert [message.value() for message, _ in logs.dead_letters()] == [b"3"]
    assert output(logs, out) == Counter(b"%d" % number for number in range(8) if number != 3)
    assert starts <= 12
