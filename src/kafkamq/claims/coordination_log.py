"""Reads the coordination topic, from three intervals back on, into one ``ClaimLog`` per partition.

Where to begin is told by the log itself: three heartbeat intervals before its *last* record, by the
broker's time. So neither the process's clock nor the number of records matters. What was written
before is not needed: who holds a partition has written since, and a free one's position is also the
group's committed offset.

The reader is ``read_uncommitted``, as Go clients are: everybody must see the same records, and a
transaction that somebody leaves open in the topic must not hold the claims back.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kafkamq.claims.broker_clock import BrokerClock
from kafkamq.claims.log_start import find_starts
from kafkamq.claims.rules.log import ClaimLog
from kafkamq.claims.topic import CoordinationTopic
from kafkamq.claims.wire.marshal import decode_value
from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, ConfigError, KafkaMQError, WireError
from kafkamq.transport.admin import Admin
from kafkamq.transport.errors import Meaning, is_retriable, meaning
from kafkamq.transport.follower import Follower
from kafkamq.transport.record import Record, headers_of
from kafkamq.types import MarshalRecord, MarshalType

INTERVAL_HEADER = "kafkamq-interval-ms"
"""What the sender takes for the heartbeat interval; Go clients write none (60 s)."""

WINDOW_INTERVALS = 3  # an owner is heard twice within two; the third is for jumps of the clock
_BATCH = 5000
_MAX_ABSENCES = 4  # then the topic is gone, and not only unknown to a broker
_MAX_CLIENTS = 10_000

Place = tuple[str, str, int]
"""Group, topic, partition."""


@dataclass(slots=True)
class ClientClock:
    """How far a client's clock is off, and what it takes for the interval."""

    skew_s: float = 0.0  # the time it wrote minus the broker's
    interval_ms: int = 0  # 0: it did not say
    instance: str = ""
    records: int = 0


