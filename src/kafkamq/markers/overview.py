"""What an operator is told of a namespace: its state, what ``doctor`` finds, its queues.

Offsets alone do not count messages (R24): each transaction leaves a control record behind, which
nobody reads. So topics that are small enough are read; of the others numbers are upper bounds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass

from kafkamq.config import Options, ServiceConfig
from kafkamq.errors import BrokerError, ConfigError, DeadlineExceededError, WireError
from kafkamq.markers.membership import broker_session_problems, session_problem
from kafkamq.markers.tracker.records import StatusReader
from kafkamq.markers.wire.interop import CONSUMER_GROUP_PREFIX
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.markers.wire.records import TrackerStatus
from kafkamq.queue.names import group_of
from kafkamq.queue.topics import FOREIGN_TRACKER_GROUP, check_topics
from kafkamq.queue.wire.keys import split_key
from kafkamq.transport.admin import Admin, ClusterInfo, require_brokers
from kafkamq.transport.broker_release import broker_release
from kafkamq.transport.errors import Meaning, meaning
from kafkamq.transport.log_reader import scan
from kafkamq.transport.record import Record

MAX_SCANNED = 100_000
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBacklog:
    queue_id: str
    # Messages of all queues behind its position, or an upper bound where they are not counted.
    behind: int
    # Its own among them; None: they are not counted, as there are too many to read.
    waiting: int | None
    members: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkerPartition:
    """A marker partition and what its tracker last said of it; None: no tracker has, yet."""

    partition: int
    end: int
    status: TrackerStatus | None

    @property
    def lag(self) -> int | None:
        return None if self.status is None else max(0, self.end - self.status.position)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    queues: tuple[QueueBacklog, ...]
    markers: tuple[MarkerPartition, ...]
    # What retention has left of the messages topic, or an upper bound where it is not counted.
    messages: int
    messages_counted: bool
    dead_letters: int
    dead_letters_counted: bool


def overview(config: ServiceConfig, *, max_scanned: int = MAX_SCANNED) -> Overview:
    """Asks the cluster; counts by reading at most ``max_scanned`` records of a topic.

    Raises:
        BrokerError: A topic does not exist, or the broker refuses.
        DeadlineExceededError: No broker answers.
    """
    with Admin(config, timeout_s=TIMEOUT_S) as admin:
        bounds = _bounds(admin, config.message_topic)
        marker_bounds = _bounds(admin, config.marker_topic)
        dead = _bounds(admin, config.dead_letter_topic)
        groups = _groups(admin, config)
        positions = _positions(admin, config, bounds, groups)
        members = {
            queue_id: sum(
                len(admin.group_assignments(group))
                for group, served in groups.items()
                if served == queue_id
            )
            for queue_id in positions
        }
    backlog = _read_backlog(config, bounds, positions, max_scanned)
    letters = config.dead_letter_topic
    dead_letters = _read(config, letters, _firsts(dead), dead, max_scanned, lambda _: None)
    known = sorted({*positions, *(() if backlog is None else backlog.waiting)})
    with closing(StatusReader(config)) as reader:
        statuses = reader.read_to_end()
    return Overview(
        queues=tuple(
            QueueBacklog(
                queue_id=queue_id,
                behind=(
                    _distance(bounds, positions.get(queue_id, {}))
                    if backlog is None
                    else backlog.behind(positions.get(queue_id, {}))
                ),
                waiting=None if backlog is None else backlog.waiting[queue_id],
                members=members.get(queue_id, 0),
            )
            for queue_id in known
        ),
        markers=tuple(
            MarkerPartition(
                partition=partition,
                end=end,
                status=statuses.get((config.marker_topic, partition)),
            )
            for partition, (_, end) in sorted(marker_bounds.items())
        ),
        messages=(
            backlog.behind({}) if backlog is not None and backlog.is_whole else _distance(bounds)
        ),
        messages_counted=backlog is not None and backlog.is_whole,
        dead_letters=_distance(dead) if dead_letters is None else dead_letters,
        dead_letters_counted=dead_letters is not None,
    )


_Bounds = Mapping[int, tuple[int, int]]
_Positions = dict[str, dict[int, int]]


def _bounds(admin: Admin, topic: str) -> dict[int, tuple[int, int]]:
    return admin.log_bounds(topic, range(admin.require_topic(topic).partitions))


def _groups(admin: Admin, config: ServiceConfig) -> dict[str, str]:
    """Return groups of workers, whose they are, and queues: kafka-mq-go's first, then ours."""
    listed = admin.wait(admin.client.list_consumer_groups(), "listing groups").valid or []
    names = [group.group_id for group in listed if group.group_id != FOREIGN_TRACKER_GROUP]
    return {
        name: name.removeprefix(prefix)
        for prefix in (CONSUMER_GROUP_PREFIX, group_of(config, ""))
        for name in names
        if name.startswith(prefix)
    }


