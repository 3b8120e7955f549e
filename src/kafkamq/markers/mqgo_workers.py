"""Says when kafka-mq-go's workers are live on a queue, and not in the same group (R25)."""

from __future__ import annotations

import logging
import threading

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import KafkaMQError
from kafkamq.markers.wire.mqgo import CONSUMER_GROUP_PREFIX
from kafkamq.queue.names import group_of_workers
from kafkamq.queue.namespace import Namespace
from kafkamq.transport.admin import Admin

_log = logging.getLogger(__name__)


def look_for_mqgo_workers(namespace: Namespace, queue: QueueConfig) -> None:
    """Have a warning logged, once for each queue of a service; no waiting."""
    group = group_of_workers(namespace.config, queue)
    if namespace.is_first_look(queue.queue_id, group):
        threading.Thread(
            target=warn_of_mqgo_workers,
            args=(namespace.config, queue.queue_id, group),
            name="kafkamq-groups",
            daemon=True,
        ).start()


def warn_of_mqgo_workers(config: ServiceConfig, queue_id: str, group: str) -> None:
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
        _log.debug("group not described", extra={"group": theirs, "error": str(error)})
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
