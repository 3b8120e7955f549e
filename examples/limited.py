"""Calls a service that allows so many calls a second, and no more than that.

    python examples/limited.py localhost:9092 mails http://localhost:8080 50

``max_rate`` spaces the calls of this process. Where others call the service, too, it may still
answer 429: then the record waits as long as the answer says, and the others go on. With N
processes each one takes an N-th of the rate.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

from kafkamq import Nack, ParallelConsumer, ParallelRecord

TIMEOUT_S = 10.0


def main() -> None:
    """Runs until Ctrl-C or SIGTERM."""
    servers, topic, url, rate = sys.argv[1:5]

    def call(record: ParallelRecord) -> Nack | None:
        request = urllib.request.Request(url, data=record.value)
        try:
            urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
        except urllib.error.HTTPError as refused:
            refused.close()
            if refused.code != 429:
                raise  # tried again, after the consumer's back-off
            return Nack(delay=float(refused.headers.get("Retry-After", "1")))
        return None

    ParallelConsumer(
        topic,
        group_id=f"{topic}-calls",
        bootstrap_servers=servers,
        ordering="unordered",
        concurrency=16,
        max_rate=float(rate),
    ).run(call)


if __name__ == "__main__":
    main()