def doubled_queues(config: ServiceConfig) -> tuple[str, ...]:
    """Queues on which kafka-mq-go's workers and ours have worked in groups of their own.

    Raises:
        BrokerError, DeadlineExceededError: As ``overview``.
    """
    with Admin(config, timeout_s=TIMEOUT_S) as admin:
        bounds = _bounds(admin, config.message_topic)
        groups = _groups(admin, config)
        theirs = {name: of for name, of in groups.items() if name.startswith(CONSUMER_GROUP_PREFIX)}
        ours = {name: of for name, of in groups.items() if name not in theirs}
        served = [set(_positions(admin, config, bounds, each)) for each in (theirs, ours)]
    return tuple(sorted(served[0] & served[1]))


def _positions(
    admin: Admin, config: ServiceConfig, bounds: _Bounds, groups: Mapping[str, str]
) -> _Positions:
    """Committed positions by queue, of every group that has one in this messages topic.

    Where kafka-mq-go's workers and ours have one each, both get everything: ours is shown.
    """
    asked = [(group, (config.message_topic, partition)) for group in groups for partition in bounds]
    found: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for (group, _), place in zip(asked, admin.committed(asked), strict=True):
        if place.offset >= 0:
            found[groups[group]][place.partition] = place.offset
    return {
        queue_id: {
            partition: places.get(partition, start) for partition, (start, _) in bounds.items()
        }
        for queue_id, places in found.items()
    }


def _distance(bounds: _Bounds, positions: Mapping[int, int] | None = None) -> int:
    """Return offsets up to the ends: of messages, and of control records."""
    places = positions or {}
    return sum(
        max(0, end - max(start, places.get(partition, start)))
        for partition, (start, end) in bounds.items()
    )


def _firsts(bounds: _Bounds) -> dict[int, int]:
    return {partition: start for partition, (start, _) in bounds.items()}


class _Backlog:
    def __init__(self, positions: _Positions, *, is_whole: bool) -> None:
        self._positions = positions
        self.is_whole = is_whole
        self.waiting: Counter[str] = Counter()
        self._offsets: defaultdict[int, list[int]] = defaultdict(list)

    def add(self, record: Record) -> None:
        partition, offset = record.partition() or 0, record.offset() or 0
        self._offsets[partition].append(offset)
        queue_id = split_key(record.key())[0].decode("utf-8", "replace")
        position = self._positions.get(queue_id, {}).get(partition, 0)
        self.waiting[queue_id] += offset >= position

    def behind(self, positions: Mapping[int, int]) -> int:
        """Return messages of all queues from these positions on."""
        return sum(
            len(offsets) - bisect_left(offsets, positions.get(partition, 0))
            for partition, offsets in self._offsets.items()
        )


def _read_backlog(
    config: ServiceConfig, bounds: _Bounds, positions: _Positions, max_scanned: int
) -> _Backlog | None:
    """Return the messages behind the queues' positions; None: there are too many to read.

    Queues that nobody has received from yet are found when the whole topic may be read; in a longer
    one only what lies behind the first position is.
    """
    whole = _firsts(bounds)
    behind = {
        partition: min(
            (max(start, places[partition]) for places in positions.values()), default=start
        )
        for partition, start in whole.items()
    }
    for starts in (whole, behind):
        backlog = _Backlog(positions, is_whole=starts is whole)
        topic = config.message_topic
        if _read(config, topic, starts, bounds, max_scanned, backlog.add) is not None:
            return backlog
    return None


def _read(
    config: ServiceConfig,
    topic: str,
    starts: Mapping[int, int],
    bounds: _Bounds,
    max_scanned: int,
    visit: Callable[[Record], None],
) -> int | None:
    """Return how many records there are from ``starts`` on, each shown to ``visit``.

    None: too many to read, or retention moved on meanwhile.
    """
    if _distance(bounds, starts) > max_scanned:
        return None
    count = 0
    try:
        for record in scan(config, topic, starts):
            visit(record)
            count += 1
    except BrokerError as error:
        if meaning(error) is not Meaning.OUTSIDE_LOG:
            raise
        return None
    return count


