"""Clients of Kafka: as much of confluent_kafka's as kafkamq uses, and where they are made.

``bootstrap.servers`` that begins with ``memory://`` names a cluster that lives in this process, of
``kafkamq.transport.memory``; every other address is librdkafka's. What holds for all calls:

* Errors are ``KafkaException`` with a ``KafkaError``; its code, ``fatal``, ``retriable`` and
  ``txn_requires_abort`` count.
* ``error_cb``, delivery reports and rebalance callbacks run in the thread that calls ``poll``,
  ``consume``, ``flush`` or ``close``, inside that call, and nowhere else.
* Seconds are floats; a negative or missing timeout waits forever.
* Clients are thread-safe, but for ``close`` beside another call, and do not survive a fork.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, Protocol, TypeVar, overload
from weakref import WeakSet

from confluent_kafka import Consumer as _Consumer
from confluent_kafka import KafkaError, KafkaException, Message, ShareConsumer, TopicPartition
from confluent_kafka import Producer as _Producer
from confluent_kafka.admin import AdminClient as _AdminClient

from kafkamq.errors import ConfigError, StateError
from kafkamq.transport.errors import ErrorWatch, kafka_error, raised_inside
from kafkamq.transport.settings import is_secret

MEMORY = "memory://"
"""How the bootstrap servers of a cluster in memory begin; its name follows."""

FLUSH_SLICE_S = 0.1
_log = logging.getLogger("kafkamq.librdkafka")
# Of a client whose failures its caller tells. No configuration of logging knows it or changes it.
_SILENT = logging.Logger("silent", logging.CRITICAL + 1)  # noqa: LOG001
Client = TypeVar("Client")


class _InterruptibleAdminClient(_AdminClient):
    """One whose question that workers ask again and again may be interrupted."""

    def describe_topics(self, *topics: Any, **options: Any) -> Any:
        try:
            return super().describe_topics(*topics, **options)
        except SystemError as error:
            # Python runs signal handlers in the middle of the call.
            raise raised_inside(error) from None


def open_consumer(settings: Mapping[str, object], watch: ErrorWatch | None = None) -> Consumer:
    """Get a consumer, which connects by itself; raises ConfigError where its settings cannot be."""
    if _is_memory(settings):
        from kafkamq.transport.memory.consumer import Consumer as MemoryConsumer

        return _open(MemoryConsumer, settings, watch)
    return _open(_Consumer, settings, watch)


def open_producer(settings: Mapping[str, object], watch: ErrorWatch | None = None) -> Producer:
    """Return a producer, opened as a consumer is; transactional if the settings name an id."""
    if _is_memory(settings):
        from kafkamq.transport.memory.producer import Producer as MemoryProducer

        return _open(MemoryProducer, settings, watch)
    return _open(_Producer, settings, watch)


def open_admin(
    settings: Mapping[str, object], watch: ErrorWatch | None = None, *, quiet: bool = False
) -> AdminClient:
    """Return an admin client, as ``open_consumer`` opens a consumer; ``quiet``: it logs nothing."""
    if _is_memory(settings):
        from kafkamq.transport.memory.admin import AdminClient as MemoryAdminClient

        return _open(MemoryAdminClient, settings, watch)
    return _open(_InterruptibleAdminClient, settings, watch, quiet=quiet)


def open_share_consumer(settings: Mapping[str, object]) -> ShareConsumer:
    """Return a member of a share group; librdkafka's alone."""
    return ShareConsumer(dict(settings))


def _refuse_greenlets() -> None:
    """Refuse to work where threads are greenlets: one that waits in a client stops all others."""
    patched: Any = sys.modules.get("gevent.monkey")
    if patched is not None and any(map(patched.is_module_patched, ("threading", "queue"))):
        raise StateError(
            "gevent has patched Python's threads or queues, which clients of Kafka need as they "
            "are: call gevent.monkey.patch_all(thread=False, queue=False)"
        )


def _is_memory(settings: Mapping[str, object]) -> bool:
    return str(settings.get("bootstrap.servers", "")).startswith(MEMORY)


def _open(
    make: Callable[..., Client],
    settings: Mapping[str, object],
    watch: ErrorWatch | None,
    *,
    quiet: bool = False,
) -> Client:
    """Refusals of the settings become ConfigErrors without secrets."""
    _refuse_greenlets()
    servers = str(settings.get("bootstrap.servers", ""))
    full = {**settings, "error_cb": watch if watch is not None else ErrorWatch(servers)}
    try:
        return make(full, logger=_SILENT if quiet else ClientLog())
    except (KafkaException, TypeError, ValueError) as error:
        text = kafka_error(error).str() if isinstance(error, KafkaException) else str(error)
        for name, value in settings.items():
            if is_secret(name) and str(value):
                text = text.replace(str(value), "***")
        raise ConfigError(f"the kafka settings cannot work: {text}") from None


