"""What a worker's Kafka consumer is told, and whom it tells of its membership in the group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.queue.names import group_of_workers
from kafkamq.transport.port import Consumer as KafkaConsumer
from kafkamq.transport.settings import consumer_settings
from kafkamq.types import MessageId

__all__ = ["Membership", "is_eager", "leave", "max_idle_ms", "reader_settings"]

MAX_POLL_INTERVAL_MS = 300_000  # Kafka's default


class Membership(Protocol):
    """Who wants to know which partitions come and go; called inside ``MessageReader.poll``."""

    def _gained(self, partitions: Sequence[int]) -> None:
        """These were assigned."""

    def _lost(self, partitions: Sequence[int]) -> None:
        """These are another member's now, or nobody's."""

    def _answered(self, message_ids: Sequence[MessageId]) -> None:
        """STARTs of these are in the log, though no offset behind them is committed."""

    def _topic_id(self) -> bytes:
        """Of the messages' topic as STARTs name it; empty: unknown."""

    def _is_topic_another(self) -> bool:
        """Ask whether the topic was recreated; if so, ``read_anew`` is called soon.

        Raises:
            BrokerError, DeadlineExceededError: It does not exist, or no broker answers.
        """


def leave(consumer: KafkaConsumer) -> None:
    # Without it, librdkafka (2.16) closes a member that has no partitions without a word to the
    # group, which then waits for it until its session times out.
    consumer.unsubscribe()
    consumer.close()


def reader_settings(config: ServiceConfig, queue: QueueConfig) -> dict[str, object]:
    proposals: dict[str, object] = {"socket.timeout.ms": 10_000}
    if config.kafka.get("group.protocol") != "consumer":  # there the broker assigns
        # A group that others named may have members of other clients, which all know "range".
        strategy = "range" if queue.group_id else "cooperative-sticky"
        proposals["partition.assignment.strategy"] = strategy
        # A worker that was killed is missed after 10 s, not 45; others are noticed within 1 s.
        proposals["session.timeout.ms"] = 10_000
        proposals["heartbeat.interval.ms"] = 1000
    return consumer_settings(config, group_id=group_of_workers(config, queue), **proposals)


def is_eager(settings: dict[str, object]) -> bool:
    if settings.get("group.protocol") == "consumer":
        return False
    return "cooperative" not in str(settings.get("partition.assignment.strategy", ""))


def max_idle_ms(settings: Mapping[str, object]) -> int:
    """How long a member may go without receiving, as Kafka has it for every consumer."""
    return int(str(settings.get("max.poll.interval.ms", MAX_POLL_INTERVAL_MS)))
