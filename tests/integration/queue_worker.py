"""A worker process for tests that kill it: acks what it gets, some of it slowly.

Run: python queue_worker.py BOOTSTRAP NAMESPACE QUEUE TIMEOUT_S
"""

from __future__ import annotations

import sys
import time

from kafkamq import Service


def main(bootstrap: str, namespace: str, queue_id: str, timeout_s: str) -> None:
    with Service(bootstrap, namespace, kafka={"session.timeout.ms": "6000"}) as service:
        queue = service.queue(queue_id, redelivery_timeout=float(timeout_s))
        with queue.consumer() as consumer:
            while True:
                for message in consumer.receive_many(20, 0.5):
                    if int(message.payload or b"0") % 5 == 0:
                        time.sleep(0.02)
                    message.ack()


if __name__ == "__main__":
    main(*sys.argv[1:])
