"""Drives the claims of a process: reads the log, decides, performs their steps.

One thread owns the log's reader. Everything else happens under one lock, in whatever thread has
news: what an application's thread asks for is planned and sent at once, not at the next turn.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kafkamq.claims.broker_clock import lease_clock_ms
from kafkamq.claims.coordination_log import INTERVAL_HEADER, CoordinationLog
from kafkamq.claims.offset_service import GroupOffsetService, OffsetAnswers, OffsetService
from kafkamq.claims.rules.steps import End, Fetch, Finish, HandOut, LookUp, Step, Stop, Write
from kafkamq.claims.session import NEVER_MS, ClaimSession
from kafkamq.claims.topic import CoordinationTopic
from kafkamq.claims.wire.marshal import coordination_partition, encode_value
from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DeadlineExceededError, KafkaMQError, StateError, WireError
from kafkamq.transport.admin import Admin
from kafkamq.transport.errors import KafkaError, Meaning, broker_error, meaning
from kafkamq.transport.producer import IdempotentProducer
from kafkamq.transport.record import Record
from kafkamq.transport.settings import producer_settings
from kafkamq.types import MarshalRecord

_log = logging.getLogger(__name__)
_BUSY_S = 0.002  # a write is under way: its report may come after its record
_IDLE_S = 0.05
_TOPOLOGY_MS = 5000
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


class Engine:
    """Runs the claimants of one cluster object."""

    def __init__(
        self, config: ServiceConfig, topic: CoordinationTopic, *, rules: str, interval_ms: int
    ) -> None:
        self.config = config
        self.topic = topic
        self.rules = rules
        self.interval_ms = interval_ms
        self.lock = threading.RLock()  # guards the log's state and every claimant
        # Notified when an application's thread may have something to do.
        self.changed = threading.Condition(self.lock)
        self.on_turn: Callable[[], None] = lambda: None  # called after each turn of its loop
        self.error: KafkaMQError | None = None  # why nothing can be claimed any more
        self.log = CoordinationLog(config, topic, rules=rules, interval_ms=interval_ms)
        self.stats = Stats()
        self.admin = Admin(config, timeout_s=15.0)
        self.offset_service = OffsetService(
            config,
            self.admin,
            OffsetAnswers(self._found, self._not_found, self._committed, self.refuse),
        )
        self._producer: IdempotentProducer | None = None
        self._sessions: dict[ClaimSession, None] = {}  # in a fixed order
        self._dirty: dict[ClaimSession, None] = {}
        self._by_place: dict[tuple[str, str, int], ClaimSession] = {}
        self._tickers: list[Ticker] = []
        self._under_way = 0  # writes without a report
        self._overdue: dict[tuple[ClaimSession, int], tuple[int, Write]] = {}
        self._topology_ms = 0
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kafkamq-claims", daemon=True)

    # ---- life

    def start(self) -> None:
        self.log.start(self.admin)
        self._topology_ms = lease_clock_ms() + _TOPOLOGY_MS
        self._thread.start()

    def open_writer(self) -> IdempotentProducer:
        """Connect what writes, unless it is; who only reads needs no right to write."""
        with self.lock:
            if self._producer is None:
                patience_ms = max(1000, min(10_000, self.interval_ms // 2))
                settings = producer_settings(
                    self.config, message_timeout_ms=patience_ms, linger_ms=0
                )
                self._producer = IdempotentProducer(self.config, settings, owner="Cluster")
            return self._producer

    def close(self, timeout_s: float) -> None:
        """End thread and clients; what is claimed stays so until it goes stale. Idempotent."""
        self._is_stopping = True
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        if self._producer is not None:
            self._producer.close(min(timeout_s, 5.0))
        self.offset_service.close(min(timeout_s, 5.0))
        if not self._thread.is_alive():
            self.log.close()
        self.admin.close()
        self.fail(StateError("this Cluster is closed"))

    def check(self) -> None:
        """Raise what ended the engine."""
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

    @property
    def is_ready(self) -> bool:
        """Every record that was there at the start is read."""
        return self.log.is_caught_up and bool(self.log.logs)

    # ---- what members use, under the lock

    def partition_of(self, topic: str) -> int:
        return coordination_partition(topic, self.topic.partitions)

    def add(self, session: ClaimSession) -> None:
        """Drive a claimant from now on, until it is over."""
        config = session.claimant.config
        self._sessions[session] = None
        self._by_place[config.group, config.topic, config.partition] = session
        self.drive(session)

    def held_ages(self) -> dict[tuple[str, ...], float]:
        """Seconds since the last heartbeat of what is held, by group, topic and partition."""
        with self.lock:
            now_s = self.log.clock.now_s()
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
            lease_clock_ms(),
            self.log.clock.now_s(),
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
            self._offsets_of(session).lookups.put(session)
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
        try:
            self.open_writer().produce(
                self.topic.name,
                encode_value(record),
                None,
                partition,
                ((INTERVAL_HEADER, str(self.interval_ms).encode()),),
                partial(self._delivered, report),
            )
            self._under_way += 1
        except (BrokerError, WireError) as error:
            _log.warning("a coordination record could not be sent", extra={"error": str(error)})
            report(-1)

    def fail(self, error: KafkaMQError) -> None:
        """Nothing can be claimed any more: everything is lost."""
        with self.lock:
            if self.error is None:
                self.error = error
            for session in list(self._sessions):
                session.listener.on_stop(session, Stop(End.UNCERTAIN, is_lost=True))
                self._finish(session, Finish(End.UNCERTAIN, session.claimant.position))
            self.changed.notify_all()

    def refuse(self, error: KafkaMQError) -> None:
        """Fail if a right is missing, which no waiting mends; other errors pass."""
        if meaning(error) is Meaning.FORBIDDEN:
            self._is_stopping = True  # it would only try again
            self.fail(error)

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                records = self.log.poll(self._wait_s())
                if self._producer is not None:
                    self._producer.serve(0)
                with self.lock:
                    was_ready = self.is_ready
                    found = self.log.fold(records)
                    if records or self.is_ready is not was_ready:
                        self._saw(found)
                    self._turn()
                self._check_topology()
                self.on_turn()
        except KafkaMQError as error:
            _log.error("claims end: %s", error)
            self.fail(error)
        except Exception as error:  # noqa: BLE001 - claims must not be believed without a reader
            _log.exception("claims end")
            self.fail(BrokerError(f"the claims' reader failed: {error!r}", is_fatal=True))

    def _wait_s(self) -> float:
        if self._under_way:
            return _BUSY_S
        return _IDLE_S if self.is_ready else _BUSY_S

    def _saw(self, records: list[MarshalRecord]) -> None:
        by_place, dirty = self._by_place, self._dirty
        for record in records:
            if not record.topic:  # ReleaseGroup
                dirty.update(
                    (t, None) for t in self._sessions if t.claimant.config.group == record.group
                )
                continue
            session = by_place.get((record.group, record.topic, record.partition))
            if session is not None:
                dirty[session] = None
        self.changed.notify_all()

    def _turn(self) -> None:
        now_ms = lease_clock_ms()
        self._skip_overdue(now_ms)
        due = [t for t in self._sessions if t in self._dirty or t.wake_ms <= now_ms]
        for session in due:
            if session in self._sessions:
                self.drive(session)
        if self.is_ready:
            for ticker in list(self._tickers):
                ticker(now_ms, self.log.clock.now_s())

    def _check_topology(self) -> None:
        if lease_clock_ms() >= self._topology_ms:
            self._topology_ms = lease_clock_ms() + _TOPOLOGY_MS
            self.log.check_topology()

    def _offsets_of(self, session: ClaimSession) -> GroupOffsetService:
        return self.offset_service.of(session.claimant.config.group)

    # ---- writing

    def _write(self, session: ClaimSession, step: Write) -> None:
        if step.commit_offset < 0 and not session.open_commits:
            self._produce(session, step)
            return
        session.open_commits += 1
        if not step.must_commit:
            patience_ms = min(2000, session.claimant.config.lease_ms // 4)
            self._overdue[session, step.ticket] = (lease_clock_ms() + patience_ms, step)
        self._offsets_of(session).commits.put((session, step))

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
            session.claimant.on_failed(step.ticket, lease_clock_ms())
        if session.fence is not None and not session.fence.is_usable:
            session.claimant.release(lease_clock_ms(), reason=End.FENCED)
        self.plan_soon(session)

    def _produce(self, session: ClaimSession, step: Write) -> None:
        def report(offset: int) -> None:
            if offset < 0:
                session.claimant.on_failed(step.ticket, lease_clock_ms())
            else:
                session.claimant.on_written(step.ticket, offset)
            self.plan_soon(session)

        self.send(session.coordination_partition, step.record, report)

    def plan_soon(self, session: ClaimSession) -> None:
        if session in self._sessions:  # others are driven by whoever made them
            self._dirty[session] = None

    def _delivered(
        self, report: Callable[[int], None], error: KafkaError | None, message: Record
    ) -> None:
        with self.lock:
            self._under_way -= 1
            offset = message.offset()
            is_known = error is None and offset is not None and offset >= 0
            report(offset if is_known and offset is not None else -1)
            if error is not None:
                _log.warning("a coordination record was not written", extra={"error": error.str()})
                self.refuse(broker_error(error, f"writing {self.topic.name}"))

    # ---- answers of the offset service, from its threads

    def _found(self, session: ClaimSession, earliest: int, latest: int, committed: int) -> None:
        with self.lock:
            session.offsets(earliest, latest, committed, lease_clock_ms())
            self._drive_if_ours(session)

    def _not_found(self, session: ClaimSession) -> None:
        with self.lock:
            session.claimant.on_lookup_failed(lease_clock_ms())
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
            self.offset_service.close_fence(config.group, session.fence)
        session.listener.on_finish(session, step)
