"""A worker that handles orders until Ctrl-C or SIGTERM, then lets its handlers end.

    python examples/worker.py localhost:9092 shop

Run as many as you like; kill them as you like: a tracker (``examples/tracker.py``) brings back
what they held. ``examples/sender.py`` gives them something to do. A number behind the namespace is
the seconds that each order takes.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from kafkamq import Backoff, Message, Nack, Reject, Service, Worker

SECONDS = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0


@dataclass
class Order:
    """What a message holds, as JSON; anything else goes to the dead letters."""

    id: int
    amount: int = 1


def handle(order: Order, message: Message) -> Nack | Reject | None:
    """Handles one order: returning acknowledges, an exception gives it back."""
    if order.amount < 1:
        return Reject("an order needs an amount")  # no retry mends it: to the dead letters
    if order.amount > 100 and message.delivery_count == 1:
        return Nack(delay=5.0, reason="large orders wait for the stock")
    print(f"order {order.id}, delivery {message.delivery_count}", flush=True)
    time.sleep(SECONDS)
    return None


def main() -> None:
    """Works until it is asked to stop."""
    with Service(sys.argv[1], *sys.argv[2:3]) as service:
        orders = service.queue(
            "orders",
            redelivery_timeout=5.0,
            max_deliveries=4,
            backoff=Backoff(first=1.0, max=60.0),
        )
        orders.handler(concurrency=50, timeout=60.0)(handle)
        Worker(service, on_lease_lost=lambda lost: print("too late for", lost.id)).run()


if __name__ == "__main__":
    main()
