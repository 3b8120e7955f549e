"""A worker of an ``exactly_once`` queue for tests that kill it; holds what it gets for a moment.

Run: python exact_worker.py BOOTSTRAP NAMESPACE QUEUE TIMEOUT_S FILE

FILE always holds the number of messages that it was handed and has not acked, also after its death.
"""

from __future__ import annotations

import os
import random
import sys
import time

from kafkamq import Service


def main(bootstrap: str, namespace: str, queue_id: str, timeout_s: str, file: str) -> None:
    in_hand = os.open(file, os.O_WRONLY | os.O_CREAT)
    kafka = {"session.timeout.ms": "6000", "transaction.timeout.ms": "3000"}
    with Service(bootstrap, namespace, kafka=kafka) as service:
        queue = service.queue(queue_id, redelivery_timeout=float(timeout_s), exactly_once=True)
        with queue.consumer() as consumer:
            while True:
                messages = consumer.receive_many(50, 0.5)
                for done, message in enumerate(messages):
                    os.pwrite(in_hand, b"%02d" % (len(messages) - done), 0)
                    if random.random() < 0.1:
                        time.sleep(0.02)
                    message.ack()
                os.pwrite(in_hand, b"00", 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
