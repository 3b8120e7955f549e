"""Errors that a consumer's ``poll`` tells of, and that librdkafka mends itself."""

from __future__ import annotations

from confluent_kafka import KafkaError

from kafkamq.transport.errors import BROKER_GONE

__all__ = ["mends_itself"]

_PASSING = BROKER_GONE | frozenset(
    {
        KafkaError._PARTITION_EOF,
        KafkaError._MAX_POLL_EXCEEDED,
        KafkaError._TIMED_OUT,
        KafkaError._RESOLVE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
    }
)


def mends_itself(error: KafkaError) -> bool:
    """Whether polling on is all that is needed; False: somebody must act, or a new client."""
    return not error.fatal() and (error.retriable() or error.code() in _PASSING)
