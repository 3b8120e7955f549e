"""The cluster is asked here: topics, ids, groups, configurations; every wait is bounded."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from confluent_kafka import (
    OFFSET_INVALID,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its __all__ lacks them
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DeadlineExceededError, KafkaMQError, StateError
from kafkamq.transport.clients import AdminClient, open_admin
from kafkamq.transport.commits import CommittedOffsets, OffsetCommit
from kafkamq.transport.errors import UNANSWERED, ErrorWatch, Meaning, broker_error, meaning
from kafkamq.transport.settings import admin_settings
from kafkamq.types import PartitionId

T = TypeVar("T")
_SLICE_S = 0.2
# Retriable answers in a row behind which a new client takes the place of one.
_PATIENCE = 5
_VISIBLE_S = 5.0
_TURN_S = 0.05
_ATTEMPT_S = 4.0
_COORDINATOR_S = 1.0
# Of a command, while connections are refused, or while nothing comes back, as in a slow network.
_REFUSED_S = 3.0
_SILENCE_S = 15.0
# librdkafka asks for a group's coordinator three times within half a second, and if none is there
# yet (a fresh cluster, a restart) the request hangs until its timeout: short ones are repeated.
# Requests on a connection to a broker that was frozen hang as long, and a client that missed an
# election may be told so forever: so repetitions use a new client.


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """What a topic is; ``settings`` are the effective ones, Kafka's names."""

    name: str
    # 16 bytes; empty: the broker does not tell (before 2.8).
    topic_id: bytes
    partitions: int
    replication_factor: int
    settings: Mapping[str, str] = field(default_factory=dict)
    leaderless: frozenset[int] = frozenset()

    @property
    def max_message_bytes(self) -> int:
        return int(self.settings.get("max.message.bytes", "1048588"))

    @property
    def retention_ms(self) -> int:
        """Return the retention; negative: forever."""
        return int(self.settings.get("retention.ms", "604800000"))

    @property
    def kept_ms(self) -> int:
        """Return how long it keeps every record; 0: some go earlier, by size or by key."""
        by_size = int(self.settings.get("retention.bytes", "-1")) >= 0
        by_key = "compact" in self.settings.get("cleanup.policy", "delete")
        return 0 if by_size or by_key else self.retention_ms


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    cluster_id: str
    brokers: Mapping[int, str]
    settings: Mapping[str, str] = field(default_factory=dict)