def flush_in_slices(client: Producer, timeout_s: float) -> int:
    """Flush in slices: confluent-kafka loses the first report behind a fatal error in longer ones.

    A slice ends at the error, and raises it; one of more than 0.2 s goes on with it raised.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = deadline_s - time.monotonic()
        held = partial(client.flush)(max(0.0, min(left_s, FLUSH_SLICE_S)))
        if not held or left_s <= FLUSH_SLICE_S:
            return held


class ClientLog:
    """It makes log records of librdkafka's lines, each kind at most once in ten seconds."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def log(self, level: int, _format: str, *args: object) -> None:
        """Called by confluent_kafka with facility, client name and text."""
        facility, client, text = (*(str(arg) for arg in args), "", "", "")[:3]
        if facility == "CONFWARN":
            # A property of another role is passed on purpose.
            return
        if text.endswith(": retrying"):
            # Every start says so while a coordinator loads.
            level = logging.DEBUG
        now = time.monotonic()
        if now - self._last.get(facility, -1e9) < 10.0:
            return
        self._last[facility] = now
        # A client that cannot connect goes on trying; who waits raises. So never above WARNING.
        _log.log(min(level, logging.WARNING), "%s: %s", facility, text, extra={"client": client})


Rebalance = Callable[["Any", "list[TopicPartition]"], None]
"""Gets the consumer and the partitions that come or go."""

DeliveryReport = Callable[["KafkaError | None", Message], None]
"""Gets the error, or None, and the message with its offset and time."""


class Consumer(Protocol):
    """A reader of partitions that are assigned by hand, or by its group."""

    def subscribe(
        self,
        topics: list[str],
        on_assign: Rebalance | None = None,
        on_revoke: Rebalance | None = None,
        on_lost: Rebalance | None = None,
    ) -> None:
        """Become a member of the group, at the next ``poll``; names that begin with ^ are patterns.

        Where a callback assigns nothing, the client does it. ``on_revoke`` runs while the
        partitions are still this member's, ``on_lost`` when they are not any more.
        """

    def unsubscribe(self) -> None:
        """Leave the group; the revocation is served by the next ``poll`` or ``close``."""

    def assign(self, partitions: list[TopicPartition]) -> None:
        """Read these partitions alone; an offset of -1001 asks for the committed one."""

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        """Read these as well; raises ``_CONFLICT`` if one of them is assigned already."""

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        """Read these no more; raises ``_INVALID_ARG`` if one of them is not assigned."""

    def unassign(self) -> None: ...

    def assignment(self) -> list[TopicPartition]:
        """Return what is assigned, by partition."""

    def seek(self, partition: TopicPartition) -> None:
        """Go on at another offset; raises ``_STATE`` where the partition is not being read."""

    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Return the offsets behind what was handed out; -1001: nothing, since the assignment."""

    def pause(self, partitions: list[TopicPartition]) -> None:
        """Hand out no more records of these; outlives their assignment, unlike in Java's client."""

    def resume(self, partitions: list[TopicPartition]) -> None: ...

    def poll(self, timeout: float = -1) -> Message | None:
        """Return the next record or event, or None when the time is over; serves callbacks.

        Events are messages with an error: ``_PARTITION_EOF`` (where asked for),
        ``_AUTO_OFFSET_RESET`` and others.
        """

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        """Wait for this many records and events, or until the time is over."""

    @overload
    def commit(self, *, asynchronous: Literal[True] = ...) -> None: ...
    @overload
    def commit(
        self, *, offsets: list[TopicPartition], asynchronous: Literal[True] = ...
    ) -> None: ...
    @overload
    def commit(
        self, *, offsets: list[TopicPartition], asynchronous: Literal[False]
    ) -> list[TopicPartition]: ...

    # Commits, asynchronously without an answer. Each partition of an answer has its own ``error``.

    def committed(
        self, partitions: list[TopicPartition], timeout: float = -1
    ) -> list[TopicPartition]:
        """Return what is committed (-1001: nothing); read_committed waits for transactions."""

    def get_watermark_offsets(
        self, partition: TopicPartition, timeout: float = -1, cached: bool = False
    ) -> tuple[int, int]:
        """Return the first offset, and the one behind the last record that this reader may see.

        ``cached``: as the last fetch told, -1001 where none has.
        """

    def offsets_for_times(
        self, partitions: list[TopicPartition], timeout: float = -1
    ) -> list[TopicPartition]:
        """Get the first offsets whose records are not older than these times (ms); -1: the end."""

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        """Return the metadata of one topic or all; the client knows new partitions from then on."""

    def consumer_group_metadata(self) -> Any:
        """Return the member as of now, for ``send_offsets_to_transaction``."""

    def memberid(self) -> str | None:
        """Return the name that the group gave; empty: it is no member."""

    def close(self) -> None:
        """Leave the group, by way of its callbacks, and end; other calls raise RuntimeError."""


