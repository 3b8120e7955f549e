"""The demo as a user runs it: few messages, a real broker, Spark, a killed worker, a verdict."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from harness.faults import read_namespace
from tests.waiting import wait_until, within

from kafkamq.config import ServiceConfig
from kafkamq.testing import check_logs

pytest.importorskip("pyspark")

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(420)]

TIMEOUT_S = within(400)
TOTALS = {
    "sent": int,
    "acked": int,
    "redelivered": int,
    "dead_lettered": int,
    "lost": int,
    "duplicated": int,
    "late_p50_s": float,
    "late_p99_s": float,
}


def start_demo(*arguments: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kafkamq.cli", "demo", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "160"},
        **more,
    )


def run_demo(*arguments: str) -> tuple[dict[str, Any], str]:
    process = start_demo(*arguments, "--json")
    try:
        out, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.communicate()
    lines = out.splitlines()
    assert lines, errors
    result = json.loads(lines[-1])
    assert (process.returncode, result["verdict"]) == (0, "ok"), (result, errors)
    return result, errors


def check_form(result: dict[str, Any]) -> None:
    for name, kind in TOTALS.items():
        assert isinstance(result[name], kind), (name, result[name])
    assert {queue["queue"] for queue in result["queues"]} == {"orders", "mails", "reports"}
    for name in ("sent", "acked", "redelivered", "dead_lettered", "lost", "duplicated"):
        assert sum(queue[name] for queue in result["queues"]) == result[name]


@pytest.mark.parametrize("engine", ["spark", pytest.param("local", marks=pytest.mark.faults)])
def test_its_own_messages(engine: str) -> None:
    """The verdict is Spark's, whatever tracks."""
    result, errors = run_demo("--messages", "600", "--engine", engine)
    check_form(result)
    assert (result["sent"], result["lost"]) == (600, 0)
    # A machine that is too busy to renew leases in time may give up others than the poison.
    assert result["acked"] + result["dead_lettered"] >= 600
    assert result["dead_lettered"] >= 6
    assert (result["poison"], result["poison_missing"]) == (6, 0)
    assert result["redelivered"] >= 7  # the poison, and what the killed worker held
    assert re.search(r"SIGKILL to worker-\d ", errors)


@pytest.mark.faults
def test_the_users_own_messages_on_the_local_tracker(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    queues = ("orders", "mails", "reports")
    file.write_text(
        "".join(
            json.dumps(
                {
                    "json": {"n": n},
                    "queue": queues[n % 3],
                    "id": f"mine-{n}",
                    "demo": "poison" if n == 5 else "normal",
                    "key": f"k{n % 7}",
                }
            )
            + "\n"
            for n in range(300)
        )
        + '{"payload":"slow one","queue":"orders","demo":"slow"}\n'
        + '{"payload":"delayed","queue":"mails","demo":"normal","delay":1.5}\n'
    )
    result, _ = run_demo("--input", str(file), "--engine", "local")
    check_form(result)
    assert (result["sent"], result["lost"]) == (302, 0)
    assert result["acked"] + result["dead_lettered"] >= 302


@pytest.mark.faults
def test_its_pages_stay_until_ctrl_c_and_the_checker_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they stay, the checker judges the logs that the verdict's SQL has judged."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = start_demo("--messages", "300", "--engine", "local", "--stay")
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        said = ""
        while " ok:" not in f" {said}":
            said = process.stdout.readline()
            assert said, process.stderr.read()
            if "Pages: " in said:
                address = said.split("Pages: ")[1].strip()
        with urllib.request.urlopen(f"{address}api/queues", timeout=within(30)) as answer:
            assert json.loads(answer.read())["count"] == 3
        (properties,) = tmp_path.glob("kafkamq-demo-*/kafka/server.properties")
        port = re.search(r"PLAINTEXT://127\.0\.0\.1:(\d+)", properties.read_text())
        assert port is not None
        logs = read_namespace(
            ServiceConfig(bootstrap_servers=f"127.0.0.1:{port[1]}", namespace="demo")
        )
        checked = check_logs(
            messages=logs.messages,
            markers=logs.markers,
            dead_letters=logs.dead_letters,
            max_deliveries=3,
        )
        checked.require_ok()
        assert checked.dead_lettered >= 3
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
        process.communicate()


def children_of(pid: int) -> set[int]:
    """All descendants of a process now."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            parents[int(entry.name)] = int(fields[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.faults), signal.SIGKILL]
)
def test_everything_ends_with_the_demo(number: signal.Signals) -> None:
    process = start_demo("--messages", "50000", "--engine", "local")
    assert process.stdout is not None
    try:
        seen: set[int] = set()
        for line in process.stdout:
            seen |= children_of(process.pid)
            if "acked" in line:  # broker, Spark, tracker and workers are up
                break
        assert len(seen) >= 5  # a broker and its guard, Spark, two JVMs, three workers
        process.send_signal(number)
        assert process.wait(within(60)) != 0
    finally:
        process.kill()
        process.communicate()
    wait_until(lambda: not any(is_alive(pid) for pid in seen), "the end of all processes", 30)
