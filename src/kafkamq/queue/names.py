"""Names of consumer groups that more than one shell must know."""

from __future__ import annotations

from kafkamq.config import QueueConfig, ServiceConfig


def group_of(config: ServiceConfig, queue_id: str) -> str:
    """The consumer group of a queue's workers; no namespace or topic has a slash in its name."""
    return f"kafkamq/{config.namespace}/{queue_id}"


def group_of_workers(config: ServiceConfig, queue: QueueConfig) -> str:
    """The group that a queue's settings name, or else its own."""
    return queue.group_id or group_of(config, queue.queue_id)
