"""Owns the Kafka consumer: polls, assigns, pauses, leaves."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Protocol

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import TopicMetadata  # type: ignore[attr-defined]

from kafkamq.errors import BrokerError, ConfigError, DataLossError
from kafkamq.parallel.config import ParallelConfig, Partition
from kafkamq.parallel.positions import Position, data_loss, find_positions, log_bounds
from kafkamq.parallel.rules.offsets import OffsetTracker
from kafkamq.parallel.stats import Stats
from kafkamq.transport.clients import open_consumer
from kafkamq.transport.deadline import ask_in_slices
from kafkamq.transport.errors import (
    ErrorWatch,
    Meaning,
    broker_error,
    is_retriable,
    kafka_error,
    meaning,
)
from kafkamq.transport.exact_commits import ExactCommits
from kafkamq.transport.port import Consumer
from kafkamq.transport.settings import consumer_settings

__all__ = ["Membership", "Source"]

_METADATA_S = 10.0
_log = logging.getLogger(__name__)


class Membership(Protocol):
    """Who is told of partitions that come and go, inside ``Source.poll``."""

    def assigned(self, positions: Sequence[Position]) -> None:
        """These are ours from now on."""

    def revoked(self, partitions: Sequence[Partition]) -> None:
        """These go when this returns; commits still count."""

    def lost(self, partitions: Sequence[Partition]) -> None:
        """These are another member's already."""

    def restarted(self, position: Position) -> None:
        """This one is read from elsewhere: what is known of it is of records that are gone."""


