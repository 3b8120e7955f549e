"""What the messages themselves say, for attempts whose STARTs say nothing of it.

Those are STARTs of batches (R29), and kafka-mq-go's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from kafkamq.config import ServiceConfig
from kafkamq.errors import DeadlineExceededError
from kafkamq.markers.rules.attempts import Attempt
from kafkamq.markers.tracker.reading import MessageLookup
from kafkamq.queue.wire.headers import read_message_headers
from kafkamq.transport.admin import Admin
from kafkamq.transport.log_reader import END_GRACE_S, Patience
from kafkamq.transport.record import headers_of

UNKNOWN = -1
_MAX_BYTES = 16 * 1024 * 1024
_LOOK_S = 0.5  # between two looks for what brokers do not know yet
TIMEOUT_S = 120.0


class MessageFacts:
    """Reads messages again in a task; one owner thread. Nothing is opened before it is needed.

    Of a message that is gone nothing is known: its attempt's ``delivery_count`` is ``UNKNOWN``.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._lookup: MessageLookup | None = None

    def put_into(self, attempts: Sequence[Attempt]) -> None:
        """Key, headers, delivery count and time of those messages that are still there.

        Raises:
            BrokerError, DeadlineExceededError: They cannot be read.
        """
        try:
            bare = [each for each in attempts if not each.headers and not each.message_timestamp_ms]
            self._read(bare)
        except BaseException:
            self.close()  # the next task of this process has another client
            raise

    def _read(self, bare: list[Attempt]) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while bare:
            if self._lookup is None:
                self._admin = Admin(self._config, timeout_s=10.0)
                self._lookup = MessageLookup(self._config, Patience(END_GRACE_S), self._admin)
            spans = [(each.message_id, 1) for each in bare]
            read = self._lookup.read(spans, deadline_s=deadline_s, max_bytes=_MAX_BYTES)
            awaited = []
            for attempt, (records, is_awaited) in zip(bare, read, strict=False):
                if is_awaited:
                    awaited.append(attempt)
                elif (message := records[0]) is not None:
                    attempt.key = message.key() or b""
                    attempt.headers = headers_of(message)
                    attempt.delivery_count = read_message_headers(attempt.headers).delivery_count
                    attempt.message_timestamp_ms = message.timestamp()[1]
                elif attempt.delivery_count:  # of a SCHEDULE it is 0
                    attempt.delivery_count = UNKNOWN
            bare = awaited + bare[len(read) :]
            if awaited and time.monotonic() + _LOOK_S > deadline_s:
                raise DeadlineExceededError(f"{len(bare)} messages could not be read again in time")
            if awaited:
                time.sleep(_LOOK_S)

    def close(self) -> None:
        """End the clients; idempotent."""
        if self._lookup is not None:
            self._lookup.close()
            self._admin.close()
            self._lookup = None


_facts: dict[tuple[object, ...], MessageFacts] = {}


def message_facts(config: ServiceConfig) -> MessageFacts:
    """This process's: a query has a task for each partition, an audit some dozen queries."""
    key = os.getpid(), config.bootstrap_servers, config.message_topic, *sorted(config.kafka.items())
    if key not in _facts:
        _facts[key] = MessageFacts(config)
    return _facts[key]
