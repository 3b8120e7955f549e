"""Names of consumer groups that more than one shell must know."""

from __future__ import annotations

import logging

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import KafkaMQError
from kafkamq.markers.wire.mqgo import CONSUMER_GROUP_PREFIX
from kafkamq.transport.admin import Admin

__all__ = ["group_of", "group_of_workers", "warn_of_foreign_workers"]

_log = logging.getLogger(__name__)


def group_of(config: ServiceConfig, queue_id: str) -> str:
    """The consumer group of a queue's workers.

    No namespace and no topic has a slash in its name: so no queue of another namespace, whatever
    it is called, and no tracker shares the group.
    """
    return f"kafkamq/{config.namespace}/{queue_id}"


def group_of_workers(config: ServiceConfig, queue: QueueConfig) -> str:
    """The group that a queue's settings name, or else its own."""
    return queue.group_id or group_of(config, queue.queue_id)


def warn_of_foreign_workers(config: ServiceConfig, queue_id: str, group: str) -> None:
    """Say so when kafka-mq-go's workers are live on a queue, and not in the same group (R25).

    Asks the brokers. Who may not describe that group, or gets no answer, is told nothing.
    """
    theirs = CONSUMER_GROUP_PREFIX + queue_id
    if group == theirs:
        return
    try:
        with Admin(config) as admin:
            members = admin.group_assignments(theirs)
    except KafkaMQError as error:
        _log.debug("group not described", extra={"group": theirs, "said": str(error)})
        return
    if any(config.message_topic in topics for topics in members):
        _log.warning(
            "kafka-mq-go's workers are live on queue %r in the group %s, and this one is in %s: "
            "each gets every message; open the queue with group=%r to share it",
            queue_id,
            theirs,
            group,
            theirs,
        )
