"""Names of consumer groups and topics that more than one shell must know."""

from __future__ import annotations

from kafkamq.config import QueueConfig, ServiceConfig


def group_of(config: ServiceConfig, queue_id: str) -> str:
    """The consumer group of a queue's workers; no namespace or topic has a slash in its name."""
    return f"kafkamq/{config.namespace}/{queue_id}"


def group_of_workers(config: ServiceConfig, queue: QueueConfig) -> str:
    """The group that a queue's settings name, or else its own."""
    return queue.group_id or group_of(config, queue.queue_id)


def actions_topic(config: ServiceConfig) -> str:
    """The topic of what operators have done by ``kafkamq web``, made at their first action."""
    return f"{config.namespace}.actions"


def actions_group(config: ServiceConfig) -> str:
    """The group whose member that has the actions topic runs its jobs."""
    return f"kafkamq.{actions_topic(config)}"
