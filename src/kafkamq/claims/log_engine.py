"""Here is what one log of claims has: its topic, and in a process reader, writer, clock and
thread.

The topic is made with the settings that claims rest on, and checked before use. An existing one is
never altered: an error says what is wrong with it, and what to do about it.

Where to begin is told by the log itself: some heartbeat intervals before its *last* record, by the
broker's time. So neither the process's clock nor the number of records matters. What was written
before is not needed: who holds something has written since.

The reader is ``read_uncommitted``, as Go clients are: everybody must see the same records, and a
transaction that somebody leaves open in the topic must not hold the claims back.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from kafkamq.claims.wire.marshal import COORDINATION_TOPIC
from kafkamq.config import Options, QueueConfig, ServiceConfig, milliseconds, wait_seconds
from kafkamq.errors import (
    BrokerError,
    ConfigError,
    DeadlineExceededError,
    KafkaMQError,
    StateError,
    WireError,
)
from kafkamq.queue.topics import Finding, log_settings
from kafkamq.transport.admin import Admin, TopicInfo
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.errors import KafkaError, Meaning, broker_error, is_retriable, meaning
from kafkamq.transport.follower import Follower
from kafkamq.transport.producer import IdempotentProducer
from kafkamq.transport.record import Record, headers_of
from kafkamq.transport.settings import producer_settings

INTERVAL_HEADER = "kafkamq-interval-ms"
"""What the sender takes for the heartbeat interval; Go clients write none (60 s)."""
# While a write is under way its report may come after its record.
_BUSY_S = 0.002
_IDLE_S = 0.05
_BATCH = 5000
_TOPOLOGY_MS = 5000
# Behind this the topic is gone, and not only unknown to a broker.
_MAX_ABSENCES = 4
_log = logging.getLogger(__name__)
_DAY_S = 86_400
_MAX_ID_CHARACTERS = 249
# Readers begin three intervals back; the rest is for those that were slow.
_MIN_INTERVALS_KEPT = 6


def coordination_topic(config: ServiceConfig) -> str:
    return f"{config.namespace}.claims"


def heartbeat_s(queue: QueueConfig) -> float:
    """Return the heartbeat interval of a queue's claims: two of them are its redelivery timeout."""
    return max(0.5, queue.redelivery_timeout_ms / 2000)


def check_id(name: str, value: str) -> None:
    if not 0 < len(value) <= _MAX_ID_CHARACTERS or "/" in value or not value.isprintable():
        raise ConfigError(
            f"{name} is {value!r}: it must be 1-{_MAX_ID_CHARACTERS} printable characters without"
            " '/', which separates the fields of a record"
        )


@dataclass(frozen=True, slots=True)
class CoordinationTopic:
    name: str
    # A change of this number ends every claim.
    partitions: int
    has_broker_time: bool = True
    warnings: tuple[str, ...] = ()


