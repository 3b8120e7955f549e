"""The errors that kafkamq raises. Messages say what happened, where, and what to do about it.

``transport/errors.py`` makes them of Kafka's: there a ``KafkaError`` is classified.
"""

from __future__ import annotations


class KafkaMQError(Exception):
    """Base of every error that kafkamq raises on purpose."""


class ConfigError(KafkaMQError, ValueError):
    """A setting cannot work; names the field, the value and the limit."""


class StateError(KafkaMQError):
    """The caller broke the contract: closed object, second verdict, cancelled too late."""


class WireError(KafkaMQError):
    """Bytes in a log are malformed.

    Attributes:
        topic: Where the record stands; empty when the caller of a codec did not say.
        partition: Its partition; -1 when unknown.
        offset: Its offset; -1 when unknown.
        reason: What is wrong with the bytes; never the bytes themselves.
    """

    def __init__(
        self, reason: str, *, topic: str = "", partition: int = -1, offset: int = -1
    ) -> None:
        where = f"{topic or '?'}[{partition}]@{offset}: " if topic or offset >= 0 else ""
        super().__init__(f"{where}{reason}")
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.reason = reason


class UnsupportedVersionError(WireError):
    """A record of a newer protocol version: stop and upgrade, do not pass it (R21)."""


class LeaseLostError(KafkaMQError):
    """The lease or claim ended before the verdict; the message may be with another worker.

    Attributes:
        messages: The messages concerned (as their ``message_id`` values), when several are named.
    """

    def __init__(self, text: str, messages: tuple[object, ...] = ()) -> None:
        super().__init__(text)
        self.messages = messages


class DeadlineExceededError(KafkaMQError, TimeoutError):
    """A bounded wait ended; nothing was dropped, the call may be repeated."""


class SchemaRegistryError(KafkaMQError):
    """A schema registry does not answer, or refuses; the same call may succeed later.

    Attributes:
        delay_s: After so many s it is worth another try.
    """

    def __init__(self, text: str, *, delay_s: float = 1.0) -> None:
        super().__init__(text)
        self.delay_s = delay_s


class BrokerError(KafkaMQError):
    """Kafka refused or failed; wraps a ``KafkaError``.

    Attributes:
        code: Kafka's error name, for example ``TOPIC_AUTHORIZATION_FAILED``.
        is_retriable: The same call may succeed later.
        is_fatal: The client that saw it is unusable; make a new one.
    """

    def __init__(
        self, text: str, *, code: str = "", is_retriable: bool = False, is_fatal: bool = False
    ) -> None:
        super().__init__(text)
        self.code = code
        self.is_retriable = is_retriable
        self.is_fatal = is_fatal


class FencedError(BrokerError):
    """Another instance took over; stop, do not retry."""


class DataLossError(BrokerError):
    """A committed position lies outside the log: records were deleted unread (R23)."""
