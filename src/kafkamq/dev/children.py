"""Processes that are told what to do by lines on their stdin, and gone when that is closed.

Who started them may end in any way, even by SIGKILL: the system then closes the pipe, and each
child ends itself. Ctrl-C on the terminal reaches the parent alone: children have their own session.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kafkamq.config import ServiceConfig
from kafkamq.errors import DeadlineExceededError, KafkaMQError

_log = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0
# The end of what a child had started: what it would tidy up goes with its parent's folder.
GRACE_S = 0.5


class ChildError(KafkaMQError):
    """A process that was started here ended, or reported an error; its log says why."""


class Child:
    """One child process; the thread that made it controls it."""

    def __init__(self, module: str, orders: Mapping[str, Any], *, name: str, log: Path) -> None:
        """Starts ``python -m module`` with ``orders`` as its first line; its stderr is ``log``."""
        self.name = name
        self.log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._reports: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"child-{name}", daemon=True)
        self._reader.start()
        self.order(orders)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def order(self, orders: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(orders).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None

    def wait_for(self, event: str, *, timeout_s: float) -> dict[str, Any]:
        """Waits until it says ``{"event": event, ...}``; what it says before that is dropped."""
        while True:
            try:
                report = self._reports.get(timeout=timeout_s)
            except queue.Empty:
                raise DeadlineExceededError(
                    f"{self.name} did not say {event!r} within {timeout_s:g} s; "
                    f"its log is {self.log}"
                ) from None
            if report is None:
                raise self._ended()
            if report.get("event") == "error":
                raise ChildError(f"{self.name}: {report.get('text')}; its log is {self.log}")
            if report.get("event") == event:
                return report

    def check(self) -> None:
        if not self.is_running:
            raise self._ended()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it as a crash would: SIGKILL, to this process alone."""
        self._process.kill()
        self._process.wait(END_TIMEOUT_S)

    def end(self) -> None:
        """Closes its stdin and waits; kills it when that takes too long."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._kill_session()
        except BaseException:
            # On a second Ctrl-C, too, nothing may stay behind.
            self._kill_session()
            raise
        self._end_session()
        self._reader.join(1.0)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()

    def _end_session(self) -> None:
        """Ends what it had started itself, Spark's JVM for example."""
        deadline = time.monotonic() + GRACE_S
        with contextlib.suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < deadline:
                os.killpg(self._process.pid, signal.SIGTERM)
                time.sleep(0.05)
            os.killpg(self._process.pid, signal.SIGKILL)

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(END_TIMEOUT_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in self._process.stdout:
                with contextlib.suppress(ValueError):
                    self._reports.put(json.loads(line))
        self._reports.put(None)

    def _ended(self) -> ChildError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
        return ChildError(
            f"{self.name} ended with code {self._process.returncode}; its log, {self.log}, "
            "ends with:\n" + "\n".join(lines)
        )


def tell(event: str, **fields: Any) -> None:
    """A child's word to its parent."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


class Orders:
    """The child's side: lines of stdin as they come; its end ends this process at once."""

    def __init__(self) -> None:
        self.first: dict[str, Any] = json.loads(sys.stdin.readline() or "{}")

    @property
    def config(self) -> ServiceConfig:
        """Return the namespace that the first line names."""
        names = ("bootstrap_servers", "namespace", "kafka")
        return ServiceConfig(**{name: self.first[name] for name in names if name in self.first})

    def follow(self, handler: Callable[[dict[str, Any]], None]) -> None:
        """Calls ``handler`` with each later line, from a thread of its own."""
        threading.Thread(target=self._follow, args=(handler,), name="orders", daemon=True).start()

    def _follow(self, handler: Callable[[dict[str, Any]], None]) -> None:
        for line in sys.stdin:
            handler(json.loads(line))
        # The parent is gone; what we hold comes back by itself.
        os._exit(3)


def serve(run: Callable[[Orders], None]) -> None:
    """A child's ``main``: logs to stderr, and says why when ``run`` fails."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("py4j").setLevel(logging.WARNING)
    try:
        run(Orders())
    except BaseException as error:
        _log.exception("a child process failed")
        tell("error", text=f"{type(error).__name__}: {error}")
        raise
