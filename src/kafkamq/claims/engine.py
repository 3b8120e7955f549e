"""The claims of a process: folds the coordination log, and performs its claimants' steps."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kafkamq.claims.log_engine import LogEngine, interval_of
from kafkamq.claims.offset_service import OffsetAnswers, OffsetService
from kafkamq.claims.rules.claimant import Claimant
from kafkamq.claims.rules.log import ClaimLog
from kafkamq.claims.rules.steps import (
    ClaimantConfig,
    End,
    Fetch,
    Finish,
    HandOut,
    LookUp,
    Step,
    Stop,
    Write,
)
from kafkamq.claims.session import NEVER_MS, ClaimSession, Listener
from kafkamq.claims.topic import CoordinationTopic
from kafkamq.claims.wire.marshal import coordination_partition, decode_value, encode_value
from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError, WireError
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.record import Record
from kafkamq.types import MarshalRecord, MarshalType

_MAX_CLIENTS = 10_000
Ticker = Callable[[int, float], None]


@dataclass(slots=True)
class Stats:
    """What happened to the claims of a process."""

    won: int = 0
    takeovers: int = 0  # of these: from an owner that went silent
    lost: int = 0  # held ones that were taken, or may be
    ended: dict[End, int] = field(default_factory=dict)
    lateness_ms: int = 0  # of the last heartbeat
    max_lateness_ms: int = 0
    handed_out: int = 0
    redelivered: int = 0  # handed out though a former session of this process had them already


@dataclass(slots=True)
class ClientClock:
    """How far a client's clock is off, and what it takes for the interval."""

    skew_s: float = 0.0  # the time it wrote minus the broker's
    interval_ms: int = 0  # 0: it did not say
    instance: str = ""
    records: int = 0


class CoordinationLog:
    """The world state of all coordination partitions.

    Attributes:
        logs: The state of each coordination partition under the rules in use.
        peers: The same under the Go clients' rules; empty unless they take part.
        clients: By group and client: what its records tell of its clock.
        reasons: How often records were malformed, by reason.
        other_intervals: By group and client: intervals that are not ours.
    """

    def __init__(self, *, rules: str, has_broker_time: bool, interval_ms: int) -> None:
        """``rules`` is ``safe`` or ``peer``; there is no log before ``open``."""
        self.logs: list[ClaimLog] = []
        self.peers: list[ClaimLog] = []
        self.clients: dict[tuple[str, str], ClientClock] = {}
        self.reasons: Counter[str] = Counter()
        self.other_intervals: dict[tuple[str, str], int] = {}
        self._rules = rules
        self._has_broker_time = has_broker_time
        self._interval_ms = interval_ms

    @property
    def bad_records(self) -> int:
        """Records that were malformed, or of impossible partitions."""
        return sum(log.malformed + log.impossible for log in self.logs)

    def open(self, since_s: float | None) -> None:
        """Add the next partition, of which all records since then will be applied."""
        interval_s = self._interval_ms / 1000
        if self._has_broker_time:
            self.logs.append(ClaimLog("safe", interval_s, since_s=since_s))
        else:
            self.logs.append(ClaimLog("peer", interval_s))
        if self._rules == "peer":
            self.peers.append(ClaimLog("peer", interval_s))

    def apply(self, message: Record, number: int, at: int, time_ms: int) -> MarshalRecord | None:
        """Fold one record; None: it could not be decoded."""
        record = None
        try:
            record = decode_value(message.value())
        except WireError as error:
            self.reasons[error.reason] += 1
        observed_s, time_s = time.time(), time_ms / 1000
        self.logs[number].apply(record, offset=at, observed_at_s=observed_s, broker_time_s=time_s)
        if self.peers:
            peer = self.peers[number]
            peer.apply(record, offset=at, observed_at_s=observed_s, broker_time_s=time_s)
        if record is not None:
            self._meet(record, time_ms, message)
        return record

    def check_intervals(self, group: str) -> None:
        """Refuse a group whose members do not agree on the interval."""
        for (of_group, client), other_ms in self.other_intervals.items():
            if of_group == group:
                raise ConfigError(
                    f"heartbeat_interval is {self._interval_ms / 1000:g} s here and"
                    f" {other_ms / 1000:g} s for client {client} of group {group}: all clients of"
                    " a coordination topic must agree, or claims end too early; use another"
                    " coordination topic for another interval"
                )

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
            self.other_intervals[key] = interval_ms