class Source:
    """The member of the group; one owner thread."""

    def __init__(self, config: ParallelConfig, member: Membership, stats: Stats) -> None:
        self._config = config
        self._member = member
        self._stats = stats
        self._watch = ErrorWatch(config.service.bootstrap_servers)
        settings = _settings(config)
        self._is_eager = _is_eager(settings)
        self._failure: BaseException | None = None  # of a callback
        self._is_leaving = False
        self.ends: list[tuple[Partition, int]] = []  # partitions read to their end, since cleared
        self._consumer = open_consumer(settings, self._watch)
        self.commits = ExactCommits(self._consumer, str(settings["client.id"]))

    def subscribe(self) -> None:
        """Join the group.

        Raises:
            BrokerError: A topic does not exist, or no broker answers.
            ConfigError: A pattern that is none.
        """
        doing = f"looking for {', '.join(self._config.topics)}"
        for topic in self._config.topics:
            if topic.startswith("^"):
                continue
            found = self._looked_up(topic, doing)
            if found.error is not None:
                raise _unknown_topic(topic, found.error)
        try:
            self._consumer.subscribe(
                list(self._config.topics),
                on_assign=self._assigned,
                on_revoke=self._revoked,
                on_lost=self._lost,
            )
        except KafkaException as error:
            said = kafka_error(error).str()
            raise ConfigError(f"topics is {self._config.topics!r}: {said}") from error

    def _looked_up(self, topic: str, doing: str) -> TopicMetadata:
        try:
            found: TopicMetadata = ask_in_slices(
                lambda slice_s: self._consumer.list_topics(topic, timeout=slice_s).topics[topic],
                self._consumer,
                self._watch,
                doing,
                _METADATA_S,
            )
        except KafkaException as error:
            raise broker_error(error, doing) from error
        return found

    # Reading.

    def poll(self, limit: int, wait_s: float) -> list[tuple[Partition, list[Message]]]:
        """Records by partition, in order; returns as soon as there are any.

        Raises:
            BrokerError, DataLossError: What no waiting can mend, or a callback's failure.
        """
        consumer = self._consumer
        try:
            self.commits.serve()
            batch = consumer.consume(limit, 0)
            if not batch and wait_s > 0:
                batch = consumer.consume(1, wait_s)
                if batch:
                    batch += consumer.consume(limit - 1, 0)
        except KafkaException as error:
            self._event(kafka_error(error), None)
            batch = []
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if not batch:
            self._watch.check(f"reading {', '.join(self._config.topics)}")
            return []
        if any(map(Message.error, batch)):
            batch = self._without_events(batch)
        return _by_partition(batch)

    def _without_events(self, batch: list[Message]) -> list[Message]:
        records = []
        for message in batch:
            error = message.error()
            if error is None:
                records.append(message)
            elif self._event(error, message):
                place = _place(message)  # what came before is of the log that is gone
                records = [each for each in records if _place(each) != place]
                self.ends = [each for each in self.ends if each[0] != place]
        return records

    def _event(self, error: KafkaError, message: Message | None) -> bool:
        """Whether its partition is read anew, as another log than before."""
        what = meaning(error)
        if what is Meaning.LOG_END and message is not None:
            self.ends.append((_place(message), message.offset() or 0))
            return False
        self._watch.check(f"reading {', '.join(self._config.topics)}")
        if what is Meaning.OUTSIDE_LOG and message is not None:
            return self._outside_the_log(message)
        if what is Meaning.NO_TOPIC and message is not None:
            raise _unknown_topic(message.topic() or "?", error)
        if not is_retriable(error):
            raise broker_error(error, f"reading {', '.join(self._config.topics)}")
        _log.info("reading is disturbed", extra={"code": error.name()})
        return False

    def _outside_the_log(self, message: Message) -> bool:
        topic, partition = _place(message)
        place = TopicPartition(topic, partition)
        if place not in self._consumer.assignment():
            return False
        low, high = log_bounds(self._consumer, topic, partition)
        position = message.offset()
        position = -1 if position is None else position
        if low <= position <= high:
            start = position
        else:
            said = data_loss(self._config, (topic, partition), position, low, high)
            if self._config.on_data_loss == "raise":
                raise DataLossError(
                    f"{said}; go on at the log's start with on_data_loss='skip', or set the"
                    f" offsets of group {self._config.group_id}",
                    code="OFFSET_OUT_OF_RANGE",
                )
            _log.warning("records were lost and are skipped", extra={"said": said})
            start = low
        self._consumer.incremental_unassign([place]) if not self._is_eager else None
        is_another = position > high  # the offsets from here on are other records'
        if is_another:
            self._member.restarted(Position(topic, partition, start, OffsetTracker(start), False))
        self.restart([TopicPartition(topic, partition, start)])
        if is_another:
            self.resume([(topic, partition)])  # the member knows of no pause any more
        return is_another

    def restart(self, positions: Sequence[TopicPartition]) -> None:
        """Read these partitions, which stand still, from other positions."""
        if not self._is_eager:
            self._consumer.incremental_assign(list(positions))
            return
        changed = {(each.topic, each.partition) for each in positions}
        others = [
            each
            for each in self._consumer.position(self._consumer.assignment())
            if (each.topic, each.partition) not in changed
        ]
        self._consumer.assign([*others, *positions])

    def seek(self, partition: Partition, offset: int) -> None:
        """Read on from there."""
        self._consumer.seek(TopicPartition(*partition, offset))

    def rewind(self, begun: Mapping[Partition, int]) -> list[Position]:
        """Read these again from what is committed; where nothing is, from where they began."""
        partitions = list(begun)
        positions = self._find(partitions, begun)
        for position in positions:
            self.seek((position.topic, position.partition), position.offset)
        self.resume(partitions)
        return positions

    def pause(self, partitions: Iterable[Partition]) -> None:
        """Fetch these no more; those that went meanwhile are left out."""
        self._each(self._consumer.pause, partitions)

    def resume(self, partitions: Iterable[Partition]) -> None:
        """Fetch these again."""
        self._each(self._consumer.resume, partitions)

    def _each(self, call, partitions: Iterable[Partition]) -> None:  # type: ignore[no-untyped-def]
        for topic, partition in partitions:
            try:
                call([TopicPartition(topic, partition)])
            except KafkaException as error:  # noqa: PERF203 - one by one, as one may be gone
                _log.info("a partition is gone", extra={"code": kafka_error(error).name()})

    def position(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """The next offsets to be polled; those that are not known are left out."""
        asked = [TopicPartition(topic, number) for topic, number in partitions]
        return {
            (each.topic, each.partition): each.offset
            for each in self._consumer.position(asked)
            if each.offset >= 0
        }

    def _find(
        self, partitions: Sequence[Partition], begun: Mapping[Partition, int] | None = None
    ) -> list[Position]:
        return find_positions(
            self._consumer, self.commits, partitions, self._config, self._stats, begun or {}
        )

    # Membership.

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if self._is_leaving:  # a rebalance that ended meanwhile; a client that ends asks nobody
            return
        try:
            positions = self._find([(each.topic, each.partition) for each in partitions])
        except BaseException as error:  # noqa: BLE001 - librdkafka's callbacks pass nothing on
            self._failure = error
            return
        targets = [TopicPartition(each.topic, each.partition, each.offset) for each in positions]
        if self._is_eager:
            consumer.assign(targets)
        else:
            consumer.incremental_assign(targets)
        self._member.assigned(positions)

    def _revoked(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        places = [(each.topic, each.partition) for each in partitions]
        try:
            self._member.revoked(places)
            self.resume(places)  # librdkafka would remember a pause when they come back
            self.commits.serve()
        except BaseException as error:  # noqa: BLE001 - as above
            self._failure = error

    def _lost(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        places = [(each.topic, each.partition) for each in partitions]
        try:
            self._member.lost(places)
            self.resume(places)
        except BaseException as error:  # noqa: BLE001 - as above
            self._failure = error

    def abandon(self) -> None:
        """End a client that never joined."""
        self._is_leaving = True
        self._consumer.close()

    def close(self) -> None:
        """Leave the group, by way of ``revoked``."""
        # Without it, librdkafka (2.16) closes a member that has no partitions without a word to
        # the group, which then waits for it until its session times out.
        self._is_leaving = True
        self.commits.serve()
        self._consumer.unsubscribe()
        self._consumer.close()


def _place(message: Message) -> Partition:
    return message.topic() or "", message.partition() or 0


def _by_partition(batch: list[Message]) -> list[tuple[Partition, list[Message]]]:
    if not batch:
        return []
    first, last = batch[0], batch[-1]
    partitions = list(map(Message.partition, batch))
    topics = list(map(Message.topic, batch))
    if partitions.count(first.partition()) == len(batch) == topics.count(last.topic()):
        return [((first.topic() or "", first.partition() or 0), batch)]
    groups: dict[Partition, list[Message]] = {}
    index = 0
    for place, run in groupby(zip(topics, partitions, strict=True)):
        end = index + sum(1 for _ in run)
        topic, partition = place
        groups.setdefault((topic or "", partition or 0), []).extend(batch[index:end])
        index = end
    return list(groups.items())


def _unknown_topic(topic: str, error: KafkaError) -> BrokerError:
    return BrokerError(
        f"topic {topic} cannot be read: {error.str()}; create it first", code=error.name()
    )


def _settings(config: ParallelConfig) -> dict[str, object]:
    service = config.service
    proposals: dict[str, object] = {
        # librdkafka cuts a client's name to 128 bytes, and ``ExactCommits`` looks for all of it.
        "client.id": f"kafkamq-{config.group_id[:20]}-{uuid.uuid4().hex[:12]}",
        "socket.timeout.ms": 10_000,
        "allow.auto.create.topics": False,
        "enable.partition.eof": True,  # markers and deleted records behind the last one count
    }
    if service.kafka.get("group.protocol") != "consumer":  # there the broker assigns
        proposals["partition.assignment.strategy"] = "cooperative-sticky"
        # A member that was killed is missed after 10 s, not 45; others are noticed within 1 s.
        proposals["session.timeout.ms"] = 10_000
        proposals["heartbeat.interval.ms"] = 1000
    if not config.group_id:
        raise ConfigError("a parallel consumer needs a group_id")
    return consumer_settings(service, group_id=config.group_id, **proposals)


def _is_eager(settings: dict[str, object]) -> bool:
    if settings.get("group.protocol") == "consumer":
        return False
    return "cooperative" not in str(settings.get("partition.assignment.strategy", ""))
