"""A worker process of an at-most-once queue: writes down what it is handed, and does no more.

Run: python once_worker.py BOOTSTRAP NAMESPACE QUEUE BATCH HISTORY
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from kafkamq import Service


def main(bootstrap: str, namespace: str, queue_id: str, batch: str, history: str) -> None:
    with (
        Service(bootstrap, namespace, kafka={"session.timeout.ms": "6000"}) as service,
        Path(history).open("ab", buffering=0) as seen,
        service.queue(queue_id, delivery="at-most-once").consumer() as consumer,
    ):
        while True:
            for message in consumer.receive_many(int(batch), 0.5):
                seen.write((message.payload or b"") + b"\n")
                time.sleep(0.001)
                message.ack()


if __name__ == "__main__":
    main(*sys.argv[1:])
