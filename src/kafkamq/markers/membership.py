"""What a worker's Kafka consumer is told, and whom it tells of its membership in the group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.markers.rules.message_set import MessageSet
from kafkamq.queue.names import group_of_workers
from kafkamq.transport.group_consumer import COOPERATIVE, GroupConsumer, Owner

MAX_POLL_INTERVAL_MS = 300_000  # Kafka's default


class Membership(Protocol):
    """Who wants to know which partitions come and go; called inside ``MessageReader.poll``."""

    def _gained(self, partitions: Sequence[int]) -> None:
        """These were assigned."""

    def _lost(self, partitions: Sequence[int]) -> None:
        """These are another member's now, or nobody's."""

    def _answered(self, messages: MessageSet) -> None:
        """STARTs of these are in the log, though no offset behind them is committed."""

    def _topic_id(self) -> bytes:
        """Of the messages' topic as STARTs name it; empty: unknown."""

    def _stamp(self) -> bytes:
        """What records of ours have in a topic that anybody writes to (R38)."""

    def _is_topic_another(self) -> bool:
        """Ask whether the topic was recreated; if so, ``reread_topic`` is called soon.

        Raises:
            BrokerError, DeadlineExceededError: It does not exist, or no broker answers.
        """


def open_member(config: ServiceConfig, queue: QueueConfig, owner: Owner) -> GroupConsumer:
    """A member of the queue's group that reads its messages' topic."""
    return GroupConsumer(
        config,
        owner,
        [config.message_topic],
        group_id=group_of_workers(config, queue),
        # A group that others named may have members of other clients, which all know "range".
        strategy="range" if queue.group_id else COOPERATIVE,
        socket_timeout_ms=10_000,
    )


def max_idle_ms(settings: Mapping[str, object]) -> int:
    """How long a member may go without receiving, as Kafka has it for every consumer."""
    return int(str(settings.get("max.poll.interval.ms", MAX_POLL_INTERVAL_MS)))
