"""A tracker: what a worker left, gave back or was sent for later is delivered when it is due.

    python examples/tracker.py localhost:9092 shop

Run as many as the markers topic has partitions: they share them, and take over from one that dies.
``kafkamq tracker --engine local`` is the same with metrics, ``kafkamq tracker`` runs on Spark.
"""

from __future__ import annotations

import signal
import sys
import threading

from kafkamq.config import ServiceConfig
from kafkamq.markers.tracker.local import LocalTracker


def main() -> None:
    """Tracks until Ctrl-C or SIGTERM."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    servers, namespace = sys.argv[1:3]
    tracker = LocalTracker(ServiceConfig(bootstrap_servers=servers, namespace=namespace))
    print(f"tracking {namespace}", flush=True)
    tracker.run(stop)


if __name__ == "__main__":
    main()