class CoordinationLog:
    """The world state of all coordination partitions; the caller serialises ``poll``."""

    def __init__(
        self, config: ServiceConfig, topic: CoordinationTopic, *, rules: str, interval_ms: int
    ) -> None:
        """Nothing is read before ``start``; ``rules`` is ``safe`` or ``peer``."""
        self.topic = topic
        # The state of each coordination partition under the rules in use.
        self.logs: list[ClaimLog] = []
        # The same under the Go clients' rules; empty unless they take part.
        self.peers: list[ClaimLog] = []
        # By group and client: what its records tell of its clock.
        self.clients: dict[tuple[str, str], ClientClock] = {}
        self.reasons: Counter[str] = Counter()  # how often records were malformed, by reason
        # By group and client: intervals that are not ours.
        self.foreign_intervals: dict[tuple[str, str], int] = {}
        self.clock = BrokerClock()
        self._config = config
        self._rules = rules
        self._interval_ms = interval_ms
        self._follower: Follower | None = None
        self._absences = 0
        self._missing: dict[int, int] = {}  # partition -> the end that was there at the start
        self._ends: dict[int, int] = {}  # the same, forever

    @property
    def bad_records(self) -> int:
        """Malformed ones, and those of impossible partitions."""
        return sum(log.malformed + log.impossible for log in self.logs)

    @property
    def is_caught_up(self) -> bool:
        """Everything that was there at the start is read."""
        return not self._missing

    def start(self, admin: Admin) -> None:
        """Find out where to begin, and begin."""
        self._follower = follower = Follower(
            self._config,
            f"reading {self.topic.name}",
            ignores=partial(is_retriable, or_missing=True),
            isolation_level="read_uncommitted",
            enable_partition_eof=True,
            queued_min_messages=100_000,
        )
        window_ms = WINDOW_INTERVALS * self._interval_ms
        begin = find_starts(admin, follower, self.topic, window_ms=window_ms)
        self.clock = BrokerClock(begin.latest_ms)
        self._ends = begin.ends
        interval_s = self._interval_ms / 1000
        for number, (start, since_s) in begin.starts.items():
            if self.topic.has_broker_time:
                self.logs.append(ClaimLog("safe", interval_s, since_s=since_s))
            else:
                self.logs.append(ClaimLog("peer", interval_s))
            if self._rules == "peer":
                self.peers.append(ClaimLog("peer", interval_s))
            if start < begin.ends[number]:
                self._missing[number] = begin.ends[number]
        follower.place(
            {(self.topic.name, number): start for number, (start, _) in begin.starts.items()}
        )

    def poll(self, timeout_s: float) -> Sequence[Record]:
        """Records that came in time, for ``fold``, which is to be called also if there are none."""
        assert self._follower is not None, "started"
        records = self._follower.poll(_BATCH, timeout_s)
        self._follower.require_inside()
        return records

    def fold(self, records: Iterable[Record]) -> list[MarshalRecord]:
        """Apply what ``poll`` gave; those that could be decoded."""
        assert self._follower is not None, "started"
        observed_s = time.time()
        found = []
        newest: dict[int, tuple[int, int]] = {}  # by partition: offset and time of the last record
        for message in records:
            number, offset = message.partition(), message.offset()
            assert number is not None, "records have a place"
            assert offset is not None, "records have a place"
            time_ms = message.timestamp()[1]
            newest[number] = (offset, time_ms)
            record = self._decode(message)
            logs = (self.logs[number], self.peers[number]) if self.peers else (self.logs[number],)
            for log in logs:
                log.apply(
                    record, offset=offset, observed_at_s=observed_s, broker_time_s=time_ms / 1000
                )
            if record is not None:
                found.append(record)
                self._meet(record, time_ms, message)
        if self._missing:
            reached = {number: offset + 1 for number, (offset, _) in newest.items()}
            reached |= {number: offset for (_, number), offset in self._follower.ends.items()}
            for number, offset in reached.items():
                if self._missing.get(number, 1 << 62) <= offset:
                    del self._missing[number]
        if self.topic.has_broker_time:
            self._tell_time(newest)
        return found

    def _tell_time(self, newest: Mapping[int, tuple[int, int]]) -> None:
        """Only a log's present end was appended just now; what is read late is of the past."""
        assert self._follower is not None, "started"
        fresh_ms = -1
        for number, (offset, time_ms) in newest.items():
            end = self._follower.known_end((self.topic.name, number))
            if offset + 1 >= max(end, self._ends[number] + 1):
                fresh_ms = max(fresh_ms, time_ms)
        if fresh_ms >= 0:
            self.clock.saw(fresh_ms)

    def check_topology(self) -> None:
        """See that the topic is as it was; as ``poll``, by one thread at a time."""
        assert self._follower is not None, "started"
        name, partitions = self.topic.name, self.topic.partitions
        count = -1
        try:
            count = self._follower.partition_count(name, timeout_s=2.0)
        except KafkaMQError as error:
            if meaning(error) is not Meaning.NO_TOPIC:
                return  # no broker answers: leases end by themselves
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

    def close(self) -> None:
        if self._follower is not None:
            self._follower.close()

    def _decode(self, message: Record) -> MarshalRecord | None:
        try:
            return decode_value(message.value())
        except WireError as error:
            self.reasons[error.reason] += 1
            return None

    def _meet(self, record: MarshalRecord, broker_ms: int, message: Record) -> None:
        key = (record.group, record.client)
        client = self.clients.get(key)
        if client is None:
            if len(self.clients) >= _MAX_CLIENTS:
                self.clients.pop(next(iter(self.clients)))
            client = self.clients[key] = ClientClock()
        client.skew_s = record.time_s - broker_ms / 1000
        client.records += 1
        if record.instance == client.instance:
            return
        client.instance = record.instance
        client.interval_ms = interval_ms = interval_of(message)
        is_member = record.type is not MarshalType.RELEASE_GROUP
        if interval_ms and interval_ms != self._interval_ms and is_member:
            self.foreign_intervals[key] = interval_ms


def interval_of(message: Record) -> int:
    """What its sender goes by, in ms; 0: it does not say."""
    value = dict(headers_of(message)).get(INTERVAL_HEADER)
    return int(value[:12]) if value is not None and value.isdigit() else 0


def check_intervals(log: CoordinationLog, group: str, interval_ms: int) -> None:
    """Refuse a group whose members do not agree on the interval."""
    for (of_group, client), other_ms in log.foreign_intervals.items():
        if of_group == group:
            raise ConfigError(
                f"heartbeat_interval is {interval_ms / 1000:g} s here and {other_ms / 1000:g} s for"
                f" client {client} of group {group}: all clients of a coordination topic must"
                " agree, or claims end too early; use another coordination topic for another"
                " interval"
            )
