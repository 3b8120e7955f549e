"""``kafkamq work``: SIGTERM lets what was begun end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import within

MODULE = """
from kafkamq import Worker
from kafkamq.testing import MemoryService

service = MemoryService()
queue = service.queue("q")
worker = Worker(service)

@queue.handler(concurrency=1)
def handle(body: str) -> None:
    print("begun", body, flush=True)
    while not worker._stopping.wait(0.01):
        pass
    print("ended", body, flush=True)

for name in ("a", "b"):
    queue.producer().send(name.encode())
"""

IN_A_PROCESS = """
import os, time
from kafkamq import Worker
from kafkamq.testing import MemoryService

service = MemoryService()
queue = service.queue("q")
worker = Worker(service)

@queue.handler(processes=1)
def handle(body: str) -> None:
    print("begun", body, flush=True)
    while not os.path.exists("gate"):
        time.sleep(0.01)
    print("ended", body, flush=True)

for name in ("a", "b"):
    queue.producer().send(name.encode())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "app.py").write_text(MODULE)
    command = [sys.executable, "-m", "kafkamq.cli", "work", "app:worker"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun a\n"
        process.send_signal(number)
        out, errors = process.communicate(timeout=within(60))
        assert process.returncode == 0, errors
        assert out == "ended a\n"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_drains(tmp_path: Path, number: signal.Signals) -> None:
    """Terminals and supervisors send it so: handlers in processes of their own get it, too."""
    (tmp_path / "app.py").write_text(IN_A_PROCESS)
    command = [sys.executable, "-m", "kafkamq.cli", "work", "app:worker"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun a\n"
        os.killpg(process.pid, number)
        (tmp_path / "gate").touch()
        out, errors = process.communicate(timeout=within(60))
        assert process.returncode == 0, errors
        assert out.startswith("ended a\n"), errors
    finally:
        process.kill()
        process.communicate()


USES_KAFKA = """
from kafkamq import Service, Worker

service = Service({bootstrap!r}, {namespace!r})
service.create_topics(partitions=1, marker_partitions=1, replication_factor=1)
queue = service.queue("orders")
service.queue("ordres").producer().send(b"one").result(30)
worker = Worker(service)

@queue.handler()
def handle(body: str) -> None:
    pass
"""


def test_a_queue_that_was_never_used_is_told(
    tmp_path: Path, bootstrap: str, namespace: str
) -> None:
    (tmp_path / "app.py").write_text(USES_KAFKA.format(bootstrap=bootstrap, namespace=namespace))
    command = [sys.executable, "-m", "kafkamq.cli", "work", "app:worker"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert "ever sent to orders in" in process.stderr.readline()
        assert process.stderr.readline().startswith("Working as app:worker")
    finally:
        process.kill()
        process.communicate()
