"""The end of a producer, the same for all that are no transactional ones."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from confluent_kafka import KafkaException

from kafkamq.transport.port import Producer

__all__ = ["end_producer"]

_REPORTS_S = 0.5


def end_producer(client: Producer, *, flush_s: float = 0.0) -> None:
    """End a producer; what it still holds after ``flush_s`` fails, and is reported, at once."""
    with suppress(KafkaException, SystemError):  # a fatal error: it is known, or does not matter
        if len(client) and flush_s:
            client.flush(flush_s)
        if len(client):
            partial(client.purge)()
            client.flush(_REPORTS_S)  # serves the reports
    # It may return with a fatal error raised, which would come up in any later line: calls through
    # ``partial`` are checked for that.
    with suppress(KafkaException, SystemError):
        partial(client.close)()