def init_topic(
    bootstrap_servers: str,
    topic: str = COORDINATION_TOPIC,
    *,
    partitions: int = Options.partitions.default,
    replication_factor: int = Options.replication_factor.default,
    retention: float | timedelta = _DAY_S,
    heartbeat_interval: float | timedelta = Options.heartbeat_interval.default,
    rules: str = Options.rules.default,
    kafka: Mapping[str, str] | None = None,
    timeout: float | timedelta = 30.0,
) -> bool:
    """Create a coordination topic unless it exists, and check it.

    It gets LogAppendTime (a claim's age is the broker's), no compaction (a claim is the order of
    its records) and at least two replicas in sync where three exist.

    Args:
        bootstrap_servers: The cluster.
        topic: Its name; Go clients know ``__marshal`` only.
        partitions: Topics are spread over them by their names; cannot be changed while in use.
        replication_factor: -1: the cluster's default.
        retention: Seconds that records are kept: at least six heartbeat intervals.
        heartbeat_interval: Of the clients that will use it, in seconds.
        rules: As for ``Cluster``.
        kafka: Kafka's own properties, for example for security.
        timeout: Bound of every single request, in seconds.

    Returns:
        False: it existed already.

    Raises:
        ConfigError: An argument, or the topic as it is, cannot work.
        BrokerError, DeadlineExceededError: The cluster refused, or does not answer.
    """
    Options.rules.check(rules)
    if partitions < 1 or (replication_factor < 1 and replication_factor != -1):
        raise ConfigError(
            f"partitions is {partitions} and replication_factor {replication_factor}: they must be"
            " >= 1 (a replication factor of -1 is the cluster's default)"
        )
    retention_ms = milliseconds(retention, name="retention")
    interval_ms = Options.heartbeat_interval.convert(heartbeat_interval)
    timeout_s = wait_seconds(timeout)
    if retention_ms < _MIN_INTERVALS_KEPT * interval_ms:
        raise ConfigError(
            f"retention is {retention_ms / 1000:g} s: it must be at least {_MIN_INTERVALS_KEPT}"
            f" heartbeat intervals ({_MIN_INTERVALS_KEPT * interval_ms / 1000:g} s)"
        )
    config = ServiceConfig(bootstrap_servers=bootstrap_servers, kafka=dict(kafka or {}))
    with Admin(config, timeout_s=timeout_s) as admin:
        created = False
        if topic not in admin.topics([topic]):
            settings = log_settings(admin, replication_factor)
            settings = {**settings, "retention.ms": str(retention_ms)}
            wanted = {topic: (partitions, settings)}
            created = bool(admin.create_topics(wanted, replication_factor=replication_factor))
        require_topic(admin, topic, rules=rules, interval_ms=interval_ms)
        return created


def require_work(admin: Admin, topic: str) -> int:
    """Return how many partitions a topic has whose partitions are claimed."""
    found = admin.topics([topic]).get(topic)
    if found is None:
        raise BrokerError(
            f"topic {topic} does not exist: claims are made on topics that are there",
            code="UNKNOWN_TOPIC_OR_PART",
        )
    return found.partitions


def find_topic(admin: Admin, topic: str) -> TopicInfo:
    found = admin.topics([topic]).get(topic)
    if found is None:
        raise ConfigError(
            f"coordination topic {topic} does not exist: create it with `kafkamq claims init` or"
            " kafkamq.claims.init_topic()"
        )
    return found


def require_topic(admin: Admin, topic: str, *, rules: str, interval_ms: int) -> CoordinationTopic:
    """Look up a coordination topic, and refuse one that claims cannot rest on."""
    found = find_topic(admin, topic)
    findings = list(topic_findings(found, rules=rules, interval_ms=interval_ms))
    refusals = [str(finding) for finding in findings if finding.level == "refuse"]
    if refusals:
        raise ConfigError("the coordination topic cannot be used:\n  " + "\n  ".join(refusals))
    has_broker_time = found.settings.get("message.timestamp.type") == "LogAppendTime"
    warnings = tuple(finding.text for finding in findings)
    return CoordinationTopic(topic, found.partitions, has_broker_time, warnings)


def topic_findings(topic: TopicInfo, *, rules: str, interval_ms: int) -> Iterator[Finding]:
    name, settings = topic.name, topic.settings
    policy = settings.get("cleanup.policy", "delete")
    if "compact" in policy:
        yield Finding(
            "refuse",
            name,
            f"cleanup.policy is {policy}: records have no key, and an order of claims cannot be"
            " compacted; set it to delete",
        )
    kind = settings.get("message.timestamp.type", "CreateTime")
    if kind != "LogAppendTime":
        yield Finding(
            "refuse" if rules == "safe" else "warn",
            name,
            f"message.timestamp.type is {kind}: the age of a claim would be a client's clock; set"
            " it to LogAppendTime and wait three heartbeat intervals",
        )
    if settings.get("unclean.leader.election.enable", "false") == "true":
        yield Finding(
            "refuse",
            name,
            "unclean.leader.election.enable is true: a claim that was read back may vanish; set it"
            " to false",
        )
    retention_ms = int(settings.get("retention.ms", "604800000"))
    if 0 <= retention_ms < _MIN_INTERVALS_KEPT * interval_ms:
        yield Finding(
            "refuse",
            name,
            f"retention.ms is {retention_ms}: a living claim could be deleted; set it to"
            f" {_MIN_INTERVALS_KEPT * interval_ms} or more",
        )
    if settings.get("retention.bytes", "-1") != "-1":
        yield Finding(
            "warn", name, "retention.bytes is set: a burst may delete living claims; set it to -1"
        )
    if topic.replication_factor < 3:
        yield Finding(
            "warn", name, f"replication factor {topic.replication_factor}: 3 keeps claims safe"
        )


