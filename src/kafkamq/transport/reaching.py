"""Whether anybody answers, before a command begins: one line instead of a long wait.

A library waits for brokers that come back, and whoever started it by hand wants to know of a wrong
port. So the commands ask this first, and the client that asks logs nothing.
"""

from __future__ import annotations

import time
from concurrent.futures import wait

from confluent_kafka import KafkaException

from kafkamq.config import ServiceConfig
from kafkamq.transport.clients import open_admin
from kafkamq.transport.errors import UNANSWERED, ErrorWatch, meaning
from kafkamq.transport.settings import admin_settings

PATIENCE_S = 3.0
"""A connection is refused, or a name unknown: so long it is tried again."""
TIMEOUT_S = 15.0
"""Nothing comes back at all, which a slow network may explain."""
_SLICE_S = 0.1


def require_brokers(
    config: ServiceConfig, *, patience_s: float = PATIENCE_S, timeout_s: float = TIMEOUT_S
) -> None:
    """Return when a broker has answered, whatever it said."""
    watch = ErrorWatch(config.bootstrap_servers)
    client = open_admin(admin_settings(config), watch, quiet=True)
    begun_s = time.monotonic()
    try:
        future = client.describe_cluster(request_timeout=timeout_s)
        while not wait((future,), timeout=_SLICE_S).done:
            client.poll(0)  # serves the error callback
            watch.check("connecting")
            if time.monotonic() - begun_s > (patience_s if watch.is_down else timeout_s):
                raise watch.silence()
        client.poll(0)
        watch.check("connecting")
        error = future.exception()
        if isinstance(error, KafkaException) and meaning(error) in UNANSWERED:
            raise watch.silence()
    finally:
        client.__exit__(None, None, None)
