"""An admin client in memory; its futures are done when they are returned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from confluent_kafka import (
    OFFSET_INVALID,
    ConsumerGroupState,
    ConsumerGroupType,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Node,
    TopicPartition,
    TopicPartitionInfo,
    Uuid,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its __all__ lacks them
    ConfigEntry,
    ConsumerGroupDescription,
    ConsumerGroupListing,
    DescribeClusterResult,
    ListConsumerGroupsResult,
    ListOffsetsResultInfo,
    MemberAssignment,
    MemberDescription,
    OffsetSpec,
    ResourceType,
    TopicDescription,
)

from kafkamq.transport.memory.client import BROKER_ID, Client
from kafkamq.transport.memory.state import failure, kafka_error

_TIMEOUT_S = 60.0


class AdminClient(Client):
    def __exit__(self, *_: object) -> None:
        self._is_closed = True

    def poll(self, timeout: float = -1) -> int:
        with self.cluster.changed:
            self._look_around()
        return self._serve_errors()

    def _ask(self, effect: Callable[[], Any], options: Mapping[str, Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            timeout_s = float(options.get("request_timeout", _TIMEOUT_S))
            future.set_result(self._request("admin", effect, timeout_s, ""))
        except KafkaException as error:
            future.set_exception(error)
        return future

    def _ask_each(
        self, keys: Iterable[Any], effect: Callable[[Any], Any], options: Mapping[str, Any]
    ) -> dict[Any, Future[Any]]:
        """Return one request about many things, each of which has its own answer."""
        wanted = list(keys)
        answers: dict[Any, Future[Any]] = {}

        def ask() -> None:
            for key in wanted:
                answers[key] = Future()
                try:
                    answers[key].set_result(effect(key))
                except KafkaException as error:
                    answers[key].set_exception(error)

        refusal = self._ask(ask, options).exception()
        for key in wanted if refusal is not None else ():
            answers[key] = Future()
            answers[key].set_exception(refusal)
        return answers

    # ---- the cluster and its topics

    def describe_cluster(self, **options: Any) -> Future[Any]:
        node = self._node()
        return self._ask(lambda: DescribeClusterResult(node, [node], self.cluster.name), options)

    def describe_topics(self, topics: Any, **options: Any) -> dict[str, Future[Any]]:
        def describe(name: str) -> TopicDescription:
            topic, numbers = self._topic(name), self._told(name)
            if topic is None or numbers is None:
                raise failure(KafkaError.UNKNOWN_TOPIC_OR_PART)
            node = self._node()
            offline = self.cluster.faults.offline
            leaders: list[Any] = [None if (name, each) in offline else node for each in numbers]
            partitions = [
                TopicPartitionInfo(each, leader, [node], [node])
                for each, leader in zip(numbers, leaders, strict=True)
            ]
            topic_id = topic.topic_id if self.cluster.faults.has_ids() else Uuid(0, 0)
            return TopicDescription(name, topic_id, False, partitions)

        return self._ask_each(topics.topic_names, describe, options)

    def describe_configs(self, resources: list[Any], **options: Any) -> dict[Any, Future[Any]]:
        def describe(resource: Any) -> dict[str, ConfigEntry]:
            settings = self.cluster.settings
            if resource.restype is ResourceType.TOPIC:
                topic = self._topic(resource.name)
                if topic is None:
                    raise failure(KafkaError.UNKNOWN_TOPIC_OR_PART)
                settings = topic.settings
            return {name: ConfigEntry(name, value) for name, value in settings.items()}

        return self._ask_each(resources, describe, options)

    def incremental_alter_configs(
        self, resources: list[Any], **options: Any
    ) -> dict[Any, Future[Any]]:
        def alter(resource: Any) -> None:
            topic = self.cluster.topics.get(resource.name)
            if resource.restype is not ResourceType.TOPIC or topic is None:
                raise failure(KafkaError.UNKNOWN_TOPIC_OR_PART)
            for entry in resource.incremental_configs:
                topic.settings[entry.name] = entry.value

        return self._ask_each(resources, alter, options)

    def create_topics(self, new_topics: list[Any], **options: Any) -> dict[str, Future[Any]]:
        wanted = {each.topic: each for each in new_topics}

        def create(name: str) -> None:
            new = wanted[name]
            if new.replication_factor > 1:
                text = "Replication factor is larger than available brokers"
                raise failure(KafkaError.INVALID_REPLICATION_FACTOR, text)
            count = int(self.cluster.settings["num.partitions"])
            if new.num_partitions >= 0:
                count = new.num_partitions
            self.cluster.create_topic(name, count, new.config)

        return self._ask_each(wanted, create, options)

    def delete_topics(self, topics: list[str], **options: Any) -> dict[str, Future[Any]]:
        return self._ask_each(topics, self.cluster.delete_topic, options)

    def list_offsets(
        self, topic_partition_offsets: dict[TopicPartition, Any], **options: Any
    ) -> dict[TopicPartition, Future[Any]]:
        is_committed = options.get("isolation_level") is IsolationLevel.READ_COMMITTED

        def find(place: TopicPartition) -> ListOffsetsResultInfo:
            partition = self.cluster.partition((place.topic, place.partition))
            if partition is None:
                text = "Failed to query partition leaders: No leaders found"
                raise failure(KafkaError._NOENT, text)
            if (place.topic, place.partition) in self.cluster.faults.offline:
                # librdkafka answers so.
                return ListOffsetsResultInfo(OFFSET_INVALID, -1, -1)
            spec = topic_partition_offsets[place]
            end = partition.stable if is_committed else partition.end
            if spec is OffsetSpec.earliest():  # type: ignore[no-untyped-call]  # of confluent_kafka
                return ListOffsetsResultInfo(partition.start, -1, 0)
            if spec is OffsetSpec.latest():  # type: ignore[no-untyped-call]
                return ListOffsetsResultInfo(end, -1, 0)
            if spec is OffsetSpec.max_timestamp():  # type: ignore[no-untyped-call]
                return ListOffsetsResultInfo(*partition.newest(), 0)
            return ListOffsetsResultInfo(partition.offset_at(spec._value, end), -1, 0)

        return self._ask_each(topic_partition_offsets, find, options)

    # ---- groups

    def list_consumer_groups(self, **options: Any) -> Future[Any]:
        def list_groups() -> ListConsumerGroupsResult:
            listed = [
                ConsumerGroupListing(
                    name, False, ConsumerGroupState[state], ConsumerGroupType[kind]
                )
                for name, state, kind in self.cluster.groups.listing()
            ]
            return ListConsumerGroupsResult(listed, [])

        return self._ask(list_groups, options)

    def describe_consumer_groups(
        self, group_ids: Sequence[str], **options: Any
    ) -> dict[str, Future[Any]]:
        """Describe groups; one that is not known has no members, as in confluent_kafka."""

        def describe(group: str) -> ConsumerGroupDescription:
            state, assignments = self.cluster.groups.describe(group)
            members = [
                MemberDescription(
                    member,
                    client,
                    "/127.0.0.1",
                    MemberAssignment([TopicPartition(*place) for place in sorted(places)]),
                )
                for member, client, places in assignments
            ]
            return ConsumerGroupDescription(
                group, False, members, "", ConsumerGroupState[state], self._node()
            )

        return self._ask_each(group_ids, describe, options)

    def delete_consumer_groups(
        self, group_ids: list[str], **options: Any
    ) -> dict[str, Future[Any]]:
        def delete(group: str) -> None:
            code = self.cluster.groups.delete(group)
            if code is not None:
                raise KafkaException(kafka_error(code))

        return self._ask_each(group_ids, delete, options)

    def _node(self) -> Node:
        return Node(BROKER_ID, self.cluster.name, 9092)