class BrokerClock:
    """The broker's time as the last record tells it; before the first one, the wall clock.

    Nothing is decided by it that the log would not confirm: it only says when a claim is worth
    writing, and what goes into the records' time.
    """

    def __init__(self, latest_record_ms: int = -1) -> None:
        """``latest_record_ms``: the broker's time of the log's last record; -1: there is none."""
        self._now_ms = max(latest_record_ms, time.time_ns() // 1_000_000)
        self._seen_ms = monotonic_ms()

    def saw(self, broker_ms: int) -> None:
        """A record was appended at ``broker_ms``, just now."""
        self._now_ms = broker_ms
        self._seen_ms = monotonic_ms()

    def now_s(self) -> float:
        """Return the broker's time, late by what a record takes to arrive."""
        return (self._now_ms + monotonic_ms() - self._seen_ms) / 1000


def follow(config: ServiceConfig, topic: str, **settings: Any) -> Follower:
    """Return a reader that goes on when brokers or the topic are away for a while."""
    return Follower(
        config,
        f"reading {topic}",
        ignores=partial(is_retriable, or_missing=True),
        enable_partition_eof=True,
        **settings,
    )


class LogEngine(ABC):
    """Reads a topic of claims and writes to it; a subclass folds what is read.

    One thread owns the reader, and calls ``fold`` and ``turn``. Everything else happens under one
    lock, in whatever thread has news: what an application's thread asks for is planned and sent at
    once, not at the next turn.
    """

    # An owner is heard twice within two intervals; the third is for jumps of the clock.
    window_intervals = 3

    def __init__(
        self, config: ServiceConfig, topic: CoordinationTopic, *, interval_ms: int, owner: str
    ) -> None:
        """Nothing is read before ``start``; error texts say that this ``owner`` is closed."""
        self.config = config
        self.topic = topic
        self.interval_ms = interval_ms
        self.lock = threading.RLock()
        # Notified when an application's thread may have something to do.
        self.changed = threading.Condition(self.lock)
        self.on_turn: Callable[[], None] = lambda: None
        self.error: KafkaMQError | None = None
        self.admin = Admin(config, timeout_s=15.0)
        self.clock = BrokerClock()
        # Every record that was there at the start is read.
        self.is_ready = False
        # A mark for each record that has no report yet.
        self.under_way: set[object] = set()
        self._owner = owner
        self._follower: Follower | None = None
        self._producer: IdempotentProducer | None = None
        # By partition: the end that was there at the start, until it is reached, and forever.
        self._missing: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._absences = 0
        self._topology_ms = 0
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kafkamq-claims", daemon=True)

    # ---- what a subclass does with the log

    @abstractmethod
    def open_log(self, partition: int, since_s: float | None) -> None:
        """All records since then, by the broker's time in s, will be told; None: all there are."""

    @abstractmethod
    def fold(self, message: Record, partition: int, offset: int, broker_ms: int) -> None:
        """Apply one record; under the lock."""

    @abstractmethod
    def turn(self, now_ms: int) -> None:
        """Do what is due; under the lock, after records were folded and at least 20 times a s."""

    def look_around(self) -> None:  # noqa: B027 - not every log needs it
        """Ask brokers what may take a while, between two turns; without the lock."""

    def on_failure(self) -> None:  # noqa: B027 - as above
        """Give up all that is claimed, as ``error`` says why; under the lock."""

    def services(self) -> Iterable[Callable[[float], object]]:
        """List what ends each service whose threads answer into this engine, in so many s."""
        return ()

    def on_stopped(self) -> None:  # noqa: B027 - as above
        """The thread has ended: what it alone used may be used, and ended."""

    # ---- life

    def start(self, partitions: Sequence[int]) -> None:
        """Find out where to begin in these partitions, and begin."""
        name = self.topic.name
        self._follower = follow(
            self.config, name, isolation_level="read_uncommitted", queued_min_messages=100_000
        )
        bounds = self.admin.log_bounds(name, partitions)
        latest = self.admin.latest_times(name, partitions) if self.topic.has_broker_time else {}
        self.clock = BrokerClock(max(latest.values(), default=-1))
        now_ms, window_ms = time.time_ns() // 1_000_000, self.window_intervals * self.interval_ms
        since = {number: latest.get(number, now_ms) - window_ms for number in partitions}
        starts = self._follower.offsets_for_times(
            name, {number: max(0, at) for number, at in since.items()}
        )
        for number, offset in sorted(starts.items()):
            first, self._ends[number] = bounds[number]
            start = self._ends[number] if offset < 0 else max(offset, first)
            self.open_log(number, None if start == 0 else since[number] / 1000)
            starts[number] = start
            if start < self._ends[number]:
                self._missing[number] = self._ends[number]
        self.is_ready = not self._missing
        self._follower.place({(name, number): start for number, start in starts.items()})
        self._topology_ms = monotonic_ms() + _TOPOLOGY_MS
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end; ``close`` waits for it."""
        self._is_stopping = True

    def close(self, timeout_s: float) -> None:
        """End all of it, in this order; what is claimed stays so until it goes stale. Idempotent.

        Services end before the writer, into which their threads answer. The log is not read on
        meanwhile: what they answer is written, but not read back.
        """
        self.stop()
        bound_s = min(timeout_s, 5.0)
        for end in self.services():
            end(bound_s)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        if self._producer is not None:
            self._producer.close(bound_s)
        if not self._thread.is_alive():
            if self._follower is not None:
                self._follower.close()
            self.on_stopped()
        self.admin.close()
        self.fail(StateError(f"this {self._owner} is closed"))

    def fail(self, error: KafkaMQError) -> None:
        """Nothing can be claimed any more: everything is lost."""
        with self.lock:
            if self.error is None:
                self.error = error
            self.on_failure()
            self.changed.notify_all()

    def refuse(self, error: KafkaMQError) -> None:
        """Fail if a right is missing, which no waiting mends; other errors pass."""
        if meaning(error) is Meaning.FORBIDDEN:
            # It would only try again.
            self._is_stopping = True
            self.fail(error)

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float, doing: str) -> None:
        """Wait for a condition; evaluated under the lock."""
        deadline_s = time.monotonic() + timeout_s
        with self.changed:
            while not is_so():
                self.check()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceededError(f"{doing} did not end within {timeout_s:g} s")
                self.changed.wait(min(left_s, 0.1))

    # ---- writing, under the lock

    def open_writer(self) -> IdempotentProducer:
        """Connect what writes, unless it is; who only reads needs no right to write."""
        with self.lock:
            if self._producer is None:
                patience_ms = max(1000, min(10_000, self.interval_ms // 2))
                settings = producer_settings(
                    self.config, message_timeout_ms=patience_ms, linger_ms=0
                )
                self._producer = IdempotentProducer(self.config, settings, owner=self._owner)
            return self._producer

    def append(self, partition: int, value: bytes, report: Callable[[int], None]) -> None:
        """Write a record; ``report`` is called with its offset, or -1 when that is not known."""
        headers = ((INTERVAL_HEADER, str(self.interval_ms).encode()),)
        mark = object()
        delivered = partial(self._delivered, report, mark)
        try:
            self.under_way.add(mark)
            self.open_writer().produce(self.topic.name, value, None, partition, headers, delivered)
        except (BrokerError, WireError) as error:
            self.under_way.discard(mark)
            _log.warning("a record of claims could not be sent", extra={"error": str(error)})
            report(-1)
        except BaseException:
            # An interrupt does not say whether the record was queued.
            self.under_way.discard(mark)
            raise

    def _delivered(
        self,
        report: Callable[[int], None],
        mark: object,
        error: KafkaError | None,
        message: Record,
    ) -> None:
        with self.lock:
            self.under_way.discard(mark)
            offset = message.offset()
            report(-1 if error is not None or offset is None else offset)
            if error is not None:
                _log.warning("a record of claims was not written", extra={"error": error.str()})
                self.refuse(broker_error(error, f"writing {self.topic.name}"))

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._step()
        except KafkaMQError as error:
            _log.error("claims end: %s", error)
            self.fail(error)
        except Exception as error:  # noqa: BLE001 - claims must not be believed without a reader
            _log.exception("claims end")
            self.fail(BrokerError(f"the claims' reader failed: {error!r}", is_fatal=True))

    def _step(self) -> None:
        assert self._follower is not None, "started"
        is_busy = self.under_way or not self.is_ready
        records = self._follower.poll(_BATCH, _BUSY_S if is_busy else _IDLE_S)
        self._follower.require_inside()
        if self._producer is not None:
            self._producer.serve(0)
        with self.lock:
            was_ready = self.is_ready
            self._fold(records, self._follower)
            if records or self.is_ready is not was_ready:
                self.changed.notify_all()
            self.turn(monotonic_ms())
        if monotonic_ms() >= self._topology_ms:
            self._topology_ms = monotonic_ms() + _TOPOLOGY_MS
            self._check_topology(self._follower)
        self.look_around()
        self.on_turn()

    def _fold(self, records: Sequence[Record], follower: Follower) -> None:
        reached: dict[int, int] = {}
        times: dict[int, int] = {}
        for message in records:
            number, offset = message.partition(), message.offset()
            assert number is not None, "records have a place"
            assert offset is not None, "records have a place"
            reached[number], times[number] = offset + 1, message.timestamp()[1]
            self.fold(message, number, offset, times[number])
        if self.topic.has_broker_time:
            # Only a log's present end was appended just now; what is read late is of the past.
            fresh = [
                times[number]
                for number, next_offset in reached.items()
                if next_offset
                >= max(follower.known_end((self.topic.name, number)), self._ends[number] + 1)
            ]
            if fresh:
                self.clock.saw(max(fresh))
        if self._missing:
            reached |= {number: offset for (_, number), offset in follower.ends.items()}
            self._missing = {
                number: end for number, end in self._missing.items() if reached.get(number, 0) < end
            }
            self.is_ready = not self._missing

    def _check_topology(self, follower: Follower) -> None:
        name, partitions = self.topic.name, self.topic.partitions
        count = -1
        try:
            count = follower.partition_count(name, timeout_s=2.0)
        except KafkaMQError as error:
            if meaning(error) is not Meaning.NO_TOPIC:
                return
        # No broker answers: leases end by themselves.
        # A broker that has just started may not know its topics yet.
        self._absences = self._absences + 1 if count < 0 else 0
        if self._absences >= _MAX_ABSENCES:
            raise BrokerError(
                f"coordination topic {name} is gone: all claims are given up; create it with"
                " `kafkamq claims init`",
                code="COORDINATION_TOPIC_GONE",
                is_fatal=True,
            )
        if count >= 0 and count != partitions:
            raise BrokerError(
                f"coordination topic {name} has {count} partitions, and had"
                f" {partitions}: a topic's claims may be in another one now, so all are given up;"
                " restart every client of the topic",
                code="COORDINATION_TOPIC_CHANGED",
                is_fatal=True,
            )


def interval_of(message: Record) -> int:
    """Return the heartbeat interval that a record's sender goes by, in ms; 0: it does not say."""
    value = dict(headers_of(message)).get(INTERVAL_HEADER)
    return int(value[:12]) if value is not None and value.isdigit() else 0