_CHECK_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report; ``level`` is ok, warn or refuse."""

    level: str
    what: str
    text: str


def cluster_checks(
    config: ServiceConfig,
    *,
    max_lease_ms: int = Options.max_lease.default_ms,
    redelivery_timeout_ms: int = Options.redelivery_timeout.default_ms,
) -> Iterator[Check]:
    """Yield one check after another; what cannot be asked is a refusal that ends them."""
    try:
        require_brokers(config)
        with Admin(config, timeout_s=_CHECK_TIMEOUT_S) as admin:
            cluster = admin.cluster()
        brokers = ", ".join(cluster.brokers.values())
        yield Check("ok", "brokers", f"{len(cluster.brokers)} ({brokers})")
        yield Check("ok", "kafka", kafka_version(config, cluster))
        findings = check_topics(config, max_lease_ms=max_lease_ms, timeout_s=_CHECK_TIMEOUT_S)
        # How soon the group of a queue notices that a worker is dead.
        problems = [session_problem(config, redelivery_timeout_ms)]
        problems += broker_session_problems(config, cluster.settings, redelivery_timeout_ms)
        for problem in filter(None, problems):
            yield Check("warn", "sessions", problem)
        yield from _messages(config, cluster, max_lease_ms)
    except (BrokerError, ConfigError, DeadlineExceededError) as error:
        yield Check("refuse", "cluster", str(error))
        return
    for finding in findings:
        yield Check(finding.level, finding.topic or "cluster", finding.text)
    if not findings:
        yield Check("ok", "topics", f"those of namespace {config.namespace} are as they should be")


def _messages(config: ServiceConfig, cluster: ClusterInfo, max_lease_ms: int) -> Iterator[Check]:
    """Yield what depends on how long messages and groups are kept, and who works on queues."""
    with Admin(config, timeout_s=_CHECK_TIMEOUT_S) as admin:
        messages = admin.topics([config.message_topic]).get(config.message_topic)
    if messages is None:
        return
    retention_ms = messages.retention_ms
    if not messages.topic_id:
        text = "no markers can be batched: the brokers tell no ids of topics (Kafka before 2.8)"
        yield Check("warn", "batches", text)
    elif 0 <= retention_ms <= 2 * max_lease_ms:  # R28
        yield Check(
            "warn",
            "batches",
            f"no markers can be batched: {messages.name} keeps messages for {retention_ms} ms, "
            f"so none outlives a lease of {max_lease_ms} ms by far; set retention.ms to more than "
            f"{2 * max_lease_ms}, or the max_lease of the queues lower",
        )
    kept_min = int(cluster.settings.get("offsets.retention.minutes", "10080"))
    if not 0 <= retention_ms <= kept_min * 60_000:
        yield Check(
            "warn",
            "groups",
            f"offsets.retention.minutes is {kept_min}, messages are kept for longer: queues of the "
            "markers backend have their positions in the ledger, other groups that are empty for "
            "so long begin again; raise it",
        )
    for queue_id in doubled_queues(config):
        yield Check(
            "warn",
            "groups",
            f"kafka-mq-go's workers and kafkamq's both work on queue {queue_id!r}, each in a group "
            f"of its own: each gets every message; open it with group='kafka-mq-{queue_id}', or "
            "delete the group that is left over",
        )


def kafka_version(config: ServiceConfig, cluster: ClusterInfo) -> str:
    """Return the release of one broker; where it does not tell, what its settings give away."""
    for address in cluster.brokers.values():
        release = broker_release(config, address)
        if release is not None:
            return release
    # The setting is gone in Kafka 4.
    return cluster.settings.get("inter.broker.protocol.version", "4.0 or newer")


MAX_READ = 100_000


class QueueSearch:
    """Looks for a queue by its group, its messages and its delayed messages; commits nothing.

    A context manager. Every method raises ``BrokerError`` or ``DeadlineExceededError``.
    """

    def __init__(self, config: ServiceConfig, queue_id: str, group: str) -> None:
        self._config = config
        self._queue_id = queue_id
        self._group = group
        self._next: dict[tuple[str, int], int] = {}
        self._seen: set[str] = set()
        self._admin = Admin(config, timeout_s=TIMEOUT_S)

    def __enter__(self) -> QueueSearch:
        return self

    def __exit__(self, *_: object) -> None:
        self._admin.close()

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(sorted(self._seen))

    def is_used(self) -> bool:
        """Return whether it has a group, a message or a marker, or there is too much to read."""
        return (
            self._group in self._admin.groups()
            or self.has_new_message()
            or self._is_in(self._config.marker_topic, _queue_of_marker)
        )

    def has_new_message(self) -> bool:
        """Return whether a message of it came since this was asked last; the first time: ever."""
        return self._is_in(self._config.message_topic, _queue_of_message)

    def _is_in(self, topic: str, queue_of: Callable[[Record], str]) -> bool:
        count = self._admin.require_topic(topic).partitions
        bounds = self._admin.log_bounds(topic, range(count))
        starts = {
            partition: max(first, self._next.get((topic, partition), 0))
            for partition, (first, _) in bounds.items()
        }
        left = {part: bounds[part][1] - start for part, start in starts.items()}
        if sum(left.values()) > MAX_READ:
            return True
        behind = {part: start for part, start in starts.items() if left[part] > 0}
        with closing(scan(self._config, topic, behind)) as records:
            for record in records:
                found = queue_of(record)
                if found == self._queue_id:
                    return True
                if found:
                    self._seen.add(found)
        self._next |= {(topic, part): end for part, (_, end) in bounds.items()}
        return False


def _queue_of_message(record: Record) -> str:
    return split_key(record.key())[0].decode("utf-8", "replace")


def _queue_of_marker(record: Record) -> str:
    """Empty for those that name none; a START or a SCHEDULE does."""
    with suppress(WireError):
        return split_key(decode_marker(record.value()).key)[0].decode("utf-8", "replace")
    return ""
