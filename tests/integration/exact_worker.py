"""A worker of an ``exactly_once`` queue for tests that kill it; holds what it gets for a moment.

Run: python exact_worker.py BOOTSTRAP NAMESPACE QUEUE TIMEOUT_S
"""

from __future__ import annotations

import random
import sys
import time

from kafkamq import Service


def main(bootstrap: str, namespace: str, queue_id: str, timeout_s: str) -> None:
    kafka = {"session.timeout.ms": "6000", "transaction.timeout.ms": "3000"}
    with Service(bootstrap, namespace, kafka=kafka) as service:
        queue = service.queue(queue_id, redelivery_timeout=float(timeout_s), exactly_once=True)
        with queue.consumer() as consumer:
            while True:
                for message in consumer.receive_many(50, 0.5):
                    if random.random() < 0.1:
                        time.sleep(0.02)
                    message.ack()


if __name__ == "__main__":
    main(*sys.argv[1:])
