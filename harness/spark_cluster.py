"""A standalone Spark cluster on this machine: what ``kafkamq spark`` starts, several times."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from kafkamq.errors import DeadlineExceededError, StateError

PATIENCE_S = 120.0
EXECUTOR_SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
}
"""Properties of a session on it: one executor of one core per worker."""


class LocalSpark:
    """A master and workers of one core each; context manager."""

    def __init__(self, folder: Path, *, workers: int) -> None:
        self._folder = folder
        self._workers = workers
        self._processes: list[subprocess.Popen[bytes]] = []
        self._port, self._web_port = _free_port(), _free_port()
        self.master = f"spark://127.0.0.1:{self._port}"

    def start(self) -> LocalSpark:
        """Start all of it; returns when the workers have joined."""
        self._folder.mkdir(parents=True, exist_ok=True)
        ports = ["--port", str(self._port), "--web-port", str(self._web_port)]
        self._start("master", *ports)
        self._wait(lambda: self._alive() == 0)
        wanted, self._workers = self._workers, 0
        self.add_workers(wanted)
        return self

    def add_workers(self, count: int) -> None:
        """Start more of them; returns when they have joined."""
        for number in range(self._workers, self._workers + count):
            work = str(self._folder / f"work-{number}")
            more = ["--cores", "1", "--memory", "700m", "--host", "127.0.0.1", "--work-dir", work]
            self._start("worker", self.master, *more)
        self._workers += count
        self._wait(lambda: self._alive() == self._workers)

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            if any(each.poll() is not None for each in self._processes):
                raise StateError(f"a process of the Spark cluster has ended:\n{self.logs()}")
            if time.monotonic() > deadline_s:
                raise DeadlineExceededError(f"the Spark cluster is not up after {PATIENCE_S:g} s")
            time.sleep(0.1)

    def _start(self, *arguments: str) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        name = f"{arguments[0]}-{len(self._processes)}.log"
        with (self._folder / name).open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "kafkamq.cli", "spark", *arguments],
                    env={**os.environ, "PYTHONPATH": path, "SPARK_LOCAL_IP": "127.0.0.1"},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _alive(self) -> int:
        """Workers that have joined, as the master's page says; -1: it is not up."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self._web_port}/json/", timeout=5
            ) as page:
                return int(json.load(page)["aliveworkers"])
        except OSError:
            return -1

    def logs(self) -> str:
        """Return what the processes printed."""
        return "\n".join(path.read_text() for path in sorted(self._folder.glob("*.log")))

    def executors(self) -> list[int]:
        workers = {each.pid for each in self._processes[1:]}
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
                command = (path.parent / "cmdline").read_bytes()
            except (OSError, IndexError):
                continue
            if parent in workers and b"CoarseGrainedExecutorBackend" in command:
                found.append(int(path.parent.name))
        return found

    def stop(self) -> None:
        processes, self._processes = self._processes, []
        for process in reversed(processes):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)

    def __enter__(self) -> LocalSpark:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port
