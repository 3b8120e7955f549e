"""The tracker process of a comparison: what the markers backend needs beside its workers."""

from __future__ import annotations

import threading
import time

from kafkamq.dev.children import Orders, serve, tell
from kafkamq.errors import DeadlineExceededError
from kafkamq.markers.tracker.local import LocalTracker

_LIVE_S = 60.0
_POLL_S = 0.05


def _run(orders: Orders) -> None:
    stopping = threading.Event()
    orders.follow(lambda _: stopping.set())
    tracker = LocalTracker(orders.config)
    with tracker.in_thread():
        deadline_s = time.monotonic() + _LIVE_S
        while not tracker.is_live:
            if time.monotonic() > deadline_s:
                raise DeadlineExceededError(f"the tracker was not live after {_LIVE_S:g} s")
            stopping.wait(_POLL_S)
        tell("ready")
        stopping.wait()


def main() -> None:
    """Tracks until told to stop, or until its parent is gone."""
    serve(_run)


if __name__ == "__main__":
    main()