class Engine(LogEngine):
    """Runs the claimants of one cluster object."""

    def __init__(
        self, config: ServiceConfig, topic: CoordinationTopic, *, rules: str, interval_ms: int
    ) -> None:
        super().__init__(config, topic, interval_ms=interval_ms, owner="Cluster")
        self.log = CoordinationLog(
            rules=rules, has_broker_time=topic.has_broker_time, interval_ms=interval_ms
        )
        self.stats = Stats()
        self._answers = OffsetAnswers(self._found, self._not_found, self._committed, self.refuse)
        self._offsets: dict[str, OffsetService] = {}  # by group
        self._sessions: dict[ClaimSession, None] = {}  # in a fixed order
        self._dirty: dict[ClaimSession, None] = {}
        self._by_place: dict[tuple[str, str, int], ClaimSession] = {}
        self._tickers: list[Ticker] = []
        self._overdue: dict[tuple[ClaimSession, int], tuple[int, Write]] = {}

    def services(self) -> list[Callable[[float], object]]:
        return [service.close for service in self._offsets.values()]

    # ---- what members use, under the lock

    def partition_of(self, topic: str) -> int:
        return coordination_partition(topic, self.topic.partitions)

    def now_s(self) -> float:
        """The broker's time, late by what a record takes to arrive."""
        return self.clock.now_s()

    def offsets_of(self, group: str) -> OffsetService:
        """The group's offsets; the first call makes a client and threads, and takes a while."""
        if group not in self._offsets:
            self._offsets[group] = OffsetService(self.config, self.admin, group, self._answers)
        return self._offsets[group]

    def attempt(
        self, config: ClaimantConfig, listener: Listener, *, is_fenced: bool
    ) -> ClaimSession:
        """A claimant that has written nothing yet."""
        number = self.partition_of(config.topic)
        peers = self.log.peers[number] if self.log.peers else None
        claimant = Claimant(self.log.logs[number], config, peers=peers)
        fence = None
        if is_fenced:
            fence = self.offsets_of(config.group).fence(config.topic, config.partition)
        return ClaimSession(claimant, number, listener, fence)

    def add(self, session: ClaimSession) -> None:
        """Drive a claimant from now on, until it is over."""
        config = session.claimant.config
        self._sessions[session] = None
        self._by_place[config.group, config.topic, config.partition] = session
        self.drive(session)

    def held_ages(self) -> dict[tuple[str, ...], float]:
        """Seconds since the last heartbeat of what is held, by group, topic and partition."""
        with self.lock:
            now_s = self.clock.now_s()
            found: dict[tuple[str, ...], float] = {}
            for (group, topic, partition), session in self._by_place.items():
                if session.start is not None:
                    log = self.log.logs[session.coordination_partition]
                    claim = log.claim(group, topic, partition, now_s=now_s)
                    found[group, topic, str(partition)] = max(0.0, claim.age_s)
            return found

    def add_ticker(self, ticker: Ticker) -> None:
        """Call it at every turn, with the lease clock and the broker's time."""
        self._tickers.append(ticker)

    def remove_ticker(self, ticker: Ticker) -> None:
        if ticker in self._tickers:
            self._tickers.remove(ticker)

    def drive(self, session: ClaimSession) -> None:
        """Plan and perform what a claimant has to do now."""
        self._dirty.pop(session, None)
        claimant = session.claimant
        steps = claimant.plan(
            monotonic_ms(),
            self.clock.now_s(),
            random_unit=random.random(),
            wall_s=time.time(),
        )
        for step in steps:
            self.perform(session, step)
        if self.stats.lateness_ms != claimant.lateness_ms:
            self.stats.lateness_ms = claimant.lateness_ms
            self.stats.max_lateness_ms = max(self.stats.max_lateness_ms, claimant.lateness_ms)
        wake_ms = claimant.wake_ms()
        session.wake_ms = NEVER_MS if wake_ms is None else wake_ms

    def perform(self, session: ClaimSession, step: Step) -> None:
        if isinstance(step, Write):
            self._write(session, step)
        elif isinstance(step, LookUp):
            self._service_of(session).lookups.put(session)
        elif isinstance(step, Fetch):
            session.start = step
            self.stats.won += 1
            self.stats.takeovers += session.is_takeover
            session.listener.on_fetch(session, step)
        elif isinstance(step, HandOut):
            session.listener.on_hand_out(session, step)
        elif isinstance(step, Stop):
            self.stats.lost += step.is_lost
            session.listener.on_stop(session, step)
        else:
            self._finish(session, step)
        self.changed.notify_all()

    def send(self, partition: int, record: MarshalRecord, report: Callable[[int], None]) -> None:
        """Append a record; ``report`` is called with its offset, or -1 when that is not known."""
        self.append(partition, encode_value(record), report)

    def on_failure(self) -> None:
        for session in list(self._sessions):
            session.listener.on_stop(session, Stop(End.UNCERTAIN, is_lost=True))
            self._finish(session, Finish(End.UNCERTAIN, session.claimant.position))

    # ---- the thread

    def open_log(self, partition: int, since_s: float | None) -> None:
        self.log.open(since_s)

    def fold(self, message: Record, partition: int, offset: int, broker_ms: int) -> None:
        record = self.log.apply(message, partition, offset, broker_ms)
        if record is None:
            return
        if not record.topic:  # ReleaseGroup
            group = record.group
            self._dirty |= {t: None for t in self._sessions if t.claimant.config.group == group}
            return
        session = self._by_place.get((record.group, record.topic, record.partition))
        if session is not None:
            self._dirty[session] = None

    def turn(self, now_ms: int) -> None:
        self._skip_overdue(now_ms)
        due = [t for t in self._sessions if t in self._dirty or t.wake_ms <= now_ms]
        for session in due:
            if session in self._sessions:
                self.drive(session)
        if self.is_ready:
            for ticker in list(self._tickers):
                ticker(now_ms, self.clock.now_s())

    def _service_of(self, session: ClaimSession) -> OffsetService:
        return self._offsets[session.claimant.config.group]

    # ---- writing

    def _write(self, session: ClaimSession, step: Write) -> None:
        if step.commit_offset < 0 and not session.open_commits:
            self._produce(session, step)
            return
        session.open_commits += 1
        if not step.must_commit:
            patience_ms = min(2000, session.claimant.config.lease_ms // 4)
            self._overdue[session, step.ticket] = (monotonic_ms() + patience_ms, step)
        self._service_of(session).commits.put((session, step))

    def _skip_overdue(self, now_ms: int) -> None:
        """Heartbeats do not wait forever for offsets that are committed as well."""
        late = [key for key, (due_ms, _) in self._overdue.items() if due_ms <= now_ms]
        for session, ticket in late:
            _, step = self._overdue[session, ticket]
            self._after_commit(session, step, is_committed=False)

    def _after_commit(self, session: ClaimSession, step: Write, *, is_committed: bool) -> None:
        key = (session, step.ticket)
        if not step.must_commit and self._overdue.pop(key, None) is None:
            return  # it was overdue, and is long written
        session.open_commits -= 1
        if is_committed or not step.must_commit:
            self._produce(session, step)
        else:
            session.claimant.on_failed(step.ticket, monotonic_ms())
        if session.fence is not None and not session.fence.is_usable:
            session.claimant.release(monotonic_ms(), reason=End.FENCED)
        self.plan_soon(session)

    def _produce(self, session: ClaimSession, step: Write) -> None:
        def report(offset: int) -> None:
            if offset < 0:
                session.claimant.on_failed(step.ticket, monotonic_ms())
            else:
                session.claimant.on_written(step.ticket, offset)
            self.plan_soon(session)

        self.send(session.coordination_partition, step.record, report)

    def plan_soon(self, session: ClaimSession) -> None:
        if session in self._sessions:  # a change of positions drives its own
            self._dirty[session] = None

    # ---- answers of the offset service, from its threads

    def _found(self, session: ClaimSession, earliest: int, latest: int, committed: int) -> None:
        with self.lock:
            session.listener.on_offsets(session, earliest, latest, committed)
            self._drive_if_ours(session)

    def _not_found(self, session: ClaimSession) -> None:
        with self.lock:
            session.claimant.on_lookup_failed(monotonic_ms())
            self._drive_if_ours(session)

    def _committed(self, session: ClaimSession, step: Write, is_committed: bool) -> None:
        with self.lock:
            self._after_commit(session, step, is_committed=is_committed)
            self._drive_if_ours(session)

    def _drive_if_ours(self, session: ClaimSession) -> None:
        if session in self._sessions:
            self.drive(session)
        else:
            self._dirty.pop(session, None)

    def _finish(self, session: ClaimSession, step: Finish) -> None:
        config = session.claimant.config
        self._sessions.pop(session, None)
        self._dirty.pop(session, None)
        self.stats.ended[step.reason] = self.stats.ended.get(step.reason, 0) + 1
        key = (config.group, config.topic, config.partition)
        if self._by_place.get(key) is session:
            del self._by_place[key]
        if session.fence is not None:
            self._service_of(session).end(session.fence)
        session.listener.on_finish(session, step)
