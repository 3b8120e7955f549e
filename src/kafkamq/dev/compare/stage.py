"""One contender of a comparison at work: its topics, its processes, and what it writes to logs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, TopicPartition
from confluent_kafka import Message as Record
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # not in its __all__
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from kafkamq.config import ServiceConfig
from kafkamq.dev.children import Child
from kafkamq.dev.compare.plan import Contender, Item, Work, encode, ordering_of
from kafkamq.dev.history import Event, HistoryReader, under_way
from kafkamq.errors import BrokerError, DeadlineExceededError, KafkaMQError
from kafkamq.queue.names import group_of
from kafkamq.queue.service import Service
from kafkamq.queue.wire.headers import ORIGIN
from kafkamq.transport.admin import Admin
from kafkamq.transport.clients import open_consumer
from kafkamq.transport.record import headers_of

ACTORS = "kafkamq.dev.actors"
QUEUE = "work"
MIN_SESSION_S = 6.0
READY_S = 90.0
STOP_S = 30.0
_FOLLOW_S = 0.02
_WARM_FIRST = 1 << 40
_WARM_QUICK_S = 0.7
_WARM_ROUNDS = 100
_WARM_PAUSE_S = 0.1
# Every process gets messages within this; of claims one may have all of them.
_JOIN_S = 12.0


class Stage:
    """A contender's own namespace, with worker processes; a context manager; one thread."""

    def __init__(
        self,
        config: ServiceConfig,
        work: Work,
        contender: Contender,
        folder: Path,
        *,
        module: str = ACTORS,
        name: str = "",
        keep: bool = False,
    ) -> None:
        self.name = name or contender.value
        self.config = ServiceConfig(
            bootstrap_servers=config.bootstrap_servers,
            namespace=f"{config.namespace}-{self.name}",
            kafka={**self._session(contender, work), **config.kafka},
        )
        self.contender = contender
        self.work = work
        self.left: list[str] = []
        self.events: list[Event] = []
        self.ended: set[int] = set()
        self.sent_s: dict[int, float] = {}
        self._folder = folder
        self._module = module
        own = "group" if contender is Contender.GROUP else "work"
        self._runner = own if module == ACTORS else self.name
        self._keep = keep
        self._workers: dict[str, Child] = {}
        self._tracker: Child | None = None
        self._histories = folder / self.name
        self._reader = HistoryReader(self._histories)
        self._warmed = _WARM_FIRST
        namespace = self.config.namespace
        self._service = Service(config.bootstrap_servers, namespace, kafka=config.kafka)
        backend = "offsets" if contender is Contender.GROUP else contender.value
        self.queue = self._service.queue(QUEUE, backend=backend, redelivery_timeout=work.lease_s)

    @staticmethod
    def _session(contender: Contender, work: Work) -> dict[str, str]:
        """Return the session timeout that decides when a dead process's partitions go to others."""
        if contender is Contender.SHARE:
            # The session is the broker's.
            return {}
        return {"session.timeout.ms": str(int(max(MIN_SESSION_S, work.lease_s) * 1000))}

    @property
    def topic(self) -> str:
        return self.queue.config.topic or self.config.message_topic

    def __enter__(self) -> Stage:
        self._histories.mkdir(parents=True, exist_ok=True)
        try:
            partitions = self.work.partitions
            if self.contender is not Contender.MARKERS:
                self.queue.create_topics(partitions=partitions)
            else:
                markers = min(partitions, 8)
                self._service.create_topics(partitions=partitions, marker_partitions=markers)
                self._tracker = self._child(ACTORS, "tracker", {"role": "tracker"})
            for number in range(self.work.processes):
                self._start_worker(number)
            for child in self._children():
                child.wait_for("ready", timeout_s=READY_S)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _start_worker(self, number: int) -> None:
        name = f"worker-{number}"
        orders = {
            "role": "worker",
            "runner": self._runner,
            "histories": str(self._histories),
            "name": name,
            "queues": [QUEUE],
            "contender": self.contender.value,
            "settings": {"redelivery_timeout": self.work.lease_s},
            "topic": self.topic,
            "concurrency": self.work.concurrency,
            "ordering": ordering_of(self.contender, self.work),
            "partitions": self.work.partitions,
            "processes": self.work.processes,
        }
        self._workers[name] = self._child(self._module, name, orders)

    def _child(self, module: str, name: str, orders: Mapping[str, Any]) -> Child:
        where = {
            "bootstrap_servers": self.config.bootstrap_servers,
            "namespace": self.config.namespace,
            "kafka": dict(self.config.kafka),
        }
        log = self._folder / f"{self.name}-{name}.log"
        return Child(module, {**where, **orders}, name=f"{self.name} {name}", log=log)

    # Messages.

    def send(self, items: Sequence[Item], *, interval_ms: int = 0) -> None:
        producer = self.queue.producer()
        size = self.work.payload_bytes
        at_s = time.monotonic()
        for item in items:
            if interval_ms:
                at_s += interval_ms / 1000
                time.sleep(max(0.0, at_s - time.monotonic()))
            payload = encode(item, size=size)
            self.sent_s[item.number] = time.monotonic()
            producer.send(payload, key=item.key)
        producer.flush(60.0)

    def send_backlog(self, items: Sequence[Item]) -> float:
        """Send while the processes stand still; returns when they went on, monotonic."""
        workers = [each for each in self._workers.values() if each.is_running]
        for worker in workers:
            worker.pause()
        try:
            self.send(items)
        finally:
            begin_s = time.monotonic()
            for worker in workers:
                worker.resume()
        return begin_s

    def warm_up(self, *, limit_s: float = 60.0) -> None:
        """Send to all partitions until messages are through at once and everybody has joined."""
        deadline_s = time.monotonic() + limit_s
        joined_s = time.monotonic() + _JOIN_S
        quick = 0
        for _ in range(_WARM_ROUNDS):
            count = 16 * self.work.partitions
            items = [Item(self._warmed + each, f"warm-{each}", 0) for each in range(count)]
            self._warmed += count
            began_s = time.monotonic()
            self.send(items)
            if not self.wait([each.number for each in items], deadline_s - time.monotonic()):
                raise DeadlineExceededError(
                    f"{self.name}: messages were not handled within {limit_s:g} s of the start"
                )
            last = {event.process for event in self.events if event["id"] >= items[0].number}
            has_joined = len(last) == len(self._workers) or time.monotonic() > joined_s
            is_quick = time.monotonic() - began_s < _WARM_QUICK_S
            quick = quick + 1 if is_quick and has_joined else 0
            if quick >= 2:
                return
            time.sleep(_WARM_PAUSE_S)

    # What happens.

    def follow(self) -> None:
        new = self._reader.read()
        self.events += new
        self.ended.update(event["id"] for event in new if event.op == "end")

    def wait(self, numbers: Sequence[int], limit_s: float, *, share: float = 1.0) -> bool:
        """Wait until this share of the messages has ended; False: the time is over."""
        deadline_s = time.monotonic() + limit_s
        open_numbers = set(numbers)
        most = (1.0 - share) * len(open_numbers)
        while True:
            self.follow()
            open_numbers -= self.ended
            if len(open_numbers) <= most:
                return True
            if time.monotonic() > deadline_s:
                return False
            for child in self._children():
                child.check()
            time.sleep(_FOLLOW_S)

    def _children(self) -> list[Child]:
        tracker = [] if self._tracker is None else [self._tracker]
        return [*self._workers.values(), *tracker]

    def kill_busiest(self) -> float:
        """SIGKILL to the process that holds most messages; returns when, monotonic."""
        self.follow()
        held = under_way(self.events)
        victim = self._workers.pop(max(self._workers, key=lambda name: held.get(name, 0)))
        at_s = time.monotonic()
        victim.kill()
        victim.end()
        return at_s

    # The end.

    def _end(self) -> None:
        children = self._children()
        for child in children:
            with suppress(KafkaMQError):
                child.order({"stop": True})
        for child in children:
            if child is not self._tracker:
                with suppress(KafkaMQError):
                    child.wait_for("stopped", timeout_s=STOP_S)
            child.end()
        with suppress(KafkaMQError):
            self._service.close()
        if not self._keep:
            is_share = self.contender is Contender.SHARE
            groups = [group_of(self.config, QUEUE)] if is_share else []
            self.left = remove(self.config, self.config.namespace, groups=groups)


