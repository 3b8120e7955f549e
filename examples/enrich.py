"""Enriches records by an HTTP call each, a thousand in flight on one thread.

    python examples/enrich.py localhost:9092 orders orders-enriched http://localhost:8080

For each record the service is asked for ``/KEY``; its answer is produced under the record's key, in
the order of each key. What the service does not know is a dead letter, and what fails otherwise is
tried again. Only the standard library speaks HTTP here; any asynchronous client does.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from urllib.parse import quote, urlsplit

from kafkamq import Backoff, OutgoingRecord, ParallelConsumer, ParallelRecord, Reject

TIMEOUT_S = 10.0


class Service:
    """A minimal client of one HTTP server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "localhost", parts.port or 80

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(f"GET {path} HTTP/1.0\r\nHost: {self._host}\r\n\r\n".encode())
            answer = await asyncio.wait_for(reader.read(), TIMEOUT_S)
        finally:
            writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), body


def enrichment(service: Service, results: str):
    """The handler."""

    async def enrich(record: ParallelRecord) -> OutgoingRecord | Reject:
        key = (record.key or b"").decode()
        status, body = await service.get(f"/{quote(key)}")
        if status == 404:
            return Reject(f"the service does not know {key}")
        if status != 200:
            raise OSError(f"the service answered {status}")  # tried again, after a while
        enriched = {"order": (record.value or b"").decode(), "about": json.loads(body)}
        return OutgoingRecord(topic=results, key=record.key, value=json.dumps(enriched).encode())

    return enrich


def main() -> None:
    """Runs until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    servers, orders, results, url = sys.argv[1:5]
    with ParallelConsumer(
        orders,
        group_id="enrichment",
        bootstrap_servers=servers,
        ordering="key",
        concurrency=1000,
        max_attempts=5,
        backoff=Backoff(first=0.2, max=10.0),
        dead_letter_topic=f"{orders}-dead",
    ) as consumer:
        consumer.poll_and_produce(enrichment(Service(url), results))
        consumer.wait()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("bye")