class Producer(Protocol):
    """A writer; idempotent, and transactional if it has a transactional id."""

    def produce(
        self,
        topic: str,
        value: str | bytes | None = None,
        key: str | bytes | None = None,
        partition: int = -1,
        callback: DeliveryReport | None = None,
        on_delivery: DeliveryReport | None = None,
        timestamp: int = 0,
        headers: Any = None,
    ) -> None:
        """Queue one record; never waits. ``callback`` and ``on_delivery`` are the same.

        Raises:
            BufferError: The queue is full: ``poll`` makes room.
            KafkaException: ``_UNKNOWN_PARTITION``, ``_UNKNOWN_TOPIC``, ``MSG_SIZE_TOO_LARGE``,
                ``_STATE``, or ``_FATAL`` once the client has failed for good.
        """

    def produce_batch(self, topic: str, messages: list[dict[str, Any]], partition: int = -1) -> int:
        """Queue records of one topic: value, key and callback of each; how many were taken.

        The others get an ``_error``.
        """

    def poll(self, timeout: float = -1) -> int:
        """Serve delivery reports; a fatal error is raised here, once."""

    def flush(self, timeout: float = -1) -> int:
        """Serve reports until all records are delivered or the time is over; how many are left."""

    def purge(self, in_queue: bool = True, in_flight: bool = True, blocking: bool = True) -> None:
        """Give up what is queued and under way; the next ``poll`` reports it as failed."""

    def __len__(self) -> int:
        """Return records and reports that are under way."""

    def init_transactions(self, timeout: float = -1) -> None:
        """Fence earlier producers of the id and end what they had under way.

        Like the calls below, it may be called again after a timeout.
        """

    def begin_transaction(self) -> None: ...

    def send_offsets_to_transaction(
        self, positions: list[TopicPartition], group_metadata: Any, timeout: float = -1
    ) -> None:
        """Commit offsets with the transaction; refused for a former generation of the member."""

    def commit_transaction(self, timeout: float = -1) -> None:
        """Flush and commit; it goes on when it is called again after a retriable error."""

    def abort_transaction(self, timeout: float = -1) -> None: ...

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any: ...

    def close(self) -> bool:
        """Flush, abort what is open, and end."""


class AdminClient(Protocol):
    """Questions and orders to the cluster: one future per thing, which raises KafkaException."""

    def poll(self, timeout: float = -1) -> int:
        """Serve ``error_cb``."""

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any: ...

    def describe_cluster(self, **kwargs: Any) -> Future[Any]: ...

    def describe_topics(self, topics: Any, **kwargs: Any) -> dict[str, Future[Any]]: ...

    def describe_configs(self, resources: list[Any], **kwargs: Any) -> dict[Any, Future[Any]]:
        """Return the effective settings of topics, brokers or groups."""

    def incremental_alter_configs(
        self, resources: list[Any], **kwargs: Any
    ) -> dict[Any, Future[Any]]: ...

    def create_topics(self, new_topics: list[Any], **kwargs: Any) -> dict[str, Future[Any]]:
        """Returns before every broker knows of the topic."""

    def delete_topics(self, topics: list[str], **kwargs: Any) -> dict[str, Future[Any]]: ...

    def list_consumer_groups(self, **kwargs: Any) -> Future[Any]:
        """Return all groups with members or committed offsets."""

    def describe_consumer_groups(
        self, group_ids: list[str], **kwargs: Any
    ) -> dict[str, Future[Any]]: ...

    def delete_consumer_groups(self, group_ids: list[str], **kwargs: Any) -> dict[str, Future[Any]]:
        """Delete groups without members, and what they committed."""

    def list_offsets(
        self, topic_partition_offsets: dict[TopicPartition, Any], **kwargs: Any
    ) -> dict[TopicPartition, Future[Any]]:
        """Return the first and last offsets, or that of the latest timestamp."""

    def __exit__(self, exc_type: Any, exc_value: Any, exc_traceback: Any) -> bool | None: ...


_checks: WeakSet[ForkCheck] = WeakSet()


def _fork() -> None:
    for check in list(_checks):
        check.is_forked = True


os.register_at_fork(after_in_child=_fork)


class ForkCheck:
    """It remembers the process that made an object.

    Attributes:
        is_forked: Whether this is a forked child of that process.
    """

    __slots__ = ("__weakref__", "_what", "is_forked")

    def __init__(self, what: str) -> None:
        self._what = what
        self.is_forked = False
        _checks.add(self)

    def check(self) -> None:
        """Refuse in a forked child."""
        if self.is_forked:
            raise StateError(
                f"this {self._what} was made before a fork and belongs to the parent process; "
                "make a new Service in the child"
            )