SHARED = ("__consumer_offsets", "__share_group_state", "__transaction_state")
_READ_S = 20.0
_QUIET_S = 1.2
_SETTLE_S = 3.0
_BATCH = 2000
_GONE = ("GROUP_ID_NOT_FOUND", "UNKNOWN_TOPIC_OR_PART")
_GROUP_SETTINGS = (
    "share.record.lock.duration.ms",
    "share.auto.offset.reset",
    "share.isolation.level",
)

Ends = dict[tuple[str, int], int]
Written = tuple[int, int]
"""Records, and the bytes of their keys, values and headers."""


def ends_of(config: ServiceConfig, prefix: str) -> Ends:
    """Return the ends of all topics that begin so, and of Kafka's own that groups write to."""
    found: Ends = {}
    with Admin(config) as admin:
        topics = [
            name
            for name in admin.client.list_topics(timeout=10).topics
            if name.startswith(prefix) or name in SHARED
        ]
        for topic in topics:
            for number, (_, high) in admin.log_ends(topic).items():
                found[topic, number] = high
    return found


def settled_ends(config: ServiceConfig, prefix: str) -> Ends:
    """Return the ends of logs when they have not moved for a while, or after a few seconds."""
    deadline_s = time.monotonic() + _SETTLE_S
    ends, since_s = ends_of(config, prefix), time.monotonic()
    while time.monotonic() < deadline_s and time.monotonic() - since_s < _QUIET_S:
        time.sleep(0.2)
        now = ends_of(config, prefix)
        if now != ends:
            ends, since_s = now, time.monotonic()
    return ends


