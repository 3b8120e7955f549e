"""F4, F9 on Spark: twenty SIGKILLs of drivers and of Python workers; a checkpoint without room."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from harness.faults import Network, read_namespace, why_no_network
from tests.faults.figures import say
from tests.integration.cli_tools import Commands
from tests.integration.tracker_logs import Logs
from tests.spark.processes import below, busy, command_of, python_workers
from tests.spark.tracker_driver import tracker_driver
from tests.waiting import deadline_after, wait_until

from kafkamq.markers.overview import overview
from kafkamq.testing.checker import check_logs
from kafkamq.types import Marker, MarkerType, MessageId, Outcome

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.timeout(900)]

KILLS = 20
PATIENCE_S = 150.0
_BATCHED = 0.75  # share of the loads whose markers are those of batches


class Load:
    """Messages whose workers die, some acked, some rejected; and what must become of them."""

    def __init__(self, bootstrap: str, namespace: str) -> None:
        self.logs = Logs(bootstrap, namespace, marker_partitions=2)
        self.silent: set[MessageId] = set()
        self.rejected: set[MessageId] = set()
        self.seed = random.SystemRandom().randrange(10**6)
        self.chance = random.Random(self.seed)

    def add(self, count: int) -> None:
        logs, ids = self.logs, self.logs.send(count, partition=self.chance.randrange(2))
        if self.chance.random() < _BATCHED:
            logs.start_batch(*ids, timeout_ms=1500)
            logs.batch(*ids[::4], marker=Marker(MarkerType.END, consumer_id="worker"))
        else:
            logs.start(*ids, timeout_ms=1500)
            logs.end(*ids[::4])
        logs.end(*ids[1::4], outcome=Outcome.REJECT, reason="no")
        self.rejected.update(ids[1::4])
        self.silent.update(set(ids) - set(ids[::4]) - set(ids[1::4]))

    def wait_until_settled(self) -> None:
        wanted = self.silent | self.rejected
        ended = (Outcome.REDELIVERED, Outcome.DEAD_LETTERED)
        wait_until(lambda: wanted <= set(self.logs.ends(*ended)), timeout_s=PATIENCE_S)
        read = {message.partition(): message.offset() for message, _ in self.logs.markers()}

        def is_idle() -> bool:
            """Whatever would be written twice is written while something is open."""
            return all(
                one.status is not None
                and not one.status.entries
                and one.status.position > read[one.partition]
                for one in overview(self.logs.config, max_scanned=0).markers
            )

        wait_until(is_idle, timeout_s=PATIENCE_S)

    def judge(self, title: str, faults: dict[str, int]) -> None:
        logs = self.logs
        found = read_namespace(logs.config)
        verdict = check_logs(
            messages=found.messages,
            markers=found.markers,
            dead_letters=found.dead_letters,
            must_be_settled=False,
        )
        row = {"scenario": title, "seed": self.seed, "sent": len(logs.sent), "faults": faults}
        row |= {"redelivered": verdict.redelivered, "violations": len(verdict.problems)}
        say(row)
        verdict.require_ok(f"seed {self.seed}: ")
        assert Counter(logs.copied()) == Counter((m.partition, m.offset) for m in self.silent)
        assert Counter(logs.ends(Outcome.REDELIVERED)) == Counter(self.silent)
        assert Counter(logs.ends(Outcome.DEAD_LETTERED)) == Counter(self.rejected)


def test_drivers_are_killed_twenty_times(bootstrap: str, namespace: str, tmp_path: Path) -> None:
    """F4: at random moments: while Spark starts, folds, fires."""
    load = Load(bootstrap, namespace)
    cut_short = 0
    for _ in range(KILLS):
        # Small transactions, so that most kills fall between two of them.
        with tracker_driver(load.logs, tmp_path / "checkpoint", max_actions=20) as process:
            load.add(400)
            is_firing = load.chance.random() < 0.7
            if is_firing:
                before = len(load.logs.copied())

                def fires(process: subprocess.Popen[bytes] = process, before: int = before) -> bool:
                    assert process.poll() is None, "the driver ended by itself"
                    return len(load.logs.copied()) > before

                wait_until(fires, timeout_s=PATIENCE_S)
            time.sleep(4.0 * load.chance.random() ** 3)
        cut_short += is_firing and len(load.logs.copied()) < len(load.silent)
    with tracker_driver(load.logs, tmp_path / "checkpoint"):
        load.wait_until_settled()
    load.judge("F4 SIGKILL of Spark drivers", {"kill driver": KILLS, "while firing": cut_short})
    assert cut_short >= 3, "the kills came too late to show anything"


def executors(driver_pid: int) -> list[int]:
    """The JVMs that run tasks, of a master ``local-cluster``."""
    return [pid for pid in below(driver_pid) if "CoarseGrainedExecutor" in command_of(pid)]


def test_python_workers_are_killed_twenty_times(
    bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    """F4: the query ends with its task, and starts again by itself."""
    load = Load(bootstrap, namespace)
    output = tmp_path / "output"
    kills = 0
    with tracker_driver(load.logs, tmp_path / "checkpoint", output=output) as process:
        load.add(400)
        wait_until(load.logs.copied, timeout_s=PATIENCE_S)
        deadline_s = deadline_after(400)
        while kills < KILLS and time.monotonic() < deadline_s:
            load.add(50)
            assert process.poll() is None, "the driver ended"
            time.sleep(2.0 * load.chance.random())
            workers = busy(python_workers(process.pid))
            if workers:  # none while the query starts again; one that idles dies unnoticed
                os.kill(load.chance.choice(workers), signal.SIGKILL)
                kills += 1
        load.wait_until_settled()
    at_work = output.read_bytes().count(b"the query failed and is started again")
    load.judge(
        "F4 SIGKILL of Spark's Python workers", {"kill Python worker": kills, "at work": at_work}
    )
    assert kills == KILLS
    assert at_work >= 3, "the kills hit those that had nothing to do"


def test_executors_are_killed_twenty_times(bootstrap: str, namespace: str, tmp_path: Path) -> None:
    """F4: two of them with a core each; Spark starts a killed one again."""
    load = Load(bootstrap, namespace)
    kills = 0
    with tracker_driver(
        load.logs, tmp_path / "checkpoint", master="local-cluster[2,1,1024]"
    ) as process:
        load.add(400)
        wait_until(load.logs.copied, timeout_s=PATIENCE_S)
        deadline_s = deadline_after(500)
        while kills < KILLS and time.monotonic() < deadline_s:
            load.add(200)
            time.sleep(4.0 + 4.0 * load.chance.random())
            assert process.poll() is None, "the driver ended"
            running = executors(process.pid)
            if len(running) == 2:
                os.kill(load.chance.choice(running), signal.SIGKILL)
                kills += 1
        load.wait_until_settled()
    load.judge("F4 SIGKILL of Spark's executors", {"kill executor": kills})
    assert kills == KILLS


@pytest.mark.skipif(bool(why_no_network()), reason=why_no_network() or "it can")
@pytest.mark.parametrize("full", ["checkpoint", "working folder"])
def test_a_folder_without_room(bootstrap: str, namespace: str, tmp_path: Path, full: str) -> None:
    """F9: the tracker says what to do, nothing is lost, and it goes on when there is room.

    In the working folder are RocksDB's files and those between the stages of a batch.
    """
    load = Load(bootstrap, namespace)
    output = tmp_path / "output"
    folders = {name: tmp_path / name.replace(" ", "-") for name in ("checkpoint", "working folder")}
    for folder in folders.values():
        folder.mkdir()
    small = folders[full]
    with Network() as network:
        host = network.add("spark")
        host.mount_tmpfs(small, {"checkpoint": 4, "working folder": 16}[full] * 1024 * 1024)
        # Its disk is another one; the broker is on the loopback, so only the mounts are its own.
        launcher = ["nsenter", "-t", str(host.pid), "-m", f"--wd={Path.cwd()}", "--"]
        with tracker_driver(
            load.logs,
            folders["checkpoint"],
            launcher=launcher,
            output=output,
            settings={"spark.local.dir": str(folders["working folder"])},
        ):
            load.add(400)
            wait_until(load.logs.copied, timeout_s=PATIENCE_S)
            host.run("sh", "-c", f"dd if=/dev/zero of={small}/filler bs=4k 2>/dev/null || true")
            load.add(400)
            wait_until(lambda: b"make room" in output.read_bytes(), timeout_s=PATIENCE_S)
            host.resize_tmpfs(small, 256 * 1024 * 1024)
            load.add(400)
            load.wait_until_settled()
    load.judge(f"F9 Spark {full} without room", {"disk full": 1})


def test_a_jvm_that_is_killed_is_no_traceback(
    bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    logs = Logs(bootstrap, namespace, marker_partitions=1)
    place = f"file://{tmp_path}/checkpoint"
    process = Commands(bootstrap, namespace).process(
        "tracker", "--checkpoint", place, start_new_session=True
    )
    try:

        def has_begun() -> bool:
            assert process.poll() is None, "the tracker has ended by itself"
            return any(marker.type is MarkerType.TICK for _, marker in logs.markers())

        wait_until(has_begun, timeout_s=PATIENCE_S)
        (jvm,) = (pid for pid in below(process.pid) if "/java " in command_of(pid))
        os.kill(jvm, signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 1
    assert "Traceback" not in errors
    assert [line for line in errors.splitlines() if line.startswith("kafkamq: Spark's JVM has")]
