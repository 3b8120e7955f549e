"""Handles orders; what is given up goes to an HTTP service, in the place of a topic.

    python examples/http_dead_letters.py localhost:9092 http://incidents.example/letters

The service gets each dead letter as a POST with JSON. It may get one twice, with the same
``Idempotency-Key``. While it does not answer with a 2xx, letters wait, and so do their messages.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from base64 import b64encode

from kafkamq import OutgoingDeadLetter, Reject, Service, Worker


class HttpDeadLetters:
    """A ``dead_letter_writer``: any answer but a 2xx raises, and the letter is given again."""

    def __init__(self, url: str) -> None:
        self._url = url

    def write(self, letter: OutgoingDeadLetter) -> None:
        """Posts a dead letter."""
        known = {
            "queue": letter.queue_id,
            "reason": letter.reason.value,
            "error": letter.error,
            "deliveries": letter.delivery_count,
            "payload": b64encode(letter.payload or b"").decode(),
        }
        headers = {
            "Content-Type": "application/json",
            "Idempotency-Key": letter.origin.encode().decode(),
        }
        request = urllib.request.Request(self._url, json.dumps(known).encode(), headers)
        urllib.request.urlopen(request, timeout=10).close()


def main() -> None:
    """Works until it is asked to stop."""
    bootstrap, url = sys.argv[1:3]
    with Service(bootstrap, *sys.argv[3:4]) as service:
        letters = HttpDeadLetters(url)
        orders = service.queue("orders", backend="offsets", dead_letter_writer=letters)

        @orders.handler()
        def handle(order: dict[str, int]) -> Reject | None:
            return Reject("the order has no amount") if "amount" not in order else None

        print("ready", flush=True)
        Worker(service).run()


if __name__ == "__main__":
    main()