class Admin:
    """One admin client of a namespace; context manager; thread-safe.

    Every method raises ``BrokerError`` at once for wrong credentials, and
    ``DeadlineExceededError``, naming the servers, when no broker answers within ``timeout_s``,
    or until the monotonic time ``until_s``, whatever was asked before.

    ``kept_groups``: Those whose offsets are asked for often, each of which keeps a consumer; None:
    some of all that are asked for. ``is_over``: Whether nobody wants an answer any more: who waits
    for one gives up then.
    """

    def __init__(
        self,
        config: ServiceConfig,
        *,
        timeout_s: float = 30.0,
        until_s: float = math.inf,
        kept_groups: Collection[str] | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config = config
        self._is_over = is_over
        self._timeout_s = timeout_s
        self._until_s = until_s
        self._watch = ErrorWatch(config.bootstrap_servers)
        # Also for requests that have no method here: see ``wait``.
        self.client = open_admin(admin_settings(config), self._watch)
        self._committed = CommittedOffsets(config, self._watch, kept=kept_groups)
        self._is_closed = False
        self._lock = threading.Lock()

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the client; idempotent.

        Do it, rather than let it be collected: a collection may run in a thread of another client,
        and ending a client there can hang forever.
        """
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._committed.close()
                self.client.__exit__(None, None, None)

    def wait(self, future: Future[T], doing: str) -> T:
        """Return what a future of the client gives, within this Admin's bound."""
        return self._wait(self.client, future, doing, self._timeout_s)

    def _wait(self, client: AdminClient, future: Future[T], doing: str, timeout_s: float) -> T:
        deadline_s = time.monotonic() + timeout_s
        while True:
            if self._is_closed or self._is_over():
                raise StateError("this Admin is closed")
            client.poll(0)
            self._watch.check(doing)
            done, _ = wait_for_futures((future,), timeout=_SLICE_S)
            if not done:
                if time.monotonic() > deadline_s:
                    raise self._watch.deadline(doing, timeout_s)
                continue
            error = future.exception()
            if error is None:
                self._watch.forget()
                return future.result()
            client.poll(0)
            self._watch.check(doing)
            if not isinstance(error, KafkaException):
                raise error
            raise self._refusal(error, doing, timeout_s)

    def _refusal(self, error: KafkaException, doing: str, timeout_s: float) -> KafkaMQError:
        if meaning(error) in UNANSWERED:
            return self._watch.deadline(doing, timeout_s)
        return broker_error(error, f"{doing} at {self.config.bootstrap_servers}")

    def _ask(
        self, doing: str, call: Callable[[_Attempt], T], *, attempt_s: float = _ATTEMPT_S
    ) -> T:
        """Repeat a question within the bound, while the answer is that it may be repeated."""
        deadline_s = min(time.monotonic() + self._timeout_s, self._until_s)
        failures = 0
        while True:
            client = self.client
            left_s = max(_SLICE_S, deadline_s - time.monotonic())
            try:
                return call(_Attempt(self, client, doing, min(attempt_s, left_s)))
            except DeadlineExceededError:
                if time.monotonic() > deadline_s:
                    raise self._watch.deadline(doing, self._timeout_s) from None
                self._renew(client)
            except BrokerError as error:
                if not error.is_retriable or time.monotonic() > deadline_s:
                    raise
                failures += 1
                if failures % _PATIENCE == 0:
                    self._renew(client)
            # A new topic's leader, or a coordinator that loads, needs a moment.
            time.sleep(0.1)

    def _renew(self, stuck: AdminClient) -> None:
        """Go on with a new client; the old one ends when nobody waits for it any more."""
        with self._lock:
            if self.client is stuck and not self._is_closed:
                self.client = open_admin(admin_settings(self.config), self._watch)

    def cluster(self) -> ClusterInfo:
        """Brokers and identity of the cluster, and the settings of one broker."""

        def ask(attempt: _Attempt) -> ClusterInfo:
            found = attempt.wait(attempt.client.describe_cluster(request_timeout=attempt.timeout_s))
            brokers = {node.id: f"{node.host}:{node.port}" for node in found.nodes}
            asked = [str(broker) for broker in brokers][:1]
            settings = _configs(attempt, ResourceType.BROKER, asked) if asked else {}
            return ClusterInfo(found.cluster_id, brokers, next(iter(settings.values()), {}))

        return self._ask("describing the cluster", ask)

    def topics(self, names: Sequence[str]) -> dict[str, TopicInfo]:
        doing = f"describing topics {', '.join(names)}"

        def ask(attempt: _Attempt) -> dict[str, TopicInfo]:
            futures = attempt.client.describe_topics(
                TopicCollection(list(names)), request_timeout=attempt.timeout_s
            )
            found = {}
            for name, future in futures.items():
                try:
                    found[name] = attempt.wait(future)
                except BrokerError as error:  # noqa: PERF203 - a handful of topics
                    if meaning(error) is not Meaning.NO_TOPIC:
                        raise
            try:
                settings = _configs(attempt, ResourceType.TOPIC, list(found)) if found else {}
            except BrokerError as error:
                # Another broker answered, which has not heard of a topic that the first one knows.
                error.is_retriable = error.is_retriable or meaning(error) is Meaning.NO_TOPIC
                raise
            return {
                name: TopicInfo(
                    name,
                    uuid_bytes(topic.topic_id),
                    len(topic.partitions),
                    min((len(part.replicas) for part in topic.partitions), default=0),
                    settings[name],
                    frozenset(
                        part.id
                        for part in topic.partitions
                        if part.leader is None or part.leader.id < 0
                    ),
                )
                for name, topic in found.items()
            }

        return self._ask(doing, ask)

    def require_topic(self, name: str) -> TopicInfo:
        """Return what one topic is.

        Raises:
            BrokerError: It does not exist; says how to create it.
        """
        found = self.topics([name]).get(name)
        if found is None:
            raise broker_error(
                KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART),
                f"looking for topic {name} at {self.config.bootstrap_servers}",
            )
        return found

    def topic_id(self, name: str) -> bytes:
        """Return the id of one topic; empty: the broker does not tell."""
        (future,) = self.client.describe_topics(TopicCollection([name])).values()
        return uuid_bytes(self.wait(future, f"describing topic {name}").topic_id)

    def rights_on(self, topic: str) -> frozenset[str]:
        """Return what this principal may do with a topic, by Kafka's names; empty: nobody tells."""
        doing = f"asking for rights on topic {topic}"
        (future,) = self.client.describe_topics(
            TopicCollection([topic]), include_authorized_operations=True
        ).values()
        found = self.wait(future, doing).authorized_operations or ()
        return frozenset(operation.name for operation in found)

    def create_topics(
        self, wanted: Mapping[str, tuple[int, Mapping[str, str]]], *, replication_factor: int
    ) -> tuple[str, ...]:
        """Create those that do not exist, and wait until brokers know them, which is bounded.

        Args:
            wanted: Partitions and settings by name.
            replication_factor: -1: the cluster's default.

        Returns:
            The names of those that did not exist.
        """
        existing = self.topics(list(wanted))
        new = [
            NewTopic(name, partitions, replication_factor, config=dict(settings))
            for name, (partitions, settings) in wanted.items()
            if name not in existing
        ]
        created = []
        for name, future in (self.client.create_topics(new) if new else {}).items():
            try:
                self.wait(future, f"creating topic {name}")
                created.append(name)
            except BrokerError as error:  # noqa: PERF203 - a handful of topics
                if meaning(error) is not Meaning.EXISTS:
                    # Another process was quicker.
                    raise
        deadline_s = time.monotonic() + _VISIBLE_S
        missing = list(wanted)
        while missing and time.monotonic() < deadline_s:
            found = self.topics(missing)
            missing = [name for name in missing if name not in found]
            if missing:
                time.sleep(_TURN_S)
        return tuple(created)

    def group_settings(self, group: str) -> dict[str, str]:
        resource = ConfigResource(ResourceType.GROUP, group)
        (future,) = self.client.describe_configs([resource]).values()
        return _values(self.wait(future, f"describing group {group}"))

    def set_group(self, group: str, changes: Mapping[str, str]) -> None:
        """Change some of these settings."""
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
            for name, value in changes.items()
        ]
        resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=entries)
        for future in self.client.incremental_alter_configs([resource]).values():
            self.wait(future, f"setting group {group}")

    def groups(self) -> frozenset[str]:
        """Ids of all groups that have members or committed offsets, as far as we may see them."""
        return self._ask("listing the groups", _groups)

    def group_assignments(self, group: str) -> list[frozenset[str]]:
        """Return the topics that each member of a group reads now; empty without such a group.

        Asked only of a group that is listed, when every broker has answered just now: while its
        coordinator comes or goes, librdkafka's question about a group can end the process.
        """
        doing = f"describing group {group}"
        if group not in self._ask(doing, _groups):
            # It does not exist, or we may not see it, which only this question tells.
            self.committed([(group, (self.config.marker_topic, 0))], stable=False)
            return []

        def ask(attempt: _Attempt) -> list[frozenset[str]]:
            futures = attempt.client.describe_consumer_groups(
                [group], request_timeout=attempt.timeout_s
            )
            try:
                members = attempt.wait(futures[group]).members
            except BrokerError as error:
                if meaning(error) is Meaning.NO_GROUP:
                    return []
                raise
            return [
                frozenset(partition.topic for partition in member.assignment.topic_partitions)
                for member in members
            ]

        return self._ask(doing, ask, attempt_s=_COORDINATOR_S)

    def committed(
        self, requests: Sequence[tuple[str, PartitionId]], *, stable: bool = True
    ) -> list[OffsetCommit]:
        """Committed offsets: one per (group, partition) asked for, in that order.

        An offset below 0: nothing committed. ``stable``: wait for transactions that are under way
        with such an offset; a dead producer's last for its ``transaction.timeout.ms``.
        """
        groups = ", ".join(dict.fromkeys(group for group, _ in requests))
        doing = f"reading committed offsets of {groups}"
        read = partial(self._committed.read, requests, stable=stable)
        return self._ask(doing, lambda attempt: read(timeout_s=attempt.timeout_s))

    def log_bounds(self, topic: str, partitions: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Return the first offset and the end (of what is committed) of each partition."""
        wanted = [TopicPartition(topic, partition) for partition in partitions]
        earliest = OffsetSpec.earliest()  # type: ignore[no-untyped-call]  # of confluent_kafka
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]

        def ask(attempt: _Attempt) -> dict[int, tuple[int, int]]:
            first = _listed(dict.fromkeys(wanted, earliest), attempt)
            ends = _listed(dict.fromkeys(wanted, latest), attempt)
            return {number: (found.offset, ends[number].offset) for number, found in first.items()}

        return self._ask(f"reading the bounds of {topic}", ask)

    def log_ends(self, topic: str) -> dict[int, tuple[int, int]]:
        """Return of each partition the last stable offset, and the high watermark.

        They differ while a transaction is open, which holds ``read_committed`` readers back.
        """
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]  # of confluent_kafka

        def ask(attempt: _Attempt) -> dict[int, tuple[int, int]]:
            # The client has no future for this question.
            try:
                found = attempt.client.list_topics(topic, timeout=attempt.timeout_s)
            except KafkaException as error:
                raise self._refusal(error, attempt.doing, attempt.timeout_s) from error
            wanted = {
                TopicPartition(topic, each): latest for each in found.topics[topic].partitions
            }
            stable = _listed(wanted, attempt)
            ends = _listed(wanted, attempt, IsolationLevel.READ_UNCOMMITTED)
            return {number: (end.offset, ends[number].offset) for number, end in stable.items()}

        return self._ask(f"reading the ends of {topic}", ask)

    def latest_times(self, topic: str, partitions: Sequence[int]) -> dict[int, int]:
        """Return the latest timestamp in each partition (ms); absent: there is none.

        Brokers before Kafka 3.0 cannot tell: of these all are absent.
        """
        newest = OffsetSpec.max_timestamp()  # type: ignore[no-untyped-call]  # of confluent_kafka
        wanted = {TopicPartition(topic, number): newest for number in partitions}
        doing = f"looking for the last record of {topic}"
        try:
            found = self._ask(doing, partial(_listed, wanted))
        except BrokerError as error:
            if meaning(error) is Meaning.UNSUPPORTED:
                return {}
            raise
        return {
            number: result.timestamp
            for number, result in found.items()
            if result.offset >= 0 and result.timestamp >= 0
        }

    def offsets_for_times(self, topic: str, times_ms: Mapping[int, int]) -> dict[int, int]:
        """Return the first offset in each partition that is not older; absent: there is none."""
        wanted = {
            TopicPartition(topic, number): OffsetSpec.for_timestamp(at_ms)
            for number, at_ms in times_ms.items()
        }
        doing = f"looking for times in {topic}"
        found = self._ask(doing, partial(_listed, wanted))
        return {number: result.offset for number, result in found.items() if result.offset >= 0}


@dataclass(frozen=True, slots=True)
class _Attempt:
    """It has one client and one bound for one try at a question."""

    admin: Admin
    client: AdminClient
    doing: str
    timeout_s: float

    def wait(self, future: Future[T]) -> T:
        """Return the result; a little longer than the request's own timeout."""
        return self.admin._wait(self.client, future, self.doing, self.timeout_s + _SLICE_S)


def _groups(attempt: _Attempt) -> frozenset[str]:
    """Return a question that goes to every broker, and to no coordinator."""
    listing = attempt.client.list_consumer_groups(request_timeout=attempt.timeout_s)
    found = attempt.wait(listing)
    for failure in found.errors:
        error = broker_error(failure, "asking every broker")
        if isinstance(error, BrokerError):
            error.is_retriable = True
        raise error
    return frozenset(group.group_id for group in found.valid)


def _listed(
    wanted: dict[TopicPartition, OffsetSpec],
    attempt: _Attempt,
    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
) -> dict[int, Any]:
    """Return offset and timestamp by partition."""
    futures = attempt.client.list_offsets(
        wanted, isolation_level=isolation, request_timeout=attempt.timeout_s
    )
    listed = {place.partition: attempt.wait(future) for place, future in futures.items()}
    if any(found.offset == OFFSET_INVALID for found in listed.values()):
        # The client asks nobody where there is no leader, and does not say so.
        raise broker_error(KafkaError(KafkaError.LEADER_NOT_AVAILABLE), attempt.doing)
    return listed


def _configs(
    attempt: _Attempt, kind: ResourceType, names: Sequence[str]
) -> dict[str, dict[str, str]]:
    resources = [ConfigResource(kind, name) for name in names]
    futures = attempt.client.describe_configs(resources, request_timeout=attempt.timeout_s)
    found: dict[str, dict[str, str]] = {}
    for resource, future in futures.items():
        found[resource.name] = _values(attempt.wait(future))
    return found


def _values(entries: Mapping[str, Any]) -> dict[str, str]:
    return {name: entry.value for name, entry in entries.items() if entry.value is not None}


def uuid_bytes(topic_id: object) -> bytes:
    """Return the 16 bytes of confluent_kafka's Uuid, which offers them as two signed numbers."""
    most = getattr(topic_id, "get_most_significant_bits", None)
    least = getattr(topic_id, "get_least_significant_bits", None)
    if most is None or least is None:
        return b""
    data: bytes = most().to_bytes(8, "big", signed=True) + least().to_bytes(8, "big", signed=True)
    return b"" if data == bytes(16) else data


def require_brokers(config: ServiceConfig) -> None:
    """Return when a broker has answered, whatever it said; for commands, before they begin.

    A library waits for brokers that come back, and the person at the command line wants to know of
    a wrong port: one line instead of a long wait, and of the client that asks no line at all.
    """
    watch = ErrorWatch(config.bootstrap_servers)
    client = open_admin(admin_settings(config), watch, quiet=True)
    begun_s = time.monotonic()
    try:
        future = client.describe_cluster(request_timeout=_SILENCE_S)
        while not wait_for_futures((future,), timeout=_SLICE_S).done:
            client.poll(0)
            watch.check("connecting")
            if time.monotonic() - begun_s > (_REFUSED_S if watch.is_down else _SILENCE_S):
                raise watch.silence()
        client.poll(0)
        watch.check("connecting")
        error = future.exception()
        if isinstance(error, KafkaException) and meaning(error) in UNANSWERED:
            raise watch.silence()
    finally:
        client.__exit__(None, None, None)
