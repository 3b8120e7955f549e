"""A broker's process, started under a supervisor that ends it when this process is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kafkamq.dev.errors import LocalKafkaError
from kafkamq.errors import StateError

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_KILL_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 5.0
_STANDING = frozenset("TtZX")


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
        if not self.is_running:  # the supervisor reaps its child last: until then the id is its own
            raise StateError("the broker does not run")
        os.kill(self.pid, number)

    def pause(self) -> None:
        """SIGSTOP; returns when all of its threads stand still, as far as ``/proc`` says so."""
        self.send(signal.SIGSTOP)
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        while not self._stands_still() and time.monotonic() < deadline_s:
            time.sleep(0.001)

    def _stands_still(self) -> bool:
        for stat in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # a thread that has ended
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
            pass  # it ended in between
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        except BaseException:  # a second Ctrl-C: no broker may stay behind
            self.kill()
            raise
        self._supervisor.wait(_KILL_TIMEOUT_S)
        return True

    def kill(self) -> None:
        with contextlib.suppress(StateError, ProcessLookupError):  # it ended in between
            self.send(signal.SIGKILL)
        self._supervisor.wait(_KILL_TIMEOUT_S)
