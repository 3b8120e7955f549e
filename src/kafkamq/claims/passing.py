"""Errors that a reader of claims may wait out: brokers that start, move or do not answer."""

from __future__ import annotations

from confluent_kafka import KafkaError

from kafkamq.transport.events import mends_itself

__all__ = ["is_passing"]

_UNKNOWN = frozenset(
    {  # what a broker that has just started may say of a topic
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
    }
)


def is_passing(error: KafkaError) -> bool:
    """False: no waiting mends it."""
    return mends_itself(error) or (error.code() in _UNKNOWN and not error.fatal())
