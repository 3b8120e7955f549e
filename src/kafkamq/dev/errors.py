"""What can go wrong before a local broker answers; each message says what to do about it."""

from __future__ import annotations

from kafkamq.errors import KafkaMQError


class JavaError(KafkaMQError):
    """Java is missing or too old."""


class ArtifactError(KafkaMQError):
    """Kafka's jars could not be fetched, or are not what the committed list says."""


class LocalKafkaError(KafkaMQError):
    """The broker's process did not start, or ended by itself."""
