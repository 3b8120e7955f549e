"""Errors that a reader of claims may wait out: brokers that start, move or do not answer."""

from __future__ import annotations

from confluent_kafka import KafkaError

__all__ = ["is_passing"]

_PASSING = frozenset(
    {
        KafkaError._PARTITION_EOF,
        KafkaError.UNKNOWN_TOPIC_OR_PART,  # of a broker that has just started
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TRANSPORT,
        KafkaError._TIMED_OUT,
        KafkaError._RESOLVE,
        KafkaError._MAX_POLL_EXCEEDED,
    }
)


def is_passing(error: KafkaError) -> bool:
    """False: no waiting mends it."""
    return not error.fatal() and (error.retriable() or error.code() in _PASSING)
