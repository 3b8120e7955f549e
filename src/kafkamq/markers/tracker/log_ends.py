"""How far the logs reach, and how long an open transaction has held their readers back (R24)."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from kafkamq.config import ServiceConfig
from kafkamq.errors import KafkaMQError
from kafkamq.transport.admin import Admin

_INTERVAL_S = 2.0
_TIMEOUT_S = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The end of one partition's log as it was last seen."""

    stable_offset: int  # what read_committed readers can reach
    stable_since_s: float | None  # monotonic; since when it stands below the end, None: it does not

    def stalled_s(self, now_s: float) -> float:
        """Seconds for which readers have been held back."""
        return 0.0 if self.stable_since_s is None else max(0.0, now_s - self.stable_since_s)

    def seen(self, stable_offset: int, end_offset: int, now_s: float) -> LogEnd:
        """It was looked at again."""
        if stable_offset >= end_offset:
            return LogEnd(stable_offset, None)
        if stable_offset > self.stable_offset or self.stable_since_s is None:
            return LogEnd(stable_offset, now_s)
        return self


class LogWatch:
    """Looks at the ends of the markers and messages logs, in a thread of its own.

    The thread begins when somebody asks for the first time: who is never scraped pays nothing.
    """

    def __init__(self, config: ServiceConfig, *, interval_s: float = _INTERVAL_S) -> None:
        self._config = config
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ends: dict[str, dict[int, LogEnd]] = {}

    def markers(self) -> dict[int, LogEnd]:
        """Per partition of the markers topic, as last seen; does not wait."""
        return self._seen(self._config.marker_topic)

    def messages(self) -> dict[int, LogEnd]:
        """Per partition of the messages topic, as last seen; does not wait."""
        return self._seen(self._config.message_topic)

    def close(self) -> None:
        """End the thread; idempotent."""
        self._stopping.set()

    def _seen(self, topic: str) -> dict[int, LogEnd]:
        with self._lock:
            if self._thread is None and not self._stopping.is_set():
                self._thread = threading.Thread(
                    target=self._run, name="kafkamq-log-watch", daemon=True
                )
                self._thread.start()
        return dict(self._ends.get(topic, {}))

    def _run(self) -> None:
        with Admin(self._config, timeout_s=_TIMEOUT_S) as admin:
            while not self._stopping.is_set():
                for topic in (self._config.marker_topic, self._config.message_topic):
                    self._look(admin, topic)
                self._stopping.wait(self._interval_s)

    def _look(self, admin: Admin, topic: str) -> None:
        try:
            ends = admin.log_ends(topic)
        except KafkaMQError as error:  # what is known grows old, and a stall longer
            _log.debug("the ends of a log are not known", extra={"error": str(error)})
            return
        now_s = time.monotonic()
        known = self._ends.get(topic, {})
        self._ends[topic] = {
            number: known.get(number, LogEnd(-1, None)).seen(stable, end, now_s)
            for number, (stable, end) in ends.items()
        }
