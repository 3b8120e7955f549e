"""A worker that handles orders until Ctrl-C.

    python examples/worker.py localhost:9092

Run as many as you like; kill them as you like: a tracker (``kafkamq tracker``) brings back what
they held. ``kafkamq send orders '{"id": 1}'`` gives them something to do.
"""

from __future__ import annotations

import json
import sys

from kafkamq import Backoff, Message, Service


def handle(message: Message) -> None:
    """Handles one order: leaving the block acknowledges, an exception gives it back."""
    try:
        with message:
            order = json.loads(message.payload or b"null")
            if not isinstance(order, dict) or "id" not in order:
                message.reject("an order needs an id")  # no retry mends it: to the dead letters
                return
            print(f"order {order['id']}, delivery {message.delivery_count}", flush=True)
    except ValueError as error:  # no JSON: it comes back later, and is counted
        print("given back:", error, flush=True)


def main() -> None:
    """Receives until it is interrupted."""
    with Service(sys.argv[1], *sys.argv[2:3]) as service:
        orders = service.queue(
            "orders",
            redelivery_timeout=10.0,
            max_deliveries=4,
            backoff=Backoff(first=1.0, max=60.0),
        )
        with orders.consumer(on_lease_lost=lambda lost: print("too late for", lost.id)) as consumer:
            for message in consumer:
                handle(message)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("bye")
