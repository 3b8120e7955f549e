"""Calls into librdkafka that must end, even where librdkafka forgets their timeout.

``rd_kafka_send_offsets_to_transaction`` can block forever when a group's coordinator has left the
cluster's metadata for a moment, as every restart of a broker does (librdkafka issues 5456, 5511).
So such calls run in a thread of their own, and who waits for them has a bound. A call that is
overdue is abandoned together with its client, which can neither be used nor ended any more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

_log = logging.getLogger(__name__)
_abandoned: list[object] = []  # ending a client that a thread is inside of would hang, or crash


class CallAbandonedError(Exception):
    """The call did not return; its client must not be touched again."""


class BoundedCall:
    """Runs one client's calls one after the other in a daemon thread; one owner thread."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, call: Callable[[], object], *, timeout_s: float, client: object) -> None:
        """Run ``call`` in time, or raise CallAbandonedError and keep ``client`` forever."""
        if self._thread is None:
            self._calls = SimpleQueue()
            self._thread = threading.Thread(
                target=_serve, args=(self._calls,), name="kafkamq-calls", daemon=True
            )
            self._thread.start()
        returned = threading.Event()
        failures: list[BaseException] = []

        def run() -> None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - raised by the owner
                failures.append(error)
            returned.set()

        self._calls.put(run)
        if not returned.wait(timeout_s):
            self._thread = None
            _abandoned.append(client)
            _log.warning(
                "a call into librdkafka did not return; its client is abandoned",
                extra={"timeout_s": timeout_s, "abandoned": len(_abandoned)},
            )
            raise CallAbandonedError(f"librdkafka did not return within {timeout_s:g} s")
        if failures:
            raise failures[0]

    def close(self) -> None:
        if self._thread is not None:
            self._calls.put(None)
            self._thread = None


def _serve(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while True:
        call = calls.get()
        if call is None:
            return
        call()
