"""Reads the markers partitions that the group assigns to this process.

Two clients: one is only a member of the group and fetches nothing, the other reads the assigned
partitions from the places that their ledgers name. So a partition can be started again, or start
late, without any effect on the group.
"""

from __future__ import annotations

from collections.abc import Callable

from confluent_kafka import KafkaException, Message, TopicPartition

from kafkamq.config import ServiceConfig
from kafkamq.errors import DataLossError
from kafkamq.transport.clients import open_consumer
from kafkamq.transport.errors import ErrorWatch, Meaning, broker_error, is_fatal, meaning
from kafkamq.transport.port import Consumer
from kafkamq.transport.settings import consumer_settings

__all__ = ["MarkerReader", "tracker_group"]

_BATCH = 5000
_NEW_PARTITIONS_MS = 30_000  # partitions that were added are found so soon
_SESSION_MS = 6_000  # a killed replica's partitions wait so long for their next owner


def tracker_group(config: ServiceConfig) -> str:
    """The group through which replicas of the local tracker share the markers partitions."""
    return f"kafkamq.{config.marker_topic}.tracker"


class MarkerReader:
    """One member of the trackers' group and its reader; one owner thread.

    Args:
        config: Names the markers topic.
        on_assigned: Called inside ``poll`` with the numbers of partitions that are ours now.
        on_revoked: Called inside ``poll`` with those that are not ours any more.
    """

    def __init__(
        self,
        config: ServiceConfig,
        *,
        on_assigned: Callable[[list[int]], None],
        on_revoked: Callable[[list[int]], None],
    ) -> None:
        self._topic = config.marker_topic
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._watch = ErrorWatch(config.bootstrap_servers)
        self._doing = f"reading {self._topic}"
        self._reading: set[int] = set()
        settings = consumer_settings(
            config,
            group_id=tracker_group(config),
            **{
                "session.timeout.ms": _SESSION_MS,
                "topic.metadata.refresh.interval.ms": _NEW_PARTITIONS_MS,
            },
        )
        if settings.get("group.protocol") == "consumer":
            settings.pop("session.timeout.ms")  # the broker's, with that protocol
        else:
            settings["partition.assignment.strategy"] = "cooperative-sticky"
        self._member = open_consumer(settings, self._watch)
        self._reader = open_consumer(
            consumer_settings(config, group_id="kafkamq.reader", **{"enable.partition.eof": True}),
            self._watch,
        )
        self._is_subscribed = False

    @property
    def is_member(self) -> bool:
        """Whether the group has taken this process in; any thread may ask."""
        try:
            return self._is_subscribed and bool(self._member.memberid())
        except RuntimeError:  # closed meanwhile
            return False

    def membership(self) -> bytes:
        """What fences this member's transactions when the group has gone on without it (R22)."""
        metadata: bytes = self._member.consumer_group_metadata()
        return metadata

    def begin(self, number: int, offset: int) -> None:
        """Read a partition from this offset."""
        self.end(number)
        self._reader.incremental_assign([TopicPartition(self._topic, number, offset)])
        self._reading.add(number)

    def end(self, number: int) -> None:
        """Read it no more; records of it that were fetched already are dropped."""
        if number in self._reading:
            self._reading.discard(number)
            self._reader.incremental_unassign([TopicPartition(self._topic, number)])

    def poll(self, timeout_s: float, *, is_full: bool = False) -> list[Message]:
        """Serve the group, then return what there is to read: records and ends of partitions.

        Waits up to ``timeout_s`` for the first record. ``is_full``: nothing is read now, and it
        waits as long.

        Raises:
            BrokerError: Credentials, or another error that waiting does not mend.
            DataLossError: A partition's records were deleted before they were read.
        """
        try:
            if not self._is_subscribed:  # not before somebody polls: members must
                self._is_subscribed = True
                self._member.subscribe(
                    [self._topic],
                    on_assign=self._assigned,
                    on_revoke=self._revoked,
                    on_lost=self._revoked,
                )
            # Rebalances happen in here; the member itself has nothing to read.
            self._report(self._member.poll(timeout_s if is_full else 0))
            if is_full:
                return []
            messages = self._reader.consume(_BATCH, 0)
            if not messages:
                first = self._reader.poll(timeout_s)
                if first is not None:
                    messages = [first, *self._reader.consume(_BATCH, 0)]
        except KafkaException as error:
            raise broker_error(error, self._doing) from error
        self._watch.check(self._doing)
        return messages

    def check(self, message: Message) -> int:
        """The offset at which a partition ends, as an event among the messages says; else -1.

        Raises:
            DataLossError, BrokerError: What the event says.
        """
        error = message.error()
        assert error is not None, "only events are checked"
        if meaning(error) is Meaning.LOG_END:
            offset = message.offset()
            return -1 if offset is None else offset
        self._report(message)
        return -1

    def _report(self, message: Message | None) -> None:
        """Raise what an event says, if waiting does not mend it."""
        error = None if message is None else message.error()
        if error is None or message is None:
            return
        number = message.partition()
        ours = broker_error(error, f"{self._doing}[{number}]")
        if isinstance(ours, DataLossError):
            if number in self._reading and number is not None:
                raise self._data_loss(number, message.offset(), ours)
            return  # of the member, which reads nothing
        if is_fatal(error):
            raise ours
        # Everything else librdkafka repeats by itself.

    def _data_loss(self, number: int, wanted: int | None, cause: DataLossError) -> DataLossError:
        """Say how many records are gone, if the broker still tells."""
        try:
            first, _ = self._reader.get_watermark_offsets(
                TopicPartition(self._topic, number), timeout=5.0
            )
        except KafkaException:
            return cause
        if wanted is None or not 0 <= wanted < first:
            return cause
        return DataLossError(
            f"{self._topic}[{number}]: up to {first - wanted} records were deleted before they "
            f"were read ({wanted} to {first - 1}), and messages may be lost; the retention is too "
            "short for this tracker",
            code=cause.code,
        )

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if partitions:
            # The member never fetches: it gets a place that needs no look-up, and is paused.
            mine = [TopicPartition(part.topic, part.partition, 0) for part in partitions]
            consumer.incremental_assign(mine)
            consumer.pause(mine)
        self._on_assigned([part.partition for part in partitions])

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        for part in partitions:
            self.end(part.partition)
        self._on_revoked([part.partition for part in partitions])
        if partitions:
            consumer.incremental_unassign(partitions)

    def close(self) -> None:
        """Leave the group and end both clients."""
        self._member.close()  # revokes, which ends what is read
        self._reader.close()
