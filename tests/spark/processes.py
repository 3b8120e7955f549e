"""Drivers of Spark in processes of their own, and the processes below them; for tests that kill."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.waiting import within

__all__ = [
    "Told",
    "answer",
    "below",
    "busy",
    "command_of",
    "driver",
    "python_processes",
    "python_workers",
    "start_driver",
    "told",
]

_PYTHON = re.compile(r"python\S* -m \S+\.daemon ")


def start_driver(
    program: str,
    *arguments: str,
    launcher: Sequence[str] = (),
    output: Path | None = None,
) -> subprocess.Popen[bytes]:
    """A Python program with its JVM, in a process group of their own.

    Args:
        program: Its text.
        *arguments: What it finds in ``sys.argv[1:]``.
        launcher: A command to run it behind.
        output: Gets what it says; None: what this process says goes there too.
    """
    command = [*launcher, sys.executable, "-c", program, *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if output is None:
        return subprocess.Popen(command, env=env, start_new_session=True)
    with output.open("ab") as stream:
        return subprocess.Popen(
            command, env=env, stdout=stream, stderr=stream, start_new_session=True
        )


@contextmanager
def driver(
    program: str,
    *arguments: str,
    launcher: Sequence[str] = (),
    output: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a driver that is killed at the end, with all that is below it."""
    process = start_driver(program, *arguments, launcher=launcher, output=output)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(within(30))


class Told:
    """A driver that reads commands from its input, and answers each by a line of JSON."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def say(self, command: str) -> None:
        """Have it begin something."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def tell(self, command: str) -> list[str]:
        """Have it do something; what it says. Nothing: it died."""
        self.say(command)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("said "):
                said: list[str] = json.loads(line.removeprefix("said "))
                return said
        assert command == "die", "the driver ended by itself"
        return []


def answer(commands: Mapping[str, Callable[[], list[str]]]) -> None:
    """Do in a driver what ``Told`` says, until its input ends."""
    for line in sys.stdin:
        said = commands[line.strip()]()
        sys.stdout.write(f"said {json.dumps(said)}\n")
        sys.stdout.flush()


@contextmanager
def told(command: Sequence[object], environment: Mapping[str, str]) -> Iterator[Told]:
    """A program in a process group of its own; killed at the end, with all that is below it."""
    process = subprocess.Popen(
        [str(word) for word in command],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield Told(process)
    finally:
        with suppress(ProcessLookupError):  # it has killed itself
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def below(top: int) -> dict[int, int]:
    """All processes below one, and their parents."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        parents[int(path.parent.name)] = int(fields[1])

    def is_below(pid: int) -> bool:
        while pid in parents and pid != top:
            pid = parents[pid]
        return pid == top

    return {pid: parent for pid, parent in parents.items() if pid != top and is_below(pid)}


def command_of(pid: int) -> str:
    """Its command line; empty when it has gone."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return text.replace(b"\0", b" ").decode("utf-8", "replace")


def python_processes(driver_pid: int) -> dict[int, int]:
    """The daemons of Spark's that fork Python workers, and these; with their parents."""
    parents = below(driver_pid)
    return {pid: parent for pid, parent in parents.items() if _PYTHON.search(command_of(pid))}


def python_workers(driver_pid: int) -> list[int]:
    """The processes in which Spark runs Python: children of its daemons, not these."""
    found = python_processes(driver_pid)
    return [pid for pid, parent in found.items() if parent in found]


def busy(pids: Iterable[int]) -> list[int]:
    """Those that run at this moment."""
    return [pid for pid in pids if _state(pid) == "R"]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""
