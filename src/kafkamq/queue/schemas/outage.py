"""When a registry that does not answer is asked again."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from kafkamq.config import Backoff
from kafkamq.errors import SchemaRegistryError
from kafkamq.queue.rules.retry import backoff_delay_ms

_BACKOFF = Backoff(first=0.5, max=15.0, jitter=0.2)
_log = logging.getLogger(__name__)
T = TypeVar("T")


class Outage:
    """Asks a registry; after a failure only when its back-off is over. Thread-safe.

    Those who come meanwhile are told at once, so nobody waits for the same time-out twice.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._failures = 0  # in a row
        self._until_s = 0.0
        self._error_text = ""

    def ask(self, question: Callable[[], T]) -> T:
        """What ``question`` returns; any error but a ``SchemaRegistryError`` is an answer too."""
        with self._lock:
            left_s = self._until_s - time.monotonic()
            error_text = self._error_text
        if left_s > 0:
            raise SchemaRegistryError(error_text, delay_s=left_s)
        try:
            answer = question()
        except SchemaRegistryError as error:
            error.delay_s = self._failed(str(error))
            raise
        except Exception:
            self._answered()
            raise
        self._answered()
        return answer

    def _answered(self) -> None:
        with self._lock:
            was_away, self._failures = self._failures > 0, 0
        if was_away:
            _log.info("the schema registry answers again", extra={"registry": self._name})

    def _failed(self, error_text: str) -> float:
        with self._lock:
            self._failures += 1
            is_first = self._failures == 1
            delay_s = backoff_delay_ms(_BACKOFF, self._failures, random.random()) / 1000
            self._until_s, self._error_text = time.monotonic() + delay_s, error_text
        if is_first:
            _log.warning(
                "a schema registry does not answer: messages wait for it",
                extra={"registry": self._name, "error": error_text},
            )
        return delay_s
