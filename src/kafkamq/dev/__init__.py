"""Development and tests get a real Kafka broker here, and its pytest fixture."""

from kafkamq.dev.artifacts import DEFAULT_VERSION, ArtifactError, KafkaJars, fetch_kafka
from kafkamq.dev.broker import Listener, LocalKafka, Node
from kafkamq.dev.environment import JavaError, LocalKafkaError, cache_dir_from, java_from

__all__ = [
    "LocalKafka", "Listener", "Node", "KafkaJars", "fetch_kafka", "DEFAULT_VERSION",
    "cache_dir_from", "java_from", "ArtifactError", "JavaError", "LocalKafkaError",
]  # fmt: skip
