"""Sends orders into a queue, the last one for later, and waits until Kafka has them.

    python examples/sender.py localhost:9092 shop 10

``examples/worker.py`` handles them, ``examples/tracker.py`` delivers what is due later, and what a
worker left, again. The key of an order is its customer. Its id travels with every delivery.
"""

from __future__ import annotations

import json
import sys

from kafkamq import Service


def main() -> None:
    """Sends ``COUNT`` orders, numbered from 1."""
    servers, namespace, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with Service(servers, namespace) as service:
        service.create_topics(partitions=4, marker_partitions=4)  # those that there are not
        with service.queue("orders").producer() as producer:
            sent = [
                producer.send(
                    json.dumps({"id": number}).encode(),
                    key=f"customer-{number % 5}",
                    id=f"order-{number}",
                    delay=2.0 if number == count else 0.0,
                )
                for number in range(1, count + 1)
            ]
            for delivery in sent:
                delivery.result(30.0)  # raises what kept a message from being sent
    print(f"sent {len(sent)} orders", flush=True)


if __name__ == "__main__":
    main()
