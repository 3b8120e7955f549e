"""KafkaErrors as librdkafka would build them."""

from __future__ import annotations

from confluent_kafka import KafkaError, KafkaException


def kafka_error(
    code: int,
    text: str | None = None,
    *,
    fatal: bool = False,
    retriable: bool = False,
    abort: bool = False,
) -> KafkaError:
    return KafkaError(code, text, fatal, retriable, abort)


def failure(
    code: int,
    text: str | None = None,
    *,
    fatal: bool = False,
    retriable: bool = False,
    abort: bool = False,
) -> KafkaException:
    """The same, to be raised."""
    return KafkaException(KafkaError(code, text, fatal, retriable, abort))