def written_between(
    config: ServiceConfig, prefix: str, before: Ends, after: Ends, *, messages: str
) -> Written | None:
    """Return what was written in between for this prefix, first copies of messages not counted.

    Records of topics with the prefix count, and those of Kafka's own whose key names it.

    Returns:
        None when Kafka's own topics cannot be read.
    """
    spans = {place: end for place, end in after.items() if end > before.get(place, 0)}
    if not spans:
        return 0, 0
    settings = {
        "bootstrap.servers": config.bootstrap_servers,
        "group.id": f"{prefix}.reader",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "isolation.level": "read_uncommitted",
        "auto.offset.reset": "earliest",
        "fetch.queue.backoff.ms": 3,
        **config.kafka,
    }
    name = prefix.encode()
    count = size = 0
    with closing(open_consumer(settings)) as consumer:
        consumer.assign([TopicPartition(*place, before.get(place, 0)) for place in spans])
        deadline_s = time.monotonic() + _READ_S
        while spans and time.monotonic() < deadline_s:
            for record in consumer.consume(_BATCH, 0.1):
                place = (str(record.topic()), int(record.partition() or 0))
                offset, error = int(record.offset() or 0), record.error()
                if error is not None:
                    if error.code() != KafkaError._PARTITION_EOF:
                        return None
                    # What ends the log may be a mark of a transaction.
                    spans.pop(place, None)
                elif place in spans and offset < spans[place]:
                    if _counts(record, name, messages):
                        count += 1
                        size += _size(record)
                    if offset == spans[place] - 1:
                        del spans[place]
    return None if spans else (count, size)


def _counts(record: Record, prefix: bytes, messages: str) -> bool:
    if record.topic() in SHARED:
        return prefix in (record.key() or b"")
    if record.topic() == messages:
        return any(name == ORIGIN for name, _ in headers_of(record))
    return True


def _size(record: Record) -> int:
    headers = sum(len(name) + len(value or b"") for name, value in headers_of(record))
    return len(record.key() or b"") + len(record.value() or b"") + headers


def remove(config: ServiceConfig, prefix: str, *, groups: Sequence[str]) -> list[str]:
    """Delete what has that prefix in its name, and these share groups, which no client can list.

    Returns what could not be deleted.
    """
    left: list[str] = []
    with Admin(config) as admin:
        found = admin.client.list_consumer_groups(request_timeout=10).result(15).valid
        names = {each.group_id for each in found if prefix in each.group_id} | set(groups)
        topics = [
            name for name in admin.client.list_topics(timeout=10).topics if name.startswith(prefix)
        ]
        for group in groups:
            entries = [
                ConfigEntry(name, None, incremental_operation=AlterConfigOpType.DELETE)
                for name in _GROUP_SETTINGS
            ]
            kind = ConfigResource.Type.GROUP
            resource = ConfigResource(kind, group, incremental_configs=entries)
            for future in admin.client.incremental_alter_configs([resource]).values():
                with suppress(KafkaMQError):
                    admin.wait(future, f"resetting share group {group}")
        for futures, what in (
            (admin.client.delete_consumer_groups(sorted(names)) if names else {}, "group"),
            (admin.client.delete_topics(topics) if topics else {}, "topic"),
        ):
            for name, future in futures.items():
                try:
                    admin.wait(future, f"deleting {what} {name}")
                except BrokerError as error:  # noqa: PERF203 - each one is tried
                    if error.code not in _GONE:
                        left.append(f"{what} {name}")
                except KafkaMQError:
                    left.append(f"{what} {name}")
    return left
