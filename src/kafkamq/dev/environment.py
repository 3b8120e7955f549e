"""What a local broker takes from its machine: a folder for downloads, and a Java new enough.

The library never reads the environment: the CLI and the pytest plugin pass ``os.environ`` in.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kafkamq.errors import KafkaMQError, StateError

HOST = "127.0.0.1"
# Kafka 4 and Spark 4 both need it.
MIN_JAVA = 17
_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')
_HINT = (
    f"Install Java {MIN_JAVA} or newer (Debian and Ubuntu: apt-get install "
    "openjdk-17-jre-headless) or set JAVA_HOME to one."
)


class JavaError(KafkaMQError):
    """Java is missing or too old."""


def cache_dir_from(environ: Mapping[str, str]) -> Path | None:
    """Return the folder for downloads: ``KAFKAMQ_CACHE``, else ``kafkamq`` in ``XDG_CACHE_HOME``.

    None means the default of `fetch_kafka`, ``~/.cache/kafkamq``.
    """
    if own := environ.get("KAFKAMQ_CACHE"):
        return Path(own).expanduser()
    xdg = Path(environ.get("XDG_CACHE_HOME", ""))
    # The specification of XDG folders: a relative path is invalid and ignored.
    return xdg / "kafkamq" if xdg.is_absolute() else None


def java_from(environ: Mapping[str, str]) -> str:
    """Return the Java to run: that of ``JAVA_HOME`` (as Spark does), else the one on the path."""
    home = environ.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else "java"


def parse_java_version(output: str) -> int:
    """Return the major version in what ``java -version`` prints; 0 when it names none.

    Up to Java 8 the major version was the second number: ``1.8.0_392``.
    """
    found = _VERSION.search(output)
    if found is None:
        return 0
    first, second = int(found[1]), int(found[2] or 0)
    return second if first == 1 else first


@functools.lru_cache(maxsize=8)
def java_command(java: str = "java") -> str:
    path = shutil.which(java)
    if path is None:
        raise JavaError(f"No Java found as {java!r}. {_HINT}")
    try:
        answer = subprocess.run(
            [path, "-version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaError(f"{path} -version does not run: {error}. {_HINT}") from error
    text = answer.stderr + answer.stdout
    version = parse_java_version(text)
    if version < MIN_JAVA:
        lines = text.strip().splitlines()
        raise JavaError(
            f"Java {version or 'of unknown version'} at {path} is not enough "
            f"({lines[0] if lines else 'it says nothing'}). {_HINT}"
        )
    return path


_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_KILL_TIMEOUT_S = 30.0
_STANDSTILL_S = 5.0
_STANDING = frozenset("TtZX")
_FIRST, _LAST = 15_000, 65_000
_MAX_TRIES = 1_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_EPHEMERAL = (32_768, 65_535)


class LocalKafkaError(KafkaMQError):
    """A server's process did not start, or ended by itself."""


class BrokerProcess:
    """One run of a command, in a session of its own: a Ctrl-C on the terminal does not reach it.

    Not thread-safe, but any thread may start it and end before it.
    """

    def __init__(
        self, command: Sequence[str], *, log_path: Path, grace_s: float, remove: Path | None
    ) -> None:
        self._grace_s = grace_s
        supervisor = [sys.executable, "-I", "-S", str(_SUPERVISOR)]
        arguments = [str(os.getpid()), str(grace_s), str(remove or "")]
        with log_path.open("ab") as log:
            self._supervisor = subprocess.Popen(
                [*supervisor, *arguments, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self._supervisor.stdout is not None
        with self._supervisor.stdout as output:
            answer = output.readline()
        if not answer.strip().isdigit():
            self._supervisor.wait(_KILL_TIMEOUT_S)
            raise LocalKafkaError(f"the supervisor of the broker did not start; see {log_path}")
        self.pid = int(answer)

    @property
    def is_running(self) -> bool:
        return self._supervisor.poll() is None

    @property
    def exit_code(self) -> int | None:
        """128 + n after signal n; None while it runs."""
        return self._supervisor.poll()

    def send(self, number: signal.Signals) -> None:
        if not self.is_running:
            # The supervisor reaps its child last: until then the id is its own.
            raise StateError("the broker does not run")
        os.kill(self.pid, number)

    def pause(self) -> None:
        """SIGSTOP; returns when all of its threads stand still, as far as ``/proc`` says so."""
        self.send(signal.SIGSTOP)
        deadline_s = time.monotonic() + _STANDSTILL_S
        while not self._stands_still() and time.monotonic() < deadline_s:
            time.sleep(0.001)

    def _stands_still(self) -> bool:
        for stat in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):
                if stat.read_text().rpartition(")")[2].split()[0] not in _STANDING:
                    return False
        return True

    def stop(self) -> bool:
        """Ends the command, by SIGKILL if it takes too long; returns whether it ended by itself."""
        try:
            self.send(signal.SIGCONT)
            self.send(signal.SIGTERM)
            self._supervisor.wait(self._grace_s)
        except (StateError, ProcessLookupError):
            pass
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        except BaseException:
            # On a second Ctrl-C, too, no broker may stay behind.
            self.kill()
            raise
        self._supervisor.wait(_KILL_TIMEOUT_S)
        return True

    def kill(self) -> None:
        with contextlib.suppress(StateError, ProcessLookupError):
            self.send(signal.SIGKILL)
        self._supervisor.wait(_KILL_TIMEOUT_S)


def free_port_pair(port: int = 0) -> tuple[int, int]:
    """Two ports that nobody listens on now, outside the system's ephemeral range.

    The first is ``port`` unless that is 0.

    A port of that range may be taken by any outgoing connection while a broker restarts, even by
    a client that tries to reach the broker: on the loopback it then connects to itself.

    Another process may still take a port first: the caller must be ready to ask again.
    """
    if port and not _is_free(port):
        raise LocalKafkaError(f"port {port} on {HOST} is in use: choose another, or 0 for any")
    if port:
        return port, free_ports(1, besides=port)[0]
    first, second = free_ports(2)
    return first, second


def free_ports(count: int, *, besides: int = 0) -> tuple[int, ...]:
    """Ports that nobody listens on now, different from each other and from ``besides``."""
    low, high = _ephemeral_range()
    ports: list[int] = []
    # All are bound at once, so that they differ.
    with contextlib.ExitStack() as bound:
        for _ in range(_MAX_TRIES):
            if len(ports) == count:
                return tuple(ports)
            drawn = random.randint(_FIRST, _LAST)
            if low <= drawn <= high or drawn in ports or drawn == besides:
                continue
            probe = bound.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            try:
                probe.bind((HOST, drawn))
            except OSError:
                continue
            ports.append(drawn)
    raise LocalKafkaError(f"no {count} free ports on {HOST} in {_MAX_TRIES} tries")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the broker binds: connections of its predecessor that still linger do not matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _ephemeral_range() -> tuple[int, int]:
    try:
        low, high = map(int, _EPHEMERAL.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return _USUAL_EPHEMERAL
    # A system that gives nearly all ports to connections leaves no choice.
    return (low, high) if low - _FIRST >= 1_000 or _LAST - high >= 1_000 else (0, 0)
